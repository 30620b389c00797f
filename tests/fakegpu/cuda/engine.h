/* The timelines: streams, their queued operations, and when each of those starts and ends.
 *
 * Nothing is executed. An operation's times are computed as soon as what it waits for is known, mostly within the call
 * that queues it, and so often lie in the future; whoever must wait sleeps until then. Only operations that depend on
 * other ranks stay open; a resolver thread looks at them when a doorbell rings.
 *
 * One lock guards it all. Functions named _locked, and those marked so, are called with it held. */
#ifndef FAKEGPU_ENGINE_H
#define FAKEGPU_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "fakegpu.h"
#include "pool.h"

#define QUEUE_LENGTH 1024 /* as many launches as CUDA queues before a launch blocks */
#define MAX_DEVICES 16

enum op_kind { OP_KERNEL, OP_COPY, OP_SET, OP_GRAPH, OP_REMOTE, OP_WAIT, OP_RECORD };

struct stream;
struct event;
struct graph_exec;

struct op {
    enum op_kind kind;
    enum fakegpu_copy copy;
    const char *name;
    uint64_t correlation, bytes;
    uint32_t grid[3], block[3], shared_bytes;
    int64_t called_ns, queued_ns, duration_ns, start_ns, transfer_ns, end_ns;
    union {
        struct fakegpu_remote *remote;
        struct graph_exec *graph;
        struct event *event;
        struct {
            struct stream *stream;
            uint64_t count; /* how many of that stream's operations must have ended */
        } wait;
    };
};

struct stream {
    struct pooled pooled;
    uint32_t id;
    int device;
    bool blocking; /* takes part in the implicit ordering with the legacy default stream */
    bool legacy, destroyed;
    uint64_t queued, resolved, delivered; /* how many operations, ever */
    uint64_t observed_from;               /* the observer came after that many */
    int64_t last_end_ns;
    struct graph *capture;
    struct op ring[QUEUE_LENGTH];
};

struct event {
    struct pooled pooled;
    bool timing;
    struct stream *stream; /* NULL: never recorded */
    uint64_t count;        /* complete when that many of the stream's operations have ended */
    int64_t time_ns;
};

struct function {
    struct pooled pooled;
    const char *name;
    int64_t duration_ns;
    struct module *module;
    struct kernel *kernel;
};

/* ---- engine.c ---- */
int64_t now_ns(void);
void sleep_until(int64_t time_ns);
void engine_lock(void);
void engine_unlock(void);
void engine_thread(const char *name, void *(*run)(void *));
/* A copy of the text that lives as long as the process; locked. */
const char *engine_intern(const char *text);

/* NULL when there are too many streams; locked. */
struct stream *stream_create(int device, bool blocking);
void stream_destroy(struct stream *stream);
struct stream *stream_check(CUstream handle);
struct stream *stream_legacy(int device);
struct stream *stream_per_thread(int device);
/* Queues an operation, or adds it to the graph that is being captured. May wait for room. Locked. */
CUresult stream_submit(struct stream *stream, const struct op *op);
/* Blocks until all that is queued now has ended. Locked; gives the lock up while it waits. */
void stream_synchronize(struct stream *stream);
void device_synchronize(int device);
void stream_await(struct stream *stream, uint64_t count);
bool stream_done(const struct stream *stream, uint64_t count);

CUresult event_record(struct event *event, struct stream *stream);

/* The noise of this rank's next operation; locked. */
double engine_jitter(void);

/* ---- context.c ---- */
/* What every call that needs a context starts with. */
CUresult context_device(int *device);
/* The stream meant by a handle; locked. */
CUresult stream_find(CUstream handle, bool per_thread, struct stream **stream);

/* ---- module.c ---- */
struct function *function_check(CUfunction handle);
void functions_retime(void);

/* ---- graph.c: locked ---- */
CUresult graph_append(struct graph *graph, const struct op *op);
void graph_exec_release(struct graph_exec *exec);
/* Node number `index` of a launched graph, false behind the last. */
bool graph_node_record(const struct op *op, uint32_t index, struct fakegpu_record *record);

/* ---- memory.c: locked ---- */
/* Gives the beginning of an allocation of device memory content, where that can be done. */
void memory_back(uint64_t address, uint64_t bytes);
/* Where the content of device memory lies, NULL if it has none. */
void *memory_content(uint64_t address, uint64_t bytes);

/* ---- product.c: locked ---- */
/* Computes what a launch of a kernel of that name leaves in memory, if it is one that is computed. */
void product_run(const char *name, unsigned blocks, void **params, int device);

/* ---- copy.c ---- */
int64_t copy_duration_ns(enum fakegpu_copy copy, uint64_t bytes);

#define DRIVER_CALL FAKEGPU_CALL(FAKEGPU_DRIVER)
#define CORRELATION call_.correlation

#endif
