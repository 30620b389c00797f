#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "ops_log.h"
#include "settings.h"

#define MAX_STREAMS 512
#define MAX_DOORBELLS 256
#define MAX_WAITV 128
#define CHECK_PERIOD_NS 500000000
#define POLL_PERIOD_NS 1000000    /* only where the kernel lacks futex_waitv */
#define DELIVER_PERIOD_NS 5000000 /* only while somebody observes */
#define DELIVER_BATCH 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static int waiters;

static struct pool streams = POOL(struct stream, MAX_STREAMS);
static struct stream *legacy[MAX_DEVICES];
static uint64_t jitter_index;

static uint32_t *doorbells[MAX_DOORBELLS];
static int doorbell_count;
static _Atomic uint32_t own_doorbell;
static pid_t resolver_process; /* 0: not started; a forked child has none */

static const struct fakegpu_observer *_Atomic observer;
static uint64_t deliveries_asked, deliveries_done;
static bool delivering;
static void (*queue_observer)(const struct fakegpu_record *);

/* ---- small things ---- */

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void sleep_until(int64_t time_ns) {
    struct timespec until = {.tv_sec = time_ns / 1000000000, .tv_nsec = time_ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {}
}

void engine_lock(void) { pthread_mutex_lock(&lock); }
void engine_unlock(void) { pthread_mutex_unlock(&lock); }

/* Signals are the program's: none may land on a thread it does not know of. */
void engine_thread(const char *name, void *(*run)(void *)) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    if (!pthread_create(&thread, NULL, run, NULL)) {
        pthread_setname_np(thread, name);
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

struct interned {
    struct interned *next;
    uint32_t number; /* from 1 */
    char text[];
};

static uint32_t name_number(const char *interned) {
    return interned ? ((const struct interned *)(interned - offsetof(struct interned, text)))->number : 0;
}

const char *engine_intern(const char *text) {
    static struct interned *buckets[1024];
    static uint32_t count;
    uint32_t hash = 2166136261u;
    for (const char *c = text; *c; c++) hash = (hash ^ (unsigned char)*c) * 16777619u;
    struct interned **bucket = &buckets[hash % 1024];
    for (struct interned *entry = *bucket; entry; entry = entry->next)
        if (!strcmp(entry->text, text)) return entry->text;
    size_t size = strlen(text) + 1;
    struct interned *entry = malloc(sizeof *entry + size);
    if (!entry) abort();
    memcpy(entry->text, text, size);
    entry->next = *bucket;
    entry->number = ++count;
    *bucket = entry;
    ops_log_open();
    ops_log_name(text);
    return entry->text;
}

double engine_jitter(void) { return fakegpu_noise((uint64_t)settings.rank + 1, jitter_index++); }

static void wait_for_progress(void) {
    waiters++;
    pthread_cond_wait(&progress, &lock);
    waiters--;
}

/* ---- resolving ---- */

/* When the first `count` operations of a stream had ended. An operation whose slot was taken again ended in the past,
 * which is all that anybody needs to know of it. */
static int64_t end_of(const struct stream *stream, uint64_t count) {
    if (!count || count - 1 + QUEUE_LENGTH < stream->queued) return 0;
    return stream->ring[(count - 1) % QUEUE_LENGTH].end_ns;
}

bool stream_done(const struct stream *stream, uint64_t count) {
    return stream->resolved >= count && end_of(stream, count) <= now_ns();
}

static bool resolve_next(struct stream *stream) {
    struct op *op = &stream->ring[stream->resolved % QUEUE_LENGTH];
    int64_t ready_ns = op->queued_ns > stream->last_end_ns ? op->queued_ns : stream->last_end_ns;
    op->start_ns = op->transfer_ns = op->end_ns = ready_ns;
    switch (op->kind) {
    case OP_WAIT:
        if (op->wait.stream->resolved < op->wait.count) return false;
        int64_t awaited_ns = end_of(op->wait.stream, op->wait.count);
        if (awaited_ns > op->end_ns) op->end_ns = awaited_ns;
        break;
    case OP_RECORD:
        /* Only the latest record of an event counts. */
        if (op->event->stream == stream && op->event->count == stream->resolved + 1) op->event->time_ns = ready_ns;
        break;
    case OP_REMOTE:
        if (!op->remote->progress(op->remote, ready_ns, &op->transfer_ns, &op->end_ns)) return false;
        break;
    default: op->end_ns = ready_ns + op->duration_ns;
    }
    stream->last_end_ns = op->end_ns;
    stream->resolved++;
    return true;
}

static bool resolve_stream(struct stream *stream) {
    bool moved = false;
    while (stream->resolved < stream->queued && resolve_next(stream)) moved = true;
    return moved;
}

static struct stream *stream_at(size_t index) { return (struct stream *)streams.base + index; }

/* `moved`: whether the caller has resolved something that others may wait for. */
static void resolve_all(bool moved) {
    bool again;
    do {
        again = false;
        for (size_t i = 0; i < streams.used; i++) again |= stream_at(i)->pooled.live && resolve_stream(stream_at(i));
        moved |= again;
    } while (again);
    if (moved && waiters) pthread_cond_broadcast(&progress);
}

/* ---- the resolver thread ---- */

static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

void fakegpu_kick(void) {
    atomic_fetch_add(&own_doorbell, 1);
    futex_wake(&own_doorbell);
}

static void fill_record(const struct stream *stream, const struct op *op, struct fakegpu_record *record) {
    *record = (struct fakegpu_record){
        .kind = op->kind == OP_COPY ? FAKEGPU_COPY : op->kind == OP_SET ? FAKEGPU_SET : FAKEGPU_KERNEL,
        .copy = op->copy,
        .name = op->name,
        .called_ns = op->called_ns,
        .queued_ns = op->queued_ns,
        .start_ns = op->start_ns,
        .end_ns = op->end_ns,
        .transfer_ns = op->transfer_ns,
        .correlation = op->correlation,
        .bytes = op->bytes,
        .device = (uint32_t)stream->device,
        .stream = stream->id,
        .shared_bytes = op->shared_bytes,
    };
    memcpy(record->grid, op->grid, sizeof record->grid);
    memcpy(record->block, op->block, sizeof record->block);
}

/* Whether anybody wants to hear of operations. */
static bool watched(void) { return observer || ops_log_on(); }

/* Takes up to a batch of ended operations out of one stream. `node` keeps the place inside a launched graph, `before`
 * holds how many of them had been resolved when the observer came. */
static int take_batch(struct stream *stream, uint32_t *node, struct fakegpu_record *batch, int *before) {
    int64_t now = now_ns();
    int taken = 0;
    *before = 0;
    while (taken < DELIVER_BATCH && stream->delivered < stream->resolved) {
        struct op *op = &stream->ring[stream->delivered % QUEUE_LENGTH];
        if (op->end_ns > now) break;
        if (op->kind == OP_GRAPH) {
            fill_record(stream, op, &batch[taken]);
            if (graph_node_record(op, *node, &batch[taken])) {
                ++*node;
                *before += stream->delivered < stream->observed_from;
                taken++;
                continue;
            }
        } else if (op->kind != OP_WAIT && op->kind != OP_RECORD) {
            fill_record(stream, op, &batch[taken++]);
            *before += stream->delivered < stream->observed_from;
        }
        *node = 0;
        stream->delivered++;
    }
    return taken;
}

static void deliver_all(void) {
    uint64_t asked = deliveries_asked;
    const struct fakegpu_observer *to = observer;
    if (watched()) {
        struct fakegpu_record batch[DELIVER_BATCH];
        delivering = true;
        for (size_t i = 0; i < streams.used; i++) {
            uint32_t node = 0;
            int taken, before;
            while ((taken = take_batch(stream_at(i), &node, batch, &before)) > 0) {
                engine_unlock();
                for (int r = 0; ops_log_on() && r < taken; r++) ops_log_add(&batch[r], name_number(batch[r].name));
                for (int r = before; to && to->op && r < taken; r++) to->op(to->context, &batch[r]);
                engine_lock();
            }
        }
        delivering = false;
        if (waiters) pthread_cond_broadcast(&progress);
    }
    deliveries_done = asked;
}

/* The blocked operation at the head of each stream may wait for a rank that has died. */
static void check_blocked(void) {
    for (size_t i = 0; i < streams.used; i++) {
        struct stream *stream = stream_at(i);
        if (!stream->pooled.live || stream->resolved == stream->queued) continue;
        struct op *op = &stream->ring[stream->resolved % QUEUE_LENGTH];
        if (op->kind == OP_REMOTE) op->remote->check(op->remote);
    }
}

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif
#define FUTEX_SIZE_U32 2
struct waiter {
    uint64_t value, address;
    uint32_t flags, reserved;
};

static void await_doorbells(struct waiter *waiting, int count, int64_t until_ns) {
    static bool unavailable;
    struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
    if (!unavailable && count < MAX_WAITV &&
        (syscall(SYS_futex_waitv, waiting, count, 0, &until, CLOCK_MONOTONIC) >= 0 || errno != ENOSYS))
        return;
    unavailable = count < MAX_WAITV;
    int64_t soon_ns = now_ns() + POLL_PERIOD_NS;
    sleep_until(soon_ns < until_ns ? soon_ns : until_ns);
}

static void *resolve_forever(void *unused) {
    (void)unused;
    int64_t checked_ns = now_ns();
    for (;;) {
        struct waiter waiting[MAX_DOORBELLS + 1];
        int count = 0;
        engine_lock();
        /* Sampled before looking, so that a ring in between ends the wait at once. */
        waiting[count++] = (struct waiter){own_doorbell, (uintptr_t)&own_doorbell, FUTEX_SIZE_U32, 0};
        for (int i = 0; i < doorbell_count; i++)
            waiting[count++] = (struct waiter){__atomic_load_n(doorbells[i], __ATOMIC_SEQ_CST),
                                               (uintptr_t)doorbells[i], FUTEX_SIZE_U32, 0};
        resolve_all(false);
        if (watched() || deliveries_asked != deliveries_done) deliver_all();
        int64_t now = now_ns();
        if (now - checked_ns >= CHECK_PERIOD_NS) {
            check_blocked();
            checked_ns = now;
        }
        int64_t until_ns = now + (watched() ? DELIVER_PERIOD_NS : CHECK_PERIOD_NS);
        engine_unlock();
        await_doorbells(waiting, count, until_ns);
    }
    return NULL;
}

static void start_resolver(void) {
    if (resolver_process) return;
    engine_thread("fakegpu-gpu", resolve_forever);
    resolver_process = getpid();
}

void fakegpu_watch(uint32_t *doorbell) {
    engine_lock();
    if (doorbell_count < MAX_DOORBELLS) doorbells[doorbell_count++] = doorbell;
    start_resolver();
    engine_unlock();
    fakegpu_kick();
}

void fakegpu_unwatch(uint32_t *doorbell) {
    engine_lock();
    for (int i = 0; i < doorbell_count; i++)
        if (doorbells[i] == doorbell) {
            doorbells[i] = doorbells[--doorbell_count];
            break;
        }
    engine_unlock();
    fakegpu_kick();
}

void fakegpu_wait(bool (*done)(void *argument), void *argument) {
    engine_lock();
    resolve_all(false);
    while (!done(argument)) wait_for_progress();
    engine_unlock();
}

/* ---- the observer ---- */

bool fakegpu_observe(const struct fakegpu_observer *fresh) {
    engine_lock();
    bool good = !fresh || !observer;
    if (good) {
        while (delivering) wait_for_progress();
        /* What ran before somebody watched is nobody's business. */
        if (fresh)
            for (size_t i = 0; i < streams.used; i++) {
                stream_at(i)->observed_from = stream_at(i)->resolved;
                if (!ops_log_on()) stream_at(i)->delivered = stream_at(i)->resolved;
            }
        observer = fresh;
        if (waiters) pthread_cond_broadcast(&progress);
        start_resolver();
    }
    engine_unlock();
    fakegpu_kick();
    return good;
}

void fakegpu_observe_queue(void (*queued)(const struct fakegpu_record *)) {
    engine_lock();
    queue_observer = queued;
    engine_unlock();
}

/* As the records will look that take_batch makes of it. */
static void tell_queued(const struct stream *stream, const struct op *op) {
    if (op->kind == OP_WAIT || op->kind == OP_RECORD) return;
    struct fakegpu_record record;
    fill_record(stream, op, &record);
    if (op->kind == OP_GRAPH)
        for (uint32_t node = 0; graph_node_record(op, node, &record); node++) queue_observer(&record);
    else
        queue_observer(&record);
}

void fakegpu_deliver(void) {
    engine_lock();
    if (watched()) {
        uint64_t asked = ++deliveries_asked;
        start_resolver();
        fakegpu_kick();
        while (deliveries_done < asked && watched() && resolver_process == getpid()) wait_for_progress();
    }
    engine_unlock();
}

static _Atomic uint64_t last_correlation;
static __thread uint64_t current_correlation __attribute__((tls_model("initial-exec")));
static __thread int64_t called_ns __attribute__((tls_model("initial-exec")));

void fakegpu_enter(struct fakegpu_call *call) {
    call->outer = current_correlation;
    call->correlation = call->outer ? call->outer : ++last_correlation;
    current_correlation = call->correlation;
    if (!call->outer && settings.ops_log[0]) called_ns = now_ns();
    const struct fakegpu_observer *to = observer;
    if (!to || (!to->enter && !to->leave)) return;
    call->start_ns = now_ns();
    if (to->enter)
        to->enter(to->context, &(struct fakegpu_api_record){call->domain, call->name, call->correlation,
                                                            call->start_ns, 0, 0});
}

void fakegpu_leave(struct fakegpu_call *call) {
    current_correlation = call->outer;
    const struct fakegpu_observer *to = observer;
    if (!to || !to->leave || !call->start_ns) return;
    to->leave(to->context, &(struct fakegpu_api_record){call->domain, call->name, call->correlation, call->start_ns,
                                                        now_ns(), call->result});
}

/* ---- streams ---- */

static bool idle(const struct stream *stream) {
    return stream->resolved == stream->queued && stream->last_end_ns <= now_ns() &&
           (!watched() || stream->delivered == stream->resolved);
}

struct stream *stream_create(int device, bool blocking) {
    /* A destroyed stream still finishes its work; its place is free after that. Its counts go on, so that what waits
     * for them finds them reached. */
    struct stream *stream = NULL;
    for (size_t i = 0; i < streams.used && !stream; i++)
        if (stream_at(i)->destroyed && idle(stream_at(i))) stream = stream_at(i);
    if (!stream) {
        stream = pool_take(&streams);
        if (!stream) return NULL;
        stream->id = (uint32_t)(stream - stream_at(0)) + 1;
    }
    stream->device = device;
    stream->blocking = blocking;
    stream->destroyed = stream->legacy = false;
    return stream;
}

void stream_destroy(struct stream *stream) { stream->destroyed = true; }

struct stream *stream_check(CUstream handle) {
    struct stream *stream = pool_check(&streams, handle);
    return stream && !stream->destroyed ? stream : NULL;
}

struct stream *stream_legacy(int device) {
    if (!legacy[device] && (legacy[device] = stream_create(device, true))) {
        legacy[device]->legacy = true;
        legacy[device]->id = 0;
    }
    return legacy[device];
}

static pthread_key_t per_thread_key;
static pthread_once_t per_thread_once = PTHREAD_ONCE_INIT;
static __thread struct stream *per_thread[MAX_DEVICES];

static void forget_thread(void *unused) {
    (void)unused;
    engine_lock();
    for (int i = 0; i < MAX_DEVICES; i++)
        if (per_thread[i]) stream_destroy(per_thread[i]);
    engine_unlock();
}

static void make_key(void) { pthread_key_create(&per_thread_key, forget_thread); }

struct stream *stream_per_thread(int device) {
    if (!per_thread[device]) {
        pthread_once(&per_thread_once, make_key);
        pthread_setspecific(per_thread_key, &per_thread_key);
        per_thread[device] = stream_create(device, true);
    }
    return per_thread[device];
}

/* A slot can be taken again when its operation has ended and nobody still wants to hear of it. */
static void make_room(struct stream *stream) {
    while (stream->queued >= QUEUE_LENGTH) {
        uint64_t count = stream->queued - QUEUE_LENGTH + 1;
        if (stream->resolved < count) {
            wait_for_progress();
            continue;
        }
        int64_t end_ns = end_of(stream, count);
        if (end_ns > now_ns()) {
            engine_unlock();
            sleep_until(end_ns);
            engine_lock();
        } else if (watched() && stream->delivered < count) {
            deliveries_asked++;
            start_resolver();
            fakegpu_kick();
            wait_for_progress();
        } else {
            struct op *old = &stream->ring[stream->queued % QUEUE_LENGTH];
            if (old->kind == OP_GRAPH) graph_exec_release(old->graph);
            old->kind = OP_WAIT;
            return;
        }
    }
}

static void append(struct stream *stream, const struct op *op) {
    make_room(stream);
    struct op *slot = &stream->ring[stream->queued % QUEUE_LENGTH];
    *slot = *op;
    slot->queued_ns = now_ns();
    slot->called_ns = current_correlation ? called_ns : slot->queued_ns;
    stream->queued++;
    if (queue_observer) tell_queued(stream, slot);
    ops_log_open();
    if (ops_log_on()) start_resolver();
    if (resolve_stream(stream)) resolve_all(true);
}

/* The legacy default stream waits for all blocking streams of its device, and they for it. */
static void order_with_legacy(struct stream *stream) {
    if (!stream->blocking) return;
    for (size_t i = 0; i < streams.used; i++) {
        struct stream *other = stream_at(i);
        if (other == stream || !other->blocking || other->device != stream->device ||
            other->legacy == stream->legacy || !other->queued)
            continue;
        if (other->resolved == other->queued && other->last_end_ns <= stream->last_end_ns) continue;
        append(stream, &(struct op){.kind = OP_WAIT, .wait = {other, other->queued}});
    }
}

CUresult stream_submit(struct stream *stream, const struct op *op) {
    if (stream->capture) return graph_append(stream->capture, op);
    order_with_legacy(stream);
    append(stream, op);
    return CUDA_SUCCESS;
}

void stream_await(struct stream *stream, uint64_t count) {
    while (stream->resolved < count) wait_for_progress();
    int64_t end_ns = end_of(stream, count);
    if (end_ns <= now_ns()) return;
    engine_unlock();
    sleep_until(end_ns);
    engine_lock();
}

void stream_synchronize(struct stream *stream) {
    if (stream->legacy) order_with_legacy(stream);
    stream_await(stream, stream->queued);
}

void device_synchronize(int device) {
    for (size_t i = 0; i < streams.used; i++) {
        struct stream *stream = stream_at(i);
        if (stream->pooled.live && stream->device == device) stream_await(stream, stream->queued);
    }
}

CUresult event_record(struct event *event, struct stream *stream) {
    if (stream->capture) return CUDA_SUCCESS;
    /* The event is bound first: its operation may be resolved while it is queued. */
    order_with_legacy(stream);
    make_room(stream);
    event->stream = stream;
    event->count = stream->queued + 1;
    append(stream, &(struct op){.kind = OP_RECORD, .event = event});
    return CUDA_SUCCESS;
}
