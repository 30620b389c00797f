/* Memory. */
#include "runtime.h"

/* The runtime gives NULL for nothing; the driver refuses it. */
static cudaError_t nothing(void **pointer) {
    *pointer = NULL;
    return cudaSuccess;
}

#define ALLOCATE(driver_call)                                       \
    do {                                                            \
        if (!pointer) RETURN(runtime_error(cudaErrorInvalidValue)); \
        if (!bytes) RETURN(nothing(pointer));                       \
        RETURN_DRIVER(driver_call);                                 \
    } while (0)

_Static_assert(sizeof(void *) == sizeof(CUdeviceptr), "pointers fit");

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    RUNTIME_CALL;
    ALLOCATE(cuMemAlloc_v2((CUdeviceptr *)pointer, bytes));
}

cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned flags) {
    RUNTIME_CALL;
    ALLOCATE(cuMemAllocManaged((CUdeviceptr *)pointer, bytes, flags));
}

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) {
    RUNTIME_CALL;
    ALLOCATE(cuMemAllocAsync((CUdeviceptr *)pointer, bytes, stream));
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
    RUNTIME_CALL;
    ALLOCATE(cuMemHostAlloc(pointer, bytes, 0));
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    RUNTIME_CALL;
    ALLOCATE(cuMemHostAlloc(pointer, bytes, flags));
}

cudaError_t cudaFree(void *pointer) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuMemFree_v2(DEVICE_POINTER(pointer)));
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuMemFreeAsync(DEVICE_POINTER(pointer), stream));
}

cudaError_t cudaFreeHost(void *pointer) {
    RUNTIME_CALL;
    RETURN_DRIVER(pointer ? cuMemFreeHost(pointer) : CUDA_SUCCESS);
}
