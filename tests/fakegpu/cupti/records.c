/* From what the engine reports to activity records. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cupti.h"

#define REGISTERS 32
#define JIT_LEAST_NS 1000000 /* a load that took less compiled nothing */
#define FAR_FUTURE_NS (10LL * 365 * 24 * 3600 * 1000000000)
#define UNKNOWN_KIND 999
#define PEER_TO_PEER FAKEGPU_PTOP
#define MAX_QUEUES 1024

struct recording recording;
static uint64_t kernels; /* recorded */

static int64_t clock_of(int64_t monotonic_ns) { return monotonic_ns + recording.clock_offset_ns; }

/* ---- kernel names ---- */

#define NAME_SLOTS 1024
#define NAME_LENGTH 1024

/* FAKEGPU_CUPTI_REUSE_NAMES: a name's place in memory moves to another name once all buffers went out, as when a module
 * is unloaded and the next is loaded where it was. */
static struct {
    const char *text[NAME_SLOTS];
    int place[NAME_SLOTS];
    int count;
    char places[NAME_SLOTS][NAME_LENGTH];
} names;

static const char *name_of(const char *name) {
    if (!cupti_settings.reuse_names) return name;
    int i = 0;
    while (i < names.count && names.text[i] != name) i++;
    if (i == NAME_SLOTS) return name;
    if (i == names.count) {
        names.text[i] = name;
        names.place[i] = i;
        strncpy(names.places[i], name, NAME_LENGTH - 1);
        names.count++;
    }
    return names.places[names.place[i]];
}

void names_rotate(void) {
    for (int i = 0; i < names.count; i++) {
        names.place[i] = (names.place[i] + 1) % names.count;
        strncpy(names.places[names.place[i]], names.text[i], NAME_LENGTH - 1);
    }
}

/* ---- operations ---- */

static bool wanted(int kind, const struct fakegpu_record *op) {
    return recording.on_ns[kind] && op->queued_ns >= recording.on_ns[kind] && op->queued_ns < recording.off_ns[kind];
}

static enum record kind_of(const struct fakegpu_record *op, int *kind) {
    if (op->kind == FAKEGPU_KERNEL) {
        *kind = wanted(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, op) ? CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL
                                                                  : CUPTI_ACTIVITY_KIND_KERNEL;
        return R_KERNEL;
    }
    if (op->kind == FAKEGPU_SET) {
        *kind = CUPTI_ACTIVITY_KIND_MEMSET;
        return R_MEMSET;
    }
    *kind = op->copy == PEER_TO_PEER ? CUPTI_ACTIVITY_KIND_MEMCPY2 : CUPTI_ACTIVITY_KIND_MEMCPY;
    return op->copy == PEER_TO_PEER ? R_MEMCPY2 : R_MEMCPY;
}

static void put_copy(uint8_t *record, const struct layout *layout, const struct fakegpu_record *op) {
    enum { PAGEABLE = 1, DEVICE = 3 };
    put(record, layout, F_BYTES, op->bytes);
    put(record, layout, F_COPY_KIND, op->copy);
    put(record, layout, F_SRC_KIND, op->copy == FAKEGPU_HTOD || op->copy == FAKEGPU_HTOH ? PAGEABLE : DEVICE);
    put(record, layout, F_DST_KIND, op->copy == FAKEGPU_DTOH || op->copy == FAKEGPU_HTOH ? PAGEABLE : DEVICE);
    put(record, layout, F_COPY_COUNT, 1);
    put(record, layout, F_SRC_DEVICE_ID, op->device);
    put(record, layout, F_SRC_CONTEXT_ID, op->device + 1);
}

static void put_kernel(uint8_t *record, const struct layout *layout, const struct fakegpu_record *op) {
    static uint64_t grid_id;
    for (enum field axis = 0; axis < 3; axis++) {
        put(record, layout, F_GRID_X + axis, op->grid[axis]);
        put(record, layout, F_BLOCK_X + axis, op->block[axis]);
    }
    put(record, layout, F_DYNAMIC_SHARED_MEMORY, op->shared_bytes);
    put(record, layout, F_STATIC_SHARED_MEMORY, 0);
    put(record, layout, F_REGISTERS_PER_THREAD, REGISTERS);
    put(record, layout, F_GRID_ID, ++grid_id);
    put(record, layout, F_LAUNCH_TYPE, 0);
    put(record, layout, F_NAME, (uintptr_t)name_of(op->name));
}

/* All but the times. */
static void put_operation(uint8_t *record, enum record type, int kind, const struct fakegpu_record *op) {
    const struct layout *layout = layout_of(type);
    enum { COMPUTE = 1, ASYNC_MEMCPY = 2, DEVICE_MEMORY = 3 };
    put(record, layout, F_KIND, (uint64_t)kind);
    put(record, layout, F_CORRELATION_ID, op->correlation);
    put(record, layout, F_DEVICE_ID, op->device);
    put(record, layout, F_CONTEXT_ID, op->device + 1);
    put(record, layout, F_STREAM_ID, op->stream);
    put(record, layout, F_CHANNEL_ID, op->stream + 1);
    put(record, layout, F_CHANNEL_TYPE, type == R_KERNEL ? COMPUTE : ASYNC_MEMCPY);
    if (op->graph) {
        uint64_t node = (uint64_t)op->graph << 32 | op->graph_node;
        put(record, layout, F_GRAPH_ID, op->graph);
        put(record, layout, F_GRAPH_NODE_ID, node);
        put(record, layout, F_SOURCE_GRAPH_ID, op->graph);
        put(record, layout, F_SOURCE_GRAPH_NODE_ID, node);
    }
    if (type == R_KERNEL) {
        put_kernel(record, layout, op);
    } else if (type == R_MEMSET) {
        put(record, layout, F_BYTES, op->bytes);
        put(record, layout, F_MEMORY_KIND, DEVICE_MEMORY);
    } else {
        put_copy(record, layout, op);
    }
}

static void put_times(uint8_t *record, enum record type, const struct fakegpu_record *op) {
    const struct layout *layout = layout_of(type);
    int64_t start_ns = clock_of(op->start_ns), end_ns = clock_of(op->end_ns);
    if (type == R_KERNEL && cupti_settings.corrupt && !(++kernels % (uint64_t)cupti_settings.corrupt)) {
        switch (kernels / (uint64_t)cupti_settings.corrupt % 4) {
        case 1: start_ns = 0; break;
        case 2: end_ns = start_ns - 1; break;
        case 3: start_ns += FAR_FUTURE_NS, end_ns += FAR_FUTURE_NS; break;
        default: put(record, layout, F_KIND, UNKNOWN_KIND);
        }
    }
    put(record, layout, F_START, (uint64_t)start_ns);
    put(record, layout, F_END, (uint64_t)end_ns);
    put(record, layout, F_COMPLETED, (uint64_t)end_ns);
}

/* ---- FAKEGPU_CUPTI_RESERVE: records taken when the work is queued, completed when it has run ---- */

struct pending {
    struct pending *next;
    uint8_t *record;
    struct buffer *buffer;
    uint64_t correlation;
    enum record type;
    uint32_t graph_node;
};

/* By stream; the legacy default streams share an id. */
static struct queue {
    struct pending *first, *last;
} queues[MAX_QUEUES];

static struct queue *queue_of(const struct fakegpu_record *op) {
    return &queues[op->stream ? op->stream % (MAX_QUEUES - 16) : MAX_QUEUES - 16 + op->device % 16];
}

void on_queued(const struct fakegpu_record *op) {
    records_lock();
    int kind;
    enum record type = kind_of(op, &kind);
    struct buffer *buffer;
    uint8_t *record = wanted(kind, op) ? buffers_take(layout_of(type)->size, false, &buffer) : NULL;
    if (record) {
        struct pending *pending = malloc(sizeof *pending);
        if (!pending) abort();
        *pending = (struct pending){NULL, record, buffer, op->correlation, type, op->graph_node};
        put_operation(record, type, kind, op);
        struct queue *queue = queue_of(op);
        if (queue->last)
            queue->last->next = pending;
        else
            queue->first = pending;
        queue->last = pending;
    }
    records_unlock();
}

static struct pending *pop(struct queue *queue) {
    struct pending *pending = queue->first;
    if (pending) queue->first = pending->next;
    if (!queue->first) queue->last = NULL;
    return pending;
}

/* Work of which no record was taken (kinds were off then, or no buffer was there) has none. */
static void complete_reserved(const struct fakegpu_record *op) {
    struct queue *queue = queue_of(op);
    struct pending *pending = queue->first;
    if (!pending || pending->correlation != op->correlation || pending->graph_node != op->graph_node) return;
    pop(queue);
    if (buffers_finish(pending->buffer)) put_times(pending->record, pending->type, op);
    free(pending);
}

static void on_op(void *unused, const struct fakegpu_record *op) {
    (void)unused;
    records_lock();
    int kind;
    enum record type = kind_of(op, &kind);
    if (cupti_settings.reserve) {
        complete_reserved(op);
    } else if (wanted(kind, op)) {
        uint8_t *record = buffers_take(layout_of(type)->size, false, NULL);
        if (record) {
            put_operation(record, type, kind, op);
            put_times(record, type, op);
        }
    }
    records_unlock();
}

/* ---- calls ---- */

static uint32_t process_id(void) { return (uint32_t)getpid(); }

static uint32_t thread_id(void) {
    static __thread pid_t known;
    if (!known) known = gettid();
    return (uint32_t)known;
}

static uint8_t *start_record(int kind, enum record type, int64_t start_ns, int64_t end_ns, uint64_t correlation) {
    uint8_t *record = buffers_take(layout_of(type)->size, true, NULL);
    if (!record) return NULL;
    const struct layout *layout = layout_of(type);
    put(record, layout, F_KIND, (uint64_t)kind);
    put(record, layout, F_START, (uint64_t)clock_of(start_ns));
    put(record, layout, F_END, (uint64_t)clock_of(end_ns));
    put(record, layout, F_CORRELATION_ID, correlation);
    put(record, layout, F_PROCESS_ID, process_id());
    put(record, layout, F_THREAD_ID, thread_id());
    return record;
}

#define START_RECORD(kind, type, call) \
    start_record(kind, type, (call)->start_ns, (call)->end_ns, (call)->correlation)

static bool begins(const char *name, const char *with) { return !strncmp(name, with, strlen(with)); }

static void record_wait(const struct fakegpu_api_record *call) {
    static const struct {
        const char *name;
        int type;
    } waits[] = {{"cuEventSynchronize", 1},
                 {"cuStreamWaitEvent", 2},
                 {"cuStreamSynchronize", 3},
                 {"cuCtxSynchronize", 4}};
    for (size_t i = 0; i < sizeof waits / sizeof *waits; i++) {
        if (!begins(call->name, waits[i].name)) continue;
        uint8_t *record = START_RECORD(CUPTI_ACTIVITY_KIND_SYNCHRONIZATION, R_SYNCHRONIZATION, call);
        if (!record) return;
        const struct layout *layout = layout_of(R_SYNCHRONIZATION);
        put(record, layout, F_TYPE, (uint64_t)waits[i].type);
        put(record, layout, F_CONTEXT_ID, 1);
        put(record, layout, F_STREAM_ID, (uint32_t)CUPTI_SYNCHRONIZATION_INVALID_VALUE);
        put(record, layout, F_CUDA_EVENT_ID, (uint32_t)CUPTI_SYNCHRONIZATION_INVALID_VALUE);
        put(record, layout, F_RETURN_VALUE, (uint32_t)call->result);
    }
}

static void record_load(const struct fakegpu_api_record *call) {
    static uint32_t modules;
    if (!begins(call->name, "cuModuleLoad") && !begins(call->name, "cuLibraryLoad")) return;
    if (recording.kinds[CUPTI_ACTIVITY_KIND_MODULE] && !call->result) {
        const struct layout *layout = layout_of(R_MODULE);
        uint8_t *record = START_RECORD(CUPTI_ACTIVITY_KIND_MODULE, R_MODULE, call);
        if (record) {
            put(record, layout, F_CONTEXT_ID, 1);
            put(record, layout, F_ID, ++modules);
        }
    }
    if (recording.kinds[CUPTI_ACTIVITY_KIND_JIT] && call->end_ns - call->start_ns >= JIT_LEAST_NS) {
        enum { PTX_TO_CUBIN = 1, COMPILE = 3 };
        const struct layout *layout = layout_of(R_JIT);
        uint8_t *record = START_RECORD(CUPTI_ACTIVITY_KIND_JIT, R_JIT, call);
        if (record) {
            put(record, layout, F_JIT_ENTRY_TYPE, PTX_TO_CUBIN);
            put(record, layout, F_JIT_OPERATION_TYPE, COMPILE);
        }
    }
}

void record_overhead(int64_t start_ns, int64_t end_ns) {
    records_lock();
    if (cupti_settings.overhead && recording.kinds[CUPTI_ACTIVITY_KIND_OVERHEAD]) {
        const struct layout *layout = layout_of(R_OVERHEAD);
        uint8_t *record = start_record(CUPTI_ACTIVITY_KIND_OVERHEAD, R_OVERHEAD, start_ns, end_ns, 0);
        if (record) {
            put(record, layout, F_OVERHEAD_KIND, CUPTI_ACTIVITY_OVERHEAD_CUPTI_BUFFER_FLUSH);
            put(record, layout, F_OBJECT_KIND, CUPTI_ACTIVITY_OBJECT_THREAD);
            uint32_t object[2] = {process_id(), thread_id()};
            memcpy(record + layout->field[F_OBJECT_ID].at, object, sizeof object);
        }
    }
    records_unlock();
}

static void on_enter(void *unused, const struct fakegpu_api_record *call) {
    (void)unused;
    if (subscribed) callbacks_tell(CUPTI_API_ENTER, call, function_id(call->domain, call->name));
}

static void on_leave(void *unused, const struct fakegpu_api_record *call) {
    (void)unused;
    CUpti_CallbackId id = function_id(call->domain, call->name);
    /* Looked at without the lock: most calls have nothing to do with it. */
    bool wanted = is_on(&recording.api[call->domain][id]);
    bool driver = call->domain == FAKEGPU_DRIVER;
    bool others = driver && (is_on(&recording.kinds[CUPTI_ACTIVITY_KIND_SYNCHRONIZATION]) ||
                             is_on(&recording.kinds[CUPTI_ACTIVITY_KIND_MODULE]) ||
                             is_on(&recording.kinds[CUPTI_ACTIVITY_KIND_JIT]));
    if (wanted || others) {
        records_lock();
        int kind = driver ? CUPTI_ACTIVITY_KIND_DRIVER : CUPTI_ACTIVITY_KIND_RUNTIME;
        uint8_t *record = wanted && id ? START_RECORD(kind, R_API, call) : NULL;
        if (record) {
            put(record, layout_of(R_API), F_CBID, id);
            put(record, layout_of(R_API), F_RETURN_VALUE, (uint32_t)call->result);
        }
        if (driver && recording.kinds[CUPTI_ACTIVITY_KIND_SYNCHRONIZATION]) record_wait(call);
        if (driver) record_load(call);
        records_unlock();
    }
    if (subscribed) callbacks_tell(CUPTI_API_EXIT, call, id);
}

const struct fakegpu_observer records_observer = {.op = on_op, .enter = on_enter, .leave = on_leave};

void records_forget(void) {
    records_lock();
    switch_all(recording.kinds, sizeof recording.kinds, false);
    switch_all(recording.api[0], sizeof recording.api, false);
    memset(recording.on_ns, 0, sizeof recording.on_ns);
    kernels = 0;
    for (int i = 0; i < MAX_QUEUES; i++)
        for (struct pending *pending; (pending = pop(&queues[i]));) {
            buffers_finish(pending->buffer);
            free(pending);
        }
    records_unlock();
}
