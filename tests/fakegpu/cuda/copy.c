/* Copies and fills. Time passes, bytes do not move: device memory has no content. (With FAKEGPU_COMPUTE the synchronous
 * copies between host and device move them.) */
#include <string.h>

#include "engine.h"
#include "settings.h"

#define COPY_LATENCY_NS 2000
#define DEVICE_BYTES_PER_NS 2000.0

int64_t copy_duration_ns(enum fakegpu_copy copy, uint64_t bytes) {
    double rate = copy == FAKEGPU_DTOD || copy == FAKEGPU_COPY_NONE ? DEVICE_BYTES_PER_NS : settings.copy_gbps;
    return COPY_LATENCY_NS + (int64_t)((double)bytes / rate);
}

enum wait { ASYNCHRONOUS, SYNCHRONOUS };

static CUresult move(enum fakegpu_copy copy, const void *host, bool uses_host, uint64_t bytes, CUstream handle,
                     bool per_thread, enum wait wait, uint64_t correlation) {
    if (uses_host && !host && bytes) return CUDA_ERROR_INVALID_VALUE;
    engine_lock();
    struct stream *stream;
    CUresult result = stream_find(handle, per_thread, &stream);
    if (!result && wait == SYNCHRONOUS && stream->capture) result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (!result && bytes) {
        int64_t duration_ns = (int64_t)((double)copy_duration_ns(copy, bytes) * engine_jitter());
        result = stream_submit(stream, &(struct op){.kind = copy == FAKEGPU_COPY_NONE ? OP_SET : OP_COPY,
                                                    .copy = copy, .correlation = correlation, .bytes = bytes,
                                                    .duration_ns = duration_ns});
    }
    if (!result && wait == SYNCHRONOUS) stream_synchronize(stream);
    engine_unlock();
    return result;
}

#define TO_DEVICE(per_thread, wait) move(FAKEGPU_HTOD, src, true, bytes, stream, per_thread, wait, CORRELATION)
#define TO_HOST(per_thread, wait) move(FAKEGPU_DTOH, dst, true, bytes, stream, per_thread, wait, CORRELATION)
#define IN_DEVICE(per_thread, wait) move(FAKEGPU_DTOD, NULL, false, bytes, stream, per_thread, wait, CORRELATION)
#define FILL(width, per_thread) \
    move(FAKEGPU_COPY_NONE, NULL, false, (uint64_t)count * (width), stream, per_thread, ASYNCHRONOUS, CORRELATION)

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    DRIVER_CALL;
    (void)dst, (void)src;
    RETURN(IN_DEVICE(false, ASYNCHRONOUS));
}

CUresult cuMemcpyAsync_ptsz(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    DRIVER_CALL;
    (void)dst, (void)src;
    RETURN(IN_DEVICE(true, ASYNCHRONOUS));
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream) {
    DRIVER_CALL;
    (void)dst;
    RETURN(TO_DEVICE(false, ASYNCHRONOUS));
}

CUresult cuMemcpyHtoDAsync_v2_ptsz(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream) {
    DRIVER_CALL;
    (void)dst;
    RETURN(TO_DEVICE(true, ASYNCHRONOUS));
}

CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    DRIVER_CALL;
    (void)src;
    RETURN(TO_HOST(false, ASYNCHRONOUS));
}

CUresult cuMemcpyDtoHAsync_v2_ptsz(void *dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    DRIVER_CALL;
    (void)src;
    RETURN(TO_HOST(true, ASYNCHRONOUS));
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    DRIVER_CALL;
    (void)dst, (void)src;
    RETURN(IN_DEVICE(false, ASYNCHRONOUS));
}

CUresult cuMemcpyDtoDAsync_v2_ptsz(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    DRIVER_CALL;
    (void)dst, (void)src;
    RETURN(IN_DEVICE(true, ASYNCHRONOUS));
}

CUresult cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dstContext, CUdeviceptr src, CUcontext srcContext, size_t bytes,
                           CUstream stream) {
    DRIVER_CALL;
    (void)dst, (void)src;
    if (!dstContext || !srcContext) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    RETURN(move(FAKEGPU_PTOP, NULL, false, bytes, stream, false, ASYNCHRONOUS, CORRELATION));
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream stream) {
    DRIVER_CALL;
    if (!copy || (copy->srcPitch && copy->srcPitch < copy->WidthInBytes) ||
        (copy->dstPitch && copy->dstPitch < copy->WidthInBytes))
        RETURN(CUDA_ERROR_INVALID_VALUE);
    enum { HOST = 1 };
    enum fakegpu_copy kind = copy->srcMemoryType == HOST   ? FAKEGPU_HTOD
                             : copy->dstMemoryType == HOST ? FAKEGPU_DTOH
                                                           : FAKEGPU_DTOD;
    RETURN(move(kind, NULL, false, copy->WidthInBytes * copy->Height, stream, false, ASYNCHRONOUS, CORRELATION));
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t count, CUstream stream) {
    DRIVER_CALL;
    (void)dst, (void)value;
    RETURN(FILL(1, false));
}

CUresult cuMemsetD8Async_ptsz(CUdeviceptr dst, unsigned char value, size_t count, CUstream stream) {
    DRIVER_CALL;
    (void)dst, (void)value;
    RETURN(FILL(1, true));
}

CUresult cuMemsetD32Async(CUdeviceptr dst, unsigned value, size_t count, CUstream stream) {
    DRIVER_CALL;
    (void)dst, (void)value;
    RETURN(FILL(4, false));
}

CUresult cuMemsetD32Async_ptsz(CUdeviceptr dst, unsigned value, size_t count, CUstream stream) {
    DRIVER_CALL;
    (void)dst, (void)value;
    RETURN(FILL(4, true));
}

static void with_content(CUresult result, CUdeviceptr there, void *to, const void *from, size_t bytes) {
    if (result || !settings.compute) return;
    engine_lock();
    if (from) memory_back(there, bytes);
    void *content = memory_content(there, bytes);
    if (content) memcpy(to ? to : content, to ? content : from, bytes);
    engine_unlock();
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t bytes) {
    DRIVER_CALL;
    CUstream stream = CU_STREAM_LEGACY;
    CUresult result = TO_DEVICE(false, SYNCHRONOUS);
    with_content(result, dst, NULL, src, bytes);
    RETURN(result);
}

CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t bytes) {
    DRIVER_CALL;
    CUstream stream = CU_STREAM_LEGACY;
    CUresult result = TO_HOST(false, SYNCHRONOUS);
    with_content(result, src, dst, NULL, bytes);
    RETURN(result);
}

CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
    DRIVER_CALL;
    (void)dst, (void)src;
    CUstream stream = CU_STREAM_LEGACY;
    RETURN(IN_DEVICE(false, SYNCHRONOUS));
}
