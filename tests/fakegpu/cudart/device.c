/* Devices, the lazily made context, errors. */
#include "runtime.h"

#include <stdbool.h>

static __thread int thread_device;
static __thread int context_of = -1; /* the device whose context this thread has */
static __thread cudaError_t last_error;

cudaError_t runtime_error(cudaError_t error) {
    /* Not an error, only an answer. */
    if (error && error != CUDA_ERROR_NOT_READY) last_error = error;
    return error;
}

cudaError_t runtime_ready(void) {
    if (context_of == thread_device) return cudaSuccess;
    CUcontext context;
    CUresult result = cuInit(0);
    if (!result) result = cuDevicePrimaryCtxRetain(&context, thread_device);
    if (!result) result = cuCtxSetCurrent(context);
    if (!result) context_of = thread_device;
    return result;
}

cudaError_t cudaSetDevice(int device) {
    RUNTIME_CALL;
    int count, before = thread_device;
    CUresult result = cuInit(0);
    if (!result) result = cuDeviceGetCount(&count);
    if (!result && (device < 0 || device >= count)) result = CUDA_ERROR_INVALID_DEVICE;
    if (result) RETURN(runtime_error(result));
    thread_device = device;
    result = runtime_ready();
    if (result) thread_device = before;
    RETURN(runtime_error(result));
}

cudaError_t cudaGetDevice(int *device) {
    RUNTIME_CALL;
    if (!device) RETURN(runtime_error(cudaErrorInvalidValue));
    *device = thread_device;
    RETURN(cudaSuccess);
}

cudaError_t cudaGetDeviceCount(int *count) {
    RUNTIME_CALL;
    CUresult result = cuInit(0);
    RETURN(runtime_error(result ? result : cuDeviceGetCount(count)));
}

cudaError_t cudaDeviceSynchronize(void) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuCtxSynchronize());
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case CUDA_ERROR_INVALID_VALUE: return "invalid argument";
    case CUDA_ERROR_OUT_OF_MEMORY: return "out of memory";
    case CUDA_ERROR_INVALID_CONFIGURATION: return "invalid configuration argument";
    case CUDA_ERROR_INVALID_DEVICE_FUNCTION: return "invalid device function";
    case CUDA_ERROR_INVALID_DEVICE: return "invalid device ordinal";
    case CUDA_ERROR_INVALID_HANDLE: return "invalid resource handle";
    case CUDA_ERROR_NOT_FOUND: return "named symbol not found";
    case CUDA_ERROR_NOT_READY: return "device not ready";
    default: return "unrecognized error code";
    }
}
