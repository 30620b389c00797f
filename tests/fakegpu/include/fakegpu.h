/* What libcuda.so.1 of the fake exports besides CUDA: the seam for its sister libraries (cudart, nccl, cupti) and
 * for programs that take part in planted faults. Programs should declare these weak, so that they also run on a
 * real driver. Times are CLOCK_MONOTONIC nanoseconds. */
#ifndef FAKEGPU_H
#define FAKEGPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef FAKEGPU_EXPORT
#define FAKEGPU_EXPORT __attribute__((visibility("default")))
#endif

/* ---- programs ---- */

/* The step (from 1) that the caller is about to run; 0 while it prepares. Faults obey FAKEGPU_FAULT_FROM_STEP by it. */
FAKEGPU_EXPORT void fakegpu_set_step(int64_t step);
/* The duration of a kernel by exact name; FAKEGPU_KERNEL_NS overrules it. */
FAKEGPU_EXPORT void fakegpu_set_kernel_ns(const char *name, int64_t duration_ns);
/* Whether this rank must recompile a kernel in this step; its cuModuleLoadDataEx then takes long. */
FAKEGPU_EXPORT bool fakegpu_jit_stall_due(void);
/* By how much this rank's data loading takes longer now. */
FAKEGPU_EXPORT int64_t fakegpu_data_stall_ns(void);
/* Whether this rank must stop making progress now. */
FAKEGPU_EXPORT bool fakegpu_hang_due(void);

/* ---- observer: what a fake CUPTI needs ---- */

enum fakegpu_kind { FAKEGPU_KERNEL = 1, FAKEGPU_COPY = 2, FAKEGPU_SET = 3 };
/* Numbered as CUPTI numbers them. */
enum fakegpu_copy { FAKEGPU_COPY_NONE = 0, FAKEGPU_HTOD = 1, FAKEGPU_DTOH = 2, FAKEGPU_DTOD = 8, FAKEGPU_HTOH = 9,
                    FAKEGPU_PTOP = 10 };

struct fakegpu_record {
    enum fakegpu_kind kind;
    enum fakegpu_copy copy;
    const char *name; /* of a kernel; valid as long as the process */
    int64_t called_ns; /* with FAKEGPU_OPS_LOG: when the outermost call that queued it began */
    int64_t queued_ns, start_ns, end_ns;
    int64_t transfer_ns; /* collectives: when the last rank arrived and data began to move; else start_ns */
    uint64_t correlation;
    uint64_t bytes;
    uint32_t device, stream; /* stream: small id, the legacy default stream of device 0 is 0 */
    uint32_t grid[3], block[3], shared_bytes;
    uint32_t graph, graph_node; /* 0: not from a graph; nodes count from 1 */
};

enum fakegpu_domain { FAKEGPU_DRIVER = 1, FAKEGPU_RUNTIME = 2 };

struct fakegpu_api_record {
    enum fakegpu_domain domain;
    const char *name;
    uint64_t correlation; /* a driver call made by a runtime call has the runtime call's id */
    int64_t start_ns, end_ns; /* end_ns: 0 in `enter` */
    int result;
};

/* `op`: each finished operation, in order within a stream, after its end has passed, on one thread, with no lock held.
 * `enter`, `leave`: on the calling thread; `leave` may be used alone. Any of the three may be NULL. */
struct fakegpu_observer {
    void *context;
    void (*op)(void *context, const struct fakegpu_record *record);
    void (*enter)(void *context, const struct fakegpu_api_record *record);
    void (*leave)(void *context, const struct fakegpu_api_record *record);
};

/* One observer at a time: false when there is one already. NULL removes it. The structure must outlive its use. */
FAKEGPU_EXPORT bool fakegpu_observe(const struct fakegpu_observer *observer);
/* Besides: each operation when it is queued, still without times, on the thread that queues it, with the engine's lock
 * held. NULL ends it. */
FAKEGPU_EXPORT void fakegpu_observe_queue(void (*queued)(const struct fakegpu_record *record));
/* Returns when every operation that had ended by the time of the call has been given to the observer. */
FAKEGPU_EXPORT void fakegpu_deliver(void);

/* ---- sister libraries ---- */

struct fakegpu_call {
    const char *name;
    uint64_t correlation, outer;
    int64_t start_ns;
    enum fakegpu_domain domain;
    int result;
};
FAKEGPU_EXPORT void fakegpu_enter(struct fakegpu_call *call);
FAKEGPU_EXPORT void fakegpu_leave(struct fakegpu_call *call);

/* First line of every API function; RETURN ends it. The id and the observer's `leave` come by themselves. */
#define FAKEGPU_CALL(domain_)                                                                         \
    struct fakegpu_call call_ __attribute__((cleanup(fakegpu_leave))) = {.name = __func__,            \
                                                                         .domain = (domain_)};        \
    fakegpu_enter(&call_)
#define RETURN(value) return (call_.result = (value))

/* An operation whose end depends on other ranks. The engine calls `progress` with its lock held, first when the stream
 * reaches the operation, then again whenever a watched doorbell rang: it announces `ready_ns` on its first call and
 * returns true with the times once they are known. `check` is called about twice a second while it is not. */
struct fakegpu_remote {
    bool (*progress)(struct fakegpu_remote *self, int64_t ready_ns, int64_t *transfer_ns, int64_t *end_ns);
    void (*check)(struct fakegpu_remote *self);
};

/* Makes the calling thread's next kernel launch that operation instead of one with a duration of its own. */
FAKEGPU_EXPORT void fakegpu_next_launch(struct fakegpu_remote *remote);
/* A word in shared memory on which others signal (increment, then futex wake) that an operation may have progressed. */
FAKEGPU_EXPORT void fakegpu_watch(uint32_t *doorbell);
FAKEGPU_EXPORT void fakegpu_unwatch(uint32_t *doorbell);
/* Runs `done` under the engine's lock until it returns true, waiting for progress in between. */
FAKEGPU_EXPORT void fakegpu_wait(bool (*done)(void *argument), void *argument);
/* Have the engine look again at what waits for other ranks. */
FAKEGPU_EXPORT void fakegpu_kick(void);

struct fakegpu_link {
    int64_t latency_ns;
    double bytes_per_ns;
    double factor; /* of this rank's link now: 1 unless it is a slow one */
    double jitter;
    uint64_t seed;
    int rank; /* RANK of this process, -1 when unset */
};
FAKEGPU_EXPORT struct fakegpu_link fakegpu_link(void);
/* A multiplier near 1, the same for the same keys in every process: 1 + jitter × noise. */
FAKEGPU_EXPORT double fakegpu_noise(uint64_t key, uint64_t index);

#endif
