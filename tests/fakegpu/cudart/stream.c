/* Streams and events. */
#include "runtime.h"

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuStreamCreate(stream, CU_STREAM_DEFAULT));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuStreamCreate(stream, flags));
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuStreamCreateWithPriority(stream, flags, priority));
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuStreamDestroy_v2(stream));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuStreamSynchronize(stream));
}

cudaError_t cudaStreamSynchronize_ptsz(cudaStream_t stream) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuStreamSynchronize_ptsz(stream));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuStreamWaitEvent(stream, event, flags));
}

cudaError_t cudaStreamWaitEvent_ptsz(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuStreamWaitEvent_ptsz(stream, event, flags));
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuStreamQuery(stream));
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuEventCreate(event, CU_EVENT_DEFAULT));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuEventCreate(event, flags));
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuEventRecord(event, stream));
}

cudaError_t cudaEventRecord_ptsz(cudaEvent_t event, cudaStream_t stream) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuEventRecord_ptsz(event, stream));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuEventSynchronize(event));
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuEventQuery(event));
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuEventElapsedTime(milliseconds, start, end));
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuEventDestroy_v2(event));
}
