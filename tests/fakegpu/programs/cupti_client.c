/* A client of CUPTI for tests: its callbacks are called on threads of other libraries, so they are C. Used in two ways:
 * through ctypes, which sets `client`, calls CUPTI itself and reads what came from `client_buffers`; and as an injected
 * library (CUDA_INJECTION64_PATH) that records the kinds in CUPTI_CLIENT_KINDS from cuInit to the end of the process
 * and writes all records to the file CUPTI_CLIENT_OUT.<pid>. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cupti_abi.h"

#define EXPORT __attribute__((visibility("default")))
#define MAX_BUFFERS 65536

/* ctypes knows these by offset: all are 64 bits wide. */
struct client {
    int64_t buffer_bytes, most_records;
    int64_t buffers; /* how many it hands out before it has none; -1: always one */
    int64_t misalign, dirty;
    int64_t flush_in_callback, finalize_at_exit; /* do what must not be, or must be, done there */
    int64_t completed_sleep_us;
    /* what happened */
    int64_t requested, refused, completed;
    int64_t callback_result;                  /* of what flush_in_callback or finalize_at_exit called */
    int64_t enters[3], exits[3];              /* by domain */
    int64_t last_domain, last_id, last_result, last_correlation;
    int64_t kept; /* exits that found in correlationData what their entry had left there */
};
EXPORT struct client client = {.buffer_bytes = 65536, .buffers = -1};

struct client_buffer {
    uint8_t *data;
    int64_t bytes, valid_bytes, requested_by, completed_by;
};
EXPORT struct client_buffer client_buffers[MAX_BUFFERS];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t next; /* of client_buffers to hand out */
static FILE *out;

EXPORT uint64_t client_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

EXPORT void client_request(uint8_t **data, size_t *bytes, size_t *most_records) {
    pthread_mutex_lock(&lock);
    *data = NULL;
    *bytes = 0;
    *most_records = (size_t)client.most_records;
    if (next == MAX_BUFFERS || (client.buffers >= 0 && next >= client.buffers)) {
        client.refused++;
    } else {
        struct client_buffer *buffer = &client_buffers[next++];
        buffer->data = aligned_alloc(4096, (size_t)client.buffer_bytes + 4096);
        buffer->bytes = client.buffer_bytes;
        buffer->requested_by = gettid();
        memset(buffer->data, client.dirty ? 0xee : 0, (size_t)client.buffer_bytes);
        *data = buffer->data + client.misalign;
        *bytes = (size_t)client.buffer_bytes;
        client.requested++;
    }
    pthread_mutex_unlock(&lock);
}

EXPORT void client_complete(CUcontext context, uint32_t stream, uint8_t *data, size_t bytes, size_t valid_bytes) {
    (void)context, (void)stream, (void)bytes;
    if (client.completed_sleep_us) usleep((useconds_t)client.completed_sleep_us);
    if (client.flush_in_callback) client.callback_result = cuptiActivityFlushAll(0);
    pthread_mutex_lock(&lock);
    if (out) {
        fwrite(data, 1, valid_bytes, out);
        free(data);
        next--;
    }
    for (int64_t i = 0; !out && i < next; i++)
        if (client_buffers[i].data == data) {
            client_buffers[i].valid_bytes = (int64_t)valid_bytes;
            client_buffers[i].completed_by = gettid();
        }
    client.completed++;
    pthread_mutex_unlock(&lock);
}

EXPORT void client_told(void *user, int domain, CUpti_CallbackId id, const void *data) {
    (void)user;
    struct {
        int32_t site;
        const char *name;
        const void *params;
        const int *result;
        const char *symbol;
        void *context;
        uint32_t context_uid;
        uint64_t *mine;
        uint32_t correlation;
    } call;
    memcpy(&call, data, sizeof call);
    pthread_mutex_lock(&lock);
    if (call.site == CUPTI_API_ENTER) {
        client.enters[domain]++;
        *call.mine = id;
    } else {
        client.exits[domain]++;
        client.kept += *call.mine == id;
        client.last_domain = domain;
        client.last_id = id;
        client.last_result = *call.result;
        client.last_correlation = call.correlation;
    }
    pthread_mutex_unlock(&lock);
    if (call.site == CUPTI_API_EXIT && __atomic_exchange_n(&client.finalize_at_exit, 0, __ATOMIC_ACQ_REL))
        client.callback_result = cuptiFinalize();
}

static void at_exit(void) {
    size_t dropped;
    cuptiActivityFlushAll(1);
    if (cuptiActivityGetNumDroppedRecords(NULL, 0, &dropped) || dropped) fprintf(stderr, "dropped %zu\n", dropped);
    fclose(out);
}

EXPORT int InitializeInjection(void) {
    client.requested = -1; /* so that a test sees the call */
    const char *path = getenv("CUPTI_CLIENT_OUT"), *kinds = getenv("CUPTI_CLIENT_KINDS");
    if (!path || !kinds) return 1;
    char name[4096];
    snprintf(name, sizeof name, "%s.%d", path, (int)getpid());
    out = fopen(name, "we");
    if (!out) return 0;
    client.buffer_bytes = 1 << 20;
    cuptiActivityRegisterTimestampCallback(client_clock);
    cuptiActivityRegisterCallbacks(client_request, client_complete);
    for (char *end; *kinds; kinds = *end ? end + 1 : end) cuptiActivityEnable((int)strtol(kinds, &end, 10));
    atexit(at_exit);
    return 1;
}
