/* The subscriber, and what is reported to it of each call that it asked about. */
#include <stdlib.h>

#include "cupti.h"

struct subscriber *_Atomic subscribed;

static __thread int exits; /* how many callbacks at exits this thread is in */
/* What `correlationData` points to: kept from a call's entry to its exit. A driver call lies inside a runtime call. */
static __thread uint64_t correlation_data[3];

bool in_api_exit(void) { return exits > 0; }

void callbacks_tell(int site, const struct fakegpu_api_record *call, CUpti_CallbackId id) {
    struct subscriber *subscriber = subscribed;
    if (!id || !subscriber || !is_on(&subscriber->enabled[call->domain][id])) return;
    uint64_t data[16] = {0};
    const struct layout *layout = layout_of(R_CALLBACK);
    uint8_t *bytes = (uint8_t *)data;
    if (site == CUPTI_API_ENTER) correlation_data[call->domain] = 0;
    put(bytes, layout, F_CALLBACK_SITE, (uint64_t)site);
    put(bytes, layout, F_FUNCTION_NAME, (uintptr_t)call->name);
    put(bytes, layout, F_CORRELATION_DATA, (uintptr_t)&correlation_data[call->domain]);
    put(bytes, layout, F_CORRELATION_ID, call->correlation);
    put(bytes, layout, F_CONTEXT_UID, 1);
    if (site == CUPTI_API_EXIT) put(bytes, layout, F_FUNCTION_RETURN_VALUE, (uintptr_t)&call->result);
    exits += site == CUPTI_API_EXIT;
    subscriber->callback(subscriber->user, (int)call->domain, id, data);
    exits -= site == CUPTI_API_EXIT;
}

/* ---- the API ---- */

CUptiResult cuptiSubscribe(CUpti_SubscriberHandle *handle, CUpti_CallbackFunc callback, void *user) {
    FAIL_IF_PLANTED;
    static int64_t refused;
    if (!handle || !callback) return CUPTI_ERROR_INVALID_PARAMETER;
    if (!control_lock()) return CUPTI_ERROR_INVALID_OPERATION;
    bool busy = cupti_settings.busy == 1 || refused < cupti_settings.busy;
    refused += busy;
    CUptiResult result = busy || subscribed ? CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED : CUPTI_SUCCESS;
    if (!result) {
        /* Never freed: another thread may be about to call it when it is unsubscribed. */
        struct subscriber *fresh = calloc(1, sizeof *fresh);
        if (!fresh) abort();
        fresh->callback = callback;
        fresh->user = user;
        subscribed = fresh;
        *handle = (CUpti_SubscriberHandle)fresh;
    }
    control_unlock();
    return result;
}

void callbacks_forget(void) { subscribed = NULL; }

static bool is_subscriber(CUpti_SubscriberHandle handle) {
    return handle && (struct subscriber *)handle == subscribed;
}

CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle handle) {
    FAIL_IF_PLANTED;
    if (!control_lock()) return CUPTI_ERROR_INVALID_OPERATION;
    bool good = is_subscriber(handle);
    if (good) callbacks_forget();
    control_unlock();
    return good ? CUPTI_SUCCESS : CUPTI_ERROR_INVALID_PARAMETER;
}

/* Functions `first` to `last` of a domain. Domains other than the two of calls exist, but nothing happens in them. */
static CUptiResult enable(uint32_t on, CUpti_SubscriberHandle handle, int domain, uint32_t first, uint32_t last) {
    if (domain < 1 || domain >= CUPTI_CB_DOMAINS || last >= MAX_FUNCTION_ID) return CUPTI_ERROR_INVALID_PARAMETER;
    if (!control_lock()) return CUPTI_ERROR_INVALID_OPERATION;
    bool good = is_subscriber(handle);
    if (good && domain <= CUPTI_CB_DOMAIN_RUNTIME_API)
        switch_all(&((struct subscriber *)handle)->enabled[domain][first], last - first + 1, on);
    control_unlock();
    return good ? CUPTI_SUCCESS : CUPTI_ERROR_INVALID_PARAMETER;
}

CUptiResult cuptiEnableCallback(uint32_t on, CUpti_SubscriberHandle handle, int domain, CUpti_CallbackId id) {
    FAIL_IF_PLANTED;
    return id ? enable(on, handle, domain, id, id) : CUPTI_ERROR_INVALID_PARAMETER;
}

CUptiResult cuptiEnableDomain(uint32_t on, CUpti_SubscriberHandle handle, int domain) {
    FAIL_IF_PLANTED;
    return enable(on, handle, domain, 1, MAX_FUNCTION_ID - 1);
}
