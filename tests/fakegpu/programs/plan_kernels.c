#include "plan_kernels.h"

#include "fakegpu.h"
#include "train_count.h"

/* On a real driver it does not exist. */
#pragma weak fakegpu_set_kernel_ns

/* A stub launches the kernel that is registered under the stub's own address. */
#define DEFINE_STUB(name, us, x, y, threads)                                                           \
    void name(dim3 grid, dim3 block, void **args, size_t sharedBytes, cudaStream_t stream) {           \
        CUDA(cudaLaunchKernel, ((const void *)name, grid, block, args, sharedBytes, stream));          \
    }
PLAN_KERNELS(DEFINE_STUB)

static struct kernel {
    const char *name;
    void (*stub)(dim3 grid, dim3 block, void **args, size_t sharedBytes, cudaStream_t stream);
    unsigned us, x, y, threads, timed_x; /* timed_x: the grid that the fake's duration is for */
} kernels[PLAN_KERNEL_COUNT] = {
#define ENTRY(name, us, x, y, threads) {#name, name, us, x, y, threads, 0},
    PLAN_KERNELS(ENTRY)
};

void plan_launch(int number, unsigned grid_x, cudaStream_t stream) {
    static void *no_args[] = {NULL};
    struct kernel *kernel = &kernels[number];
    unsigned x = grid_x ? grid_x : kernel->x;
    if (fakegpu_set_kernel_ns && x != kernel->timed_x)
        fakegpu_set_kernel_ns(kernel->name, (int64_t)kernel->us * 1000 * x / kernel->x);
    kernel->timed_x = x;
    kernel->stub((dim3){x, kernel->y, 1}, (dim3){kernel->threads, 1, 1}, no_args, 0, stream);
}

static void **image_handle;

__attribute__((constructor)) static void register_kernels(void) {
    static char image[] = "plan";
    image_handle = __cudaRegisterFatBinary(image);
    for (int i = 0; i < PLAN_KERNEL_COUNT; i++)
        __cudaRegisterFunction(image_handle, (const char *)kernels[i].stub, (char *)kernels[i].name, kernels[i].name,
                               -1, NULL, NULL, NULL, NULL, NULL);
    __cudaRegisterFatBinaryEnd(image_handle);
}

__attribute__((destructor)) static void unregister_kernels(void) { __cudaUnregisterFatBinary(image_handle); }
