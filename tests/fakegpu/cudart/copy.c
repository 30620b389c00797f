/* Copies and fills: each kind goes to the driver call of its own. */
#include "runtime.h"

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    RUNTIME_CALL;
    switch (kind) {
    case cudaMemcpyHostToDevice: RETURN_DRIVER(cuMemcpyHtoDAsync_v2(DEVICE_POINTER(dst), src, bytes, stream));
    case cudaMemcpyDeviceToHost: RETURN_DRIVER(cuMemcpyDtoHAsync_v2(dst, DEVICE_POINTER(src), bytes, stream));
    case cudaMemcpyDeviceToDevice:
        RETURN_DRIVER(cuMemcpyDtoDAsync_v2(DEVICE_POINTER(dst), DEVICE_POINTER(src), bytes, stream));
    case cudaMemcpyHostToHost:
    case cudaMemcpyDefault: RETURN_DRIVER(cuMemcpyAsync(DEVICE_POINTER(dst), DEVICE_POINTER(src), bytes, stream));
    }
    RETURN(runtime_error(cudaErrorInvalidValue));
}

cudaError_t cudaMemcpyAsync_ptsz(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                                 cudaStream_t stream) {
    RUNTIME_CALL;
    switch (kind) {
    case cudaMemcpyHostToDevice: RETURN_DRIVER(cuMemcpyHtoDAsync_v2_ptsz(DEVICE_POINTER(dst), src, bytes, stream));
    case cudaMemcpyDeviceToHost: RETURN_DRIVER(cuMemcpyDtoHAsync_v2_ptsz(dst, DEVICE_POINTER(src), bytes, stream));
    case cudaMemcpyDeviceToDevice:
        RETURN_DRIVER(cuMemcpyDtoDAsync_v2_ptsz(DEVICE_POINTER(dst), DEVICE_POINTER(src), bytes, stream));
    case cudaMemcpyHostToHost:
    case cudaMemcpyDefault:
        RETURN_DRIVER(cuMemcpyAsync_ptsz(DEVICE_POINTER(dst), DEVICE_POINTER(src), bytes, stream));
    }
    RETURN(runtime_error(cudaErrorInvalidValue));
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind) {
    RUNTIME_CALL;
    switch (kind) {
    case cudaMemcpyHostToDevice: RETURN_DRIVER(cuMemcpyHtoD_v2(DEVICE_POINTER(dst), src, bytes));
    case cudaMemcpyDeviceToHost: RETURN_DRIVER(cuMemcpyDtoH_v2(dst, DEVICE_POINTER(src), bytes));
    case cudaMemcpyDeviceToDevice:
    case cudaMemcpyHostToHost:
    case cudaMemcpyDefault: RETURN_DRIVER(cuMemcpy(DEVICE_POINTER(dst), DEVICE_POINTER(src), bytes));
    }
    RETURN(runtime_error(cudaErrorInvalidValue));
}

cudaError_t cudaMemcpyPeerAsync(void *dst, int dstDevice, const void *src, int srcDevice, size_t bytes,
                                cudaStream_t stream) {
    RUNTIME_CALL;
    cudaError_t error = runtime_ready();
    CUcontext dstContext, srcContext;
    if (!error) error = cuDevicePrimaryCtxRetain(&dstContext, dstDevice);
    if (!error) error = cuDevicePrimaryCtxRetain(&srcContext, srcDevice);
    if (!error)
        error = cuMemcpyPeerAsync(DEVICE_POINTER(dst), dstContext, DEVICE_POINTER(src), srcContext, bytes, stream);
    RETURN(runtime_error(error));
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dstPitch, const void *src, size_t srcPitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    RUNTIME_CALL;
    enum { HOST = 1, DEVICE = 2 };
    CUDA_MEMCPY2D copy = {
        .srcMemoryType = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost ? HOST : DEVICE,
        .srcHost = src,
        .srcDevice = DEVICE_POINTER(src),
        .srcPitch = srcPitch,
        .dstMemoryType = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost ? HOST : DEVICE,
        .dstHost = dst,
        .dstDevice = DEVICE_POINTER(dst),
        .dstPitch = dstPitch,
        .WidthInBytes = width,
        .Height = height,
    };
    RETURN_DRIVER(cuMemcpy2DAsync_v2(&copy, stream));
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuMemsetD8Async(DEVICE_POINTER(dst), (unsigned char)value, bytes, stream));
}

cudaError_t cudaMemsetAsync_ptsz(void *dst, int value, size_t bytes, cudaStream_t stream) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuMemsetD8Async_ptsz(DEVICE_POINTER(dst), (unsigned char)value, bytes, stream));
}

cudaError_t cudaMemset(void *dst, int value, size_t bytes) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuMemsetD8Async(DEVICE_POINTER(dst), (unsigned char)value, bytes, NULL));
}
