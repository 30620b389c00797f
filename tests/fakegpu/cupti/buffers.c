/* Buffers: asked for when a record needs room, given back when they are full or at a flush, with the lock held. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cupti.h"

struct buffer {
    struct buffer *next; /* in `full` */
    uint8_t *data;
    size_t size, used, records, most_records; /* most_records 0: as many as fit */
    unsigned incomplete;
    bool returned;
};

/* A thread's own buffer for the records of its calls. Outlives the thread: a flush must still find it. */
struct own {
    struct own *next;
    struct buffer *current;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static CUpti_BuffersCallbackRequestFunc request_callback;
static CUpti_BuffersCallbackCompleteFunc complete_callback;
static struct buffer *shared, *full; /* `full`: oldest first */
static struct own *owns;
static __thread struct own *mine;
static __thread bool in_callback;
static size_t dropped;
bool buffers_zeroed;

static pthread_t worker;
static pid_t worker_process; /* 0: there is none */
static bool worker_ends;

void records_lock(void) { pthread_mutex_lock(&lock); }
void records_unlock(void) { pthread_mutex_unlock(&lock); }
bool in_buffer_callback(void) { return in_callback; }

void buffers_callbacks(CUpti_BuffersCallbackRequestFunc request, CUpti_BuffersCallbackCompleteFunc complete) {
    request_callback = request;
    complete_callback = complete;
}

/* ---- returning ---- */

static void give_back(struct buffer *buffer) {
    buffer->returned = true;
    in_callback = true;
    complete_callback(NULL, 0, buffer->data, buffer->size, buffer->used);
    in_callback = false;
    if (!buffer->incomplete) free(buffer); /* else when the last record is finished */
}

/* The oldest full buffer whose records are complete, or of all; taken out of the list. */
static struct buffer *take_full(bool forced) {
    for (struct buffer **at = &full; *at; at = &(*at)->next)
        if (forced || !(*at)->incomplete) {
            struct buffer *taken = *at;
            *at = taken->next;
            return taken;
        }
    return NULL;
}

static void flush_one(struct buffer **current, bool forced) {
    struct buffer *buffer = *current;
    if (!buffer || (!forced && (!buffer->records || buffer->incomplete))) return;
    *current = NULL;
    give_back(buffer);
}

void buffers_flush(bool forced) {
    records_lock();
    for (struct buffer *buffer; (buffer = take_full(forced));) give_back(buffer);
    flush_one(&shared, forced);
    for (struct own *own = owns; own; own = own->next) flush_one(&own->current, forced);
    if (!shared && !full) names_rotate();
    records_unlock();
}

static void *work(void *unused) {
    (void)unused;
    records_lock();
    while (!worker_ends) {
        struct buffer *buffer = take_full(false);
        if (buffer)
            give_back(buffer);
        else
            pthread_cond_wait(&changed, &lock);
    }
    records_unlock();
    return NULL;
}

static void start_worker(void) {
    if (worker_process == getpid()) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    worker_ends = false;
    if (!pthread_create(&worker, NULL, work, NULL)) {
        pthread_setname_np(worker, "fakegpu-cupti");
        worker_process = getpid();
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* ---- filling ---- */

static struct buffer *ask(void) {
    if (!request_callback) return NULL;
    uint8_t *data = NULL;
    size_t size = 0, most_records = 0;
    in_callback = true;
    request_callback(&data, &size, &most_records);
    in_callback = false;
    if (!data || !size) return NULL;
    if ((uintptr_t)data % 8) {
        misuse("a buffer that is not aligned to 8 bytes");
        return NULL;
    }
    if (!buffers_zeroed) memset(data, 0, size);
    struct buffer *buffer = calloc(1, sizeof *buffer);
    if (!buffer) abort();
    *buffer = (struct buffer){.data = data, .size = size, .most_records = most_records};
    return buffer;
}

static bool has_room(const struct buffer *buffer, size_t size) {
    return buffer->size - buffer->used >= size &&
           (!buffer->most_records || buffer->records < buffer->most_records);
}

/* A thread returns its own full buffer itself; others are left to the worker. */
static void retire(struct buffer *buffer, bool own) {
    if (own && !buffer->incomplete) {
        give_back(buffer);
        return;
    }
    start_worker();
    struct buffer **last = &full;
    while (*last) last = &(*last)->next;
    *last = buffer;
    pthread_cond_signal(&changed);
}

static struct buffer **current_of(bool own) {
    if (!own) return &shared;
    if (!mine) {
        mine = calloc(1, sizeof *mine);
        if (!mine) abort();
        mine->next = owns;
        owns = mine;
    }
    return &mine->current;
}

uint8_t *buffers_take(size_t size, bool own, struct buffer **later) {
    own = own && cupti_settings.per_thread;
    struct buffer **current = current_of(own);
    if (*current && !has_room(*current, size)) {
        retire(*current, own);
        *current = NULL;
    }
    if (!*current) *current = ask();
    struct buffer *buffer = *current;
    if (!buffer || !has_room(buffer, size)) { /* a fresh one that is too small goes back with the next record */
        dropped++;
        return NULL;
    }
    uint8_t *record = buffer->data + buffer->used;
    buffer->used += size;
    buffer->records++;
    if (later) {
        buffer->incomplete++;
        *later = buffer;
    }
    return record;
}

bool buffers_finish(struct buffer *buffer) {
    bool there = !buffer->returned;
    if (!--buffer->incomplete) {
        if (there)
            pthread_cond_signal(&changed);
        else
            free(buffer);
    }
    return there;
}

size_t buffers_dropped(void) {
    size_t count = dropped;
    dropped = 0;
    return count;
}

/* What was not flushed is lost, and its memory never heard of again. */
void buffers_forget(void) {
    records_lock();
    bool join = worker_process == getpid();
    worker_ends = true;
    pthread_cond_signal(&changed);
    records_unlock();
    if (join) pthread_join(worker, NULL);
    records_lock();
    worker_process = 0;
    for (struct buffer *buffer; (buffer = take_full(true));) free(buffer);
    free(shared);
    shared = NULL;
    for (struct own *own = owns; own; own = own->next) {
        free(own->current);
        own->current = NULL;
    }
    request_callback = NULL;
    complete_callback = NULL;
    dropped = 0;
    buffers_zeroed = false;
    records_unlock();
}
