#include "train_kernels.h"

#include "train_count.h"

/* A stub launches the kernel that is registered under the stub's own address. */
#define DEFINE_STUB(name)                                                                              \
    void name(dim3 grid, dim3 block, void **args, size_t sharedBytes, cudaStream_t stream) {           \
        CUDA(cudaLaunchKernel, ((const void *)name, grid, block, args, sharedBytes, stream));          \
    }
TRAIN_KERNELS(DEFINE_STUB)

static void **image_handle;

__attribute__((constructor)) static void register_kernels(void) {
    static char image[] = "train";
    image_handle = __cudaRegisterFatBinary(image);
#define REGISTER(name)                                                                                           \
    __cudaRegisterFunction(image_handle, (const char *)name, (char *)#name, #name, -1, NULL, NULL, NULL, NULL, NULL);
    TRAIN_KERNELS(REGISTER)
    __cudaRegisterFatBinaryEnd(image_handle);
}

__attribute__((destructor)) static void unregister_kernels(void) { __cudaUnregisterFatBinary(image_handle); }
