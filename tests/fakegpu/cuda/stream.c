/* Streams and events, as the API shows them. */
#include "engine.h"

static struct pool events = POOL(struct event, 262144);

static CUresult create(CUstream *stream, unsigned flags) {
    int device;
    CUresult result = context_device(&device);
    if (result) return result;
    if (!stream || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    engine_lock();
    *stream = (CUstream)stream_create(device, !(flags & CU_STREAM_NON_BLOCKING));
    engine_unlock();
    return *stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    DRIVER_CALL;
    RETURN(create(stream, flags));
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    DRIVER_CALL;
    (void)priority;
    RETURN(create(stream, flags));
}

CUresult cuStreamDestroy_v2(CUstream handle) {
    DRIVER_CALL;
    engine_lock();
    struct stream *stream = stream_check(handle);
    if (stream) stream_destroy(stream);
    engine_unlock();
    RETURN(stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

static CUresult synchronize(CUstream handle, bool per_thread) {
    engine_lock();
    struct stream *stream;
    CUresult result = stream_find(handle, per_thread, &stream);
    if (!result && stream->capture) result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (!result) stream_synchronize(stream);
    engine_unlock();
    return result;
}

CUresult cuStreamSynchronize(CUstream stream) {
    DRIVER_CALL;
    RETURN(synchronize(stream, false));
}

CUresult cuStreamSynchronize_ptsz(CUstream stream) {
    DRIVER_CALL;
    RETURN(synchronize(stream, true));
}

CUresult cuStreamQuery(CUstream handle) {
    DRIVER_CALL;
    engine_lock();
    struct stream *stream;
    CUresult result = stream_find(handle, false, &stream);
    if (!result && !stream_done(stream, stream->queued)) result = CUDA_ERROR_NOT_READY;
    engine_unlock();
    RETURN(result);
}

static CUresult wait_event(CUstream handle, CUevent event_handle, bool per_thread) {
    engine_lock();
    struct stream *stream;
    CUresult result = stream_find(handle, per_thread, &stream);
    struct event *event = pool_check(&events, event_handle);
    if (!result && !event) result = CUDA_ERROR_INVALID_HANDLE;
    /* One that was never recorded holds nobody up. */
    if (!result && event->stream)
        result = stream_submit(stream, &(struct op){.kind = OP_WAIT, .wait = {event->stream, event->count}});
    engine_unlock();
    return result;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    DRIVER_CALL;
    (void)flags;
    RETURN(wait_event(stream, event, false));
}

CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned flags) {
    DRIVER_CALL;
    (void)flags;
    RETURN(wait_event(stream, event, true));
}

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    DRIVER_CALL;
    int device;
    CUresult result = context_device(&device);
    if (result) RETURN(result);
    if (!event || flags > 7) RETURN(CUDA_ERROR_INVALID_VALUE);
    engine_lock();
    struct event *made = pool_take(&events);
    if (made) made->timing = !(flags & CU_EVENT_DISABLE_TIMING);
    engine_unlock();
    *event = (CUevent)made;
    RETURN(made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

CUresult cuEventDestroy_v2(CUevent handle) {
    DRIVER_CALL;
    engine_lock();
    struct event *event = pool_check(&events, handle);
    if (event) pool_return(&events, event);
    engine_unlock();
    RETURN(event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

static CUresult record(CUevent event_handle, CUstream handle, bool per_thread) {
    engine_lock();
    struct stream *stream;
    CUresult result = stream_find(handle, per_thread, &stream);
    struct event *event = pool_check(&events, event_handle);
    if (!result && !event) result = CUDA_ERROR_INVALID_HANDLE;
    if (!result) result = event_record(event, stream);
    engine_unlock();
    return result;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    DRIVER_CALL;
    RETURN(record(event, stream, false));
}

CUresult cuEventRecord_ptsz(CUevent event, CUstream stream) {
    DRIVER_CALL;
    RETURN(record(event, stream, true));
}

CUresult cuEventSynchronize(CUevent handle) {
    DRIVER_CALL;
    engine_lock();
    struct event *event = pool_check(&events, handle);
    if (event && event->stream) stream_await(event->stream, event->count);
    engine_unlock();
    RETURN(event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

static bool complete(const struct event *event) { return !event->stream || stream_done(event->stream, event->count); }

CUresult cuEventQuery(CUevent handle) {
    DRIVER_CALL;
    engine_lock();
    struct event *event = pool_check(&events, handle);
    CUresult result = !event ? CUDA_ERROR_INVALID_HANDLE : complete(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    engine_unlock();
    RETURN(result);
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start_handle, CUevent end_handle) {
    DRIVER_CALL;
    if (!milliseconds) RETURN(CUDA_ERROR_INVALID_VALUE);
    engine_lock();
    struct event *start = pool_check(&events, start_handle), *end = pool_check(&events, end_handle);
    CUresult result = CUDA_SUCCESS;
    if (!start || !end || !start->stream || !end->stream || !start->timing || !end->timing)
        result = CUDA_ERROR_INVALID_HANDLE;
    else if (!complete(start) || !complete(end))
        result = CUDA_ERROR_NOT_READY;
    else
        *milliseconds = (float)((double)(end->time_ns - start->time_ns) * 1e-6);
    engine_unlock();
    RETURN(result);
}
