/* What is on and off, flushes, and the other calls that steer. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "cupti.h"

static pthread_mutex_t control = PTHREAD_MUTEX_INITIALIZER;
static CUpti_TimestampCallbackFunc clock_callback;
static bool observing, recording_any, recorded_ever; /* ever: since the last cuptiFinalize */
static size_t attributes[CUPTI_ACTIVITY_ATTRS];

static int64_t read_clock(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* From CLOCK_MONOTONIC to the client's clock, or to CLOCK_REALTIME. Exactly 0 for a client that gives the former. */
static int64_t clock_offset(void) {
    int64_t best = 0, best_width = INT64_MAX;
    for (int i = 0; i < 5; i++) {
        int64_t before = read_clock(CLOCK_MONOTONIC);
        int64_t theirs = clock_callback ? (int64_t)clock_callback() : read_clock(CLOCK_REALTIME);
        int64_t after = read_clock(CLOCK_MONOTONIC);
        if (before <= theirs && theirs <= after) return 0;
        if (after - before < best_width) {
            best_width = after - before;
            best = theirs - (before + after) / 2;
        }
    }
    return best;
}

static bool any_recorded(void) {
    return memchr(recording.kinds, true, sizeof recording.kinds) ||
           memchr(recording.api, true, sizeof recording.api);
}

static bool any_told(void) {
    const struct subscriber *subscriber = subscribed;
    return subscriber && memchr(subscriber->enabled, true, sizeof subscriber->enabled);
}

bool control_lock(void) {
    if (in_buffer_callback()) {
        misuse("a call of CUPTI inside a buffer callback");
        return false;
    }
    pthread_mutex_lock(&control);
    return true;
}

void control_unlock(void) {
    /* Work that has yet to end gets its records after everything was disabled, too: only cuptiFinalize takes the
     * observer out, just as the real library keeps slowing a program down until then. */
    bool record = any_recorded(), observe = (recorded_ever |= record) || any_told();
    if (record && !recording_any) {
        records_lock();
        recording.clock_offset_ns = clock_offset();
        records_unlock();
    }
    recording_any = record;
    if (observe != observing) {
        fakegpu_observe(observe ? &records_observer : NULL);
        if (cupti_settings.reserve) fakegpu_observe_queue(observe ? on_queued : NULL);
    }
    observing = observe;
    pthread_mutex_unlock(&control);
}

/* ---- versions and texts ---- */

CUptiResult cuptiGetVersion(uint32_t *version) {
    FAIL_IF_PLANTED;
    if (!version) return CUPTI_ERROR_INVALID_PARAMETER;
    *version = (uint32_t)cupti_settings.version;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiGetResultString(CUptiResult result, const char **text) {
    if (!text) return CUPTI_ERROR_INVALID_PARAMETER;
    switch (result) {
    case CUPTI_SUCCESS: *text = "CUPTI_SUCCESS"; break;
    case CUPTI_ERROR_INVALID_PARAMETER: *text = "CUPTI_ERROR_INVALID_PARAMETER"; break;
    case CUPTI_ERROR_INVALID_OPERATION: *text = "CUPTI_ERROR_INVALID_OPERATION"; break;
    case CUPTI_ERROR_MAX_LIMIT_REACHED: *text = "CUPTI_ERROR_MAX_LIMIT_REACHED"; break;
    case CUPTI_ERROR_INVALID_KIND: *text = "CUPTI_ERROR_INVALID_KIND"; break;
    case CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED:
        *text = "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED";
        break;
    default: *text = "CUPTI_ERROR_UNKNOWN";
    }
    return CUPTI_SUCCESS;
}

CUptiResult cuptiGetTimestamp(uint64_t *timestamp) {
    FAIL_IF_PLANTED;
    if (!timestamp) return CUPTI_ERROR_INVALID_PARAMETER;
    *timestamp = clock_callback ? clock_callback() : (uint64_t)read_clock(CLOCK_REALTIME);
    return CUPTI_SUCCESS;
}

/* ---- what is recorded ---- */

CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc request,
                                           CUpti_BuffersCallbackCompleteFunc complete) {
    FAIL_IF_PLANTED;
    if (!request || !complete) return CUPTI_ERROR_INVALID_PARAMETER;
    if (!control_lock()) return CUPTI_ERROR_INVALID_OPERATION;
    records_lock();
    buffers_callbacks(request, complete);
    records_unlock();
    control_unlock();
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc clock) {
    FAIL_IF_PLANTED;
    if (!control_lock()) return CUPTI_ERROR_INVALID_OPERATION;
    clock_callback = clock; /* in force from the next time that recording begins */
    control_unlock();
    return CUPTI_SUCCESS;
}

static CUptiResult set_kind(int kind, bool on) {
    if (kind <= 0 || kind >= CUPTI_ACTIVITY_KINDS) return CUPTI_ERROR_INVALID_KIND;
    if (!control_lock()) return CUPTI_ERROR_INVALID_OPERATION;
    records_lock();
    if (kind == CUPTI_ACTIVITY_KIND_DRIVER || kind == CUPTI_ACTIVITY_KIND_RUNTIME) {
        bool *ids = recording.api[kind == CUPTI_ACTIVITY_KIND_DRIVER ? FAKEGPU_DRIVER : FAKEGPU_RUNTIME];
        switch_all(ids + 1, MAX_FUNCTION_ID - 1, on);
    } else {
        if (on && !recording.kinds[kind]) {
            recording.on_ns[kind] = read_clock(CLOCK_MONOTONIC);
            recording.off_ns[kind] = INT64_MAX;
        } else if (!on && recording.kinds[kind]) {
            recording.off_ns[kind] = read_clock(CLOCK_MONOTONIC);
        }
        switch_all(&recording.kinds[kind], 1, on);
    }
    records_unlock();
    control_unlock();
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityEnable(int kind) {
    FAIL_IF_PLANTED;
    return set_kind(kind, true);
}

CUptiResult cuptiActivityDisable(int kind) {
    FAIL_IF_PLANTED;
    return set_kind(kind, false);
}

static CUptiResult set_function(enum fakegpu_domain domain, CUpti_CallbackId id, bool on) {
    if (!id || id >= MAX_FUNCTION_ID) return CUPTI_ERROR_INVALID_PARAMETER;
    if (!control_lock()) return CUPTI_ERROR_INVALID_OPERATION;
    records_lock();
    switch_all(&recording.api[domain][id], 1, on);
    records_unlock();
    control_unlock();
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityEnableRuntimeApi(CUpti_CallbackId id, uint8_t enable) {
    FAIL_IF_PLANTED;
    return set_function(FAKEGPU_RUNTIME, id, enable);
}

CUptiResult cuptiActivityEnableDriverApi(CUpti_CallbackId id, uint8_t enable) {
    FAIL_IF_PLANTED;
    return set_function(FAKEGPU_DRIVER, id, enable);
}

CUptiResult cuptiActivitySetAttribute(int attribute, size_t *size, void *value) {
    FAIL_IF_PLANTED;
    if (attribute < 0 || attribute >= CUPTI_ACTIVITY_ATTRS || !size || !value) return CUPTI_ERROR_INVALID_PARAMETER;
    if (!*size || *size > sizeof *attributes) return CUPTI_ERROR_PARAMETER_SIZE_NOT_SUFFICIENT;
    if (!control_lock()) return CUPTI_ERROR_INVALID_OPERATION;
    attributes[attribute] = 0;
    memcpy(&attributes[attribute], value, *size);
    if (attribute == CUPTI_ACTIVITY_ATTR_ZEROED_OUT_BUFFER) {
        records_lock();
        buffers_zeroed = attributes[attribute];
        records_unlock();
    }
    control_unlock();
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityGetAttribute(int attribute, size_t *size, void *value) {
    FAIL_IF_PLANTED;
    if (attribute < 0 || attribute >= CUPTI_ACTIVITY_ATTRS || !size || !value) return CUPTI_ERROR_INVALID_PARAMETER;
    if (!*size || *size > sizeof *attributes) return CUPTI_ERROR_PARAMETER_SIZE_NOT_SUFFICIENT;
    memcpy(value, &attributes[attribute], *size);
    return CUPTI_SUCCESS;
}

/* ---- getting it ---- */

CUptiResult cuptiActivityFlushAll(uint32_t flag) {
    FAIL_IF_PLANTED;
    if (in_buffer_callback()) {
        misuse("cuptiActivityFlushAll inside a buffer callback, where it would wait for itself");
        return CUPTI_ERROR_INVALID_OPERATION;
    }
    int64_t start_ns = read_clock(CLOCK_MONOTONIC);
    if (cupti_settings.flush_delay_ms)
        nanosleep(&(struct timespec){cupti_settings.flush_delay_ms / 1000,
                                     cupti_settings.flush_delay_ms % 1000 * 1000000}, NULL);
    fakegpu_deliver();
    record_overhead(start_ns, read_clock(CLOCK_MONOTONIC));
    buffers_flush(flag & CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    return CUPTI_SUCCESS;
}

/* Full buffers go out by themselves as soon as their records are complete, so there is nothing left to do. */
CUptiResult cuptiActivityFlushPeriod(uint32_t milliseconds) {
    FAIL_IF_PLANTED;
    (void)milliseconds;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityGetNextRecord(uint8_t *buffer, size_t validSize, void **record) {
    FAIL_IF_PLANTED;
    if (!buffer || !record) return CUPTI_ERROR_INVALID_PARAMETER;
    uint8_t *at = *record ? *record : buffer, *end = buffer + validSize;
    int kind;
    if (*record) {
        memcpy(&kind, at, sizeof kind);
        at += record_size(kind);
    }
    if (at + sizeof kind > end) return CUPTI_ERROR_MAX_LIMIT_REACHED;
    memcpy(&kind, at, sizeof kind);
    size_t size = record_size(kind);
    if (!size) return CUPTI_ERROR_INVALID_KIND;
    if (at + size > end) return CUPTI_ERROR_MAX_LIMIT_REACHED;
    *record = at;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext context, uint32_t streamId, size_t *dropped) {
    FAIL_IF_PLANTED;
    (void)context, (void)streamId;
    if (!dropped) return CUPTI_ERROR_INVALID_PARAMETER;
    bool have = in_buffer_callback();
    if (!have) records_lock();
    *dropped = buffers_dropped();
    if (!have) records_unlock();
    return CUPTI_SUCCESS;
}

CUptiResult cuptiFinalize(void) {
    FAIL_IF_PLANTED;
    if (!in_api_exit()) misuse("cuptiFinalize outside a callback at the exit of a call");
    if (!control_lock()) return CUPTI_ERROR_INVALID_OPERATION;
    callbacks_forget();
    records_forget();
    buffers_forget();
    memset(attributes, 0, sizeof attributes);
    clock_callback = NULL;
    recorded_ever = false;
    control_unlock();
    return CUPTI_SUCCESS;
}
