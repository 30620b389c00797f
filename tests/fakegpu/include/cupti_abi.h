/* The part of CUPTI's C interface that the fake libcupti speaks: own declarations of publicly documented signatures.
 * Records have no declaration here: their layouts come from cupti-python when the fake is built (layouts.py). */
#ifndef FAKEGPU_CUPTI_ABI_H
#define FAKEGPU_CUPTI_ABI_H

#include "cuda_abi.h"

typedef int CUptiResult;
typedef struct CUpti_Subscriber_st *CUpti_SubscriberHandle;
typedef uint32_t CUpti_CallbackId;

enum {
    CUPTI_SUCCESS = 0,
    CUPTI_ERROR_INVALID_PARAMETER = 1,
    CUPTI_ERROR_INVALID_OPERATION = 7,
    CUPTI_ERROR_OUT_OF_MEMORY = 8,
    CUPTI_ERROR_PARAMETER_SIZE_NOT_SUFFICIENT = 10,
    CUPTI_ERROR_MAX_LIMIT_REACHED = 12,
    CUPTI_ERROR_NOT_INITIALIZED = 15,
    CUPTI_ERROR_INVALID_KIND = 21,
    CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED = 39,
    CUPTI_ERROR_UNKNOWN = 999,
};

enum { CUPTI_CB_DOMAIN_DRIVER_API = 1, CUPTI_CB_DOMAIN_RUNTIME_API = 2, CUPTI_CB_DOMAINS = 7 };
enum { CUPTI_API_ENTER = 0, CUPTI_API_EXIT = 1 };
enum { CUPTI_ACTIVITY_FLAG_FLUSH_FORCED = 1 };

enum {
    CUPTI_ACTIVITY_KIND_MEMCPY = 1,
    CUPTI_ACTIVITY_KIND_MEMSET = 2,
    CUPTI_ACTIVITY_KIND_KERNEL = 3,
    CUPTI_ACTIVITY_KIND_DRIVER = 4,
    CUPTI_ACTIVITY_KIND_RUNTIME = 5,
    CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL = 10,
    CUPTI_ACTIVITY_KIND_OVERHEAD = 17,
    CUPTI_ACTIVITY_KIND_MEMCPY2 = 22,
    CUPTI_ACTIVITY_KIND_MODULE = 27,
    CUPTI_ACTIVITY_KIND_SYNCHRONIZATION = 38,
    CUPTI_ACTIVITY_KIND_JIT = 52,
    CUPTI_ACTIVITY_KINDS = 60,
};

enum { CUPTI_ACTIVITY_ATTR_ZEROED_OUT_BUFFER = 5, CUPTI_ACTIVITY_ATTRS = 24 };
enum { CUPTI_ACTIVITY_OVERHEAD_CUPTI_BUFFER_FLUSH = 1 << 16, CUPTI_ACTIVITY_OBJECT_THREAD = 2 };
enum { CUPTI_SYNCHRONIZATION_INVALID_VALUE = -1 };

/* `data` points at the callback data, `site` first. */
typedef void (*CUpti_CallbackFunc)(void *user, int domain, CUpti_CallbackId id, const void *data);
typedef void (*CUpti_BuffersCallbackRequestFunc)(uint8_t **buffer, size_t *size, size_t *maxNumRecords);
typedef void (*CUpti_BuffersCallbackCompleteFunc)(CUcontext context, uint32_t streamId, uint8_t *buffer, size_t size,
                                                  size_t validSize);
typedef uint64_t (*CUpti_TimestampCallbackFunc)(void);

#define CUPTI(name, args) FAKEGPU_EXPORT CUptiResult name args

CUPTI(cuptiGetVersion, (uint32_t *version));
CUPTI(cuptiGetResultString, (CUptiResult result, const char **text));
CUPTI(cuptiGetTimestamp, (uint64_t *timestamp));
CUPTI(cuptiFinalize, (void));

CUPTI(cuptiSubscribe, (CUpti_SubscriberHandle * subscriber, CUpti_CallbackFunc callback, void *user));
CUPTI(cuptiUnsubscribe, (CUpti_SubscriberHandle subscriber));
CUPTI(cuptiEnableCallback, (uint32_t enable, CUpti_SubscriberHandle subscriber, int domain, CUpti_CallbackId id));
CUPTI(cuptiEnableDomain, (uint32_t enable, CUpti_SubscriberHandle subscriber, int domain));

CUPTI(cuptiActivityRegisterCallbacks, (CUpti_BuffersCallbackRequestFunc request,
                                       CUpti_BuffersCallbackCompleteFunc complete));
CUPTI(cuptiActivityRegisterTimestampCallback, (CUpti_TimestampCallbackFunc clock));
CUPTI(cuptiActivityEnable, (int kind));
CUPTI(cuptiActivityDisable, (int kind));
CUPTI(cuptiActivityEnableRuntimeApi, (CUpti_CallbackId id, uint8_t enable));
CUPTI(cuptiActivityEnableDriverApi, (CUpti_CallbackId id, uint8_t enable));
CUPTI(cuptiActivityFlushAll, (uint32_t flag));
CUPTI(cuptiActivityFlushPeriod, (uint32_t milliseconds));
CUPTI(cuptiActivityGetNextRecord, (uint8_t * buffer, size_t validSize, void **record));
CUPTI(cuptiActivityGetNumDroppedRecords, (CUcontext context, uint32_t streamId, size_t *dropped));
CUPTI(cuptiActivitySetAttribute, (int attribute, size_t *size, void *value));
CUPTI(cuptiActivityGetAttribute, (int attribute, size_t *size, void *value));

#endif
