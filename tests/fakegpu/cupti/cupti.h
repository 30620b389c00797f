/* What the files of the fake libcupti share.
 *
 * Two locks. `control` orders the calls that switch things on and off; it may be held while the engine is informed. The
 * records' lock guards everything that is written while work runs; as in the real library it is held while the buffer
 * callbacks are called, and the engine is never called with it held. */
#ifndef FAKEGPU_CUPTI_H
#define FAKEGPU_CUPTI_H

#include <stdbool.h>

#include "cupti_abi.h"
#include "cupti_layouts.h"
#include "fakegpu.h"

struct layout {
    uint16_t size;
    struct {
        uint16_t at, size; /* size 0: this version's record lacks the field */
    } field[FIELD_COUNT];
};

struct generation {
    uint32_t first, last; /* what cuptiGetVersion says */
    struct layout layout[RECORD_COUNT];
};

struct function_id {
    const char *name;
    uint32_t id;
};

#define MAX_FUNCTION_ID 2048

/* Switches are looked at in every call, without a lock. */
static inline bool is_on(const bool *flag) { return __atomic_load_n(flag, __ATOMIC_RELAXED); }
static inline void switch_all(bool *flags, size_t count, bool on) {
    while (count--) __atomic_store_n(&flags[count], on, __ATOMIC_RELAXED);
}

/* ---- settings.c: FAKEGPU_CUPTI_* ---- */
struct cupti_settings {
    int64_t version, busy, corrupt, flush_delay_ms;
    int64_t per_thread, reserve, reuse_names, overhead, strict; /* 0 or 1 */
    char fail[1024];
};
extern struct cupti_settings cupti_settings;
/* The code with which FAKEGPU_CUPTI_FAIL has this function fail, or 0. */
CUptiResult planted_failure(const char *function);
/* First line of every exported function. */
#define FAIL_IF_PLANTED                                     \
    do {                                                    \
        CUptiResult planted_ = planted_failure(__func__);   \
        if (planted_) return planted_;                      \
    } while (0)
/* A misuse that the real library punishes by a crash or a deadlock: ends the program if FAKEGPU_CUPTI_STRICT is set. */
void misuse(const char *what);

/* ---- layouts.c ---- */
const struct layout *layout_of(enum record record);
/* The size of a record of this kind, or 0. */
size_t record_size(int kind);
/* The id of a function, 0 for one that CUPTI does not know. `name` is compared by address first. */
CUpti_CallbackId function_id(enum fakegpu_domain domain, const char *name);
void put(uint8_t *record, const struct layout *layout, enum field field, uint64_t value);

/* ---- buffers.c ---- */
void records_lock(void);
void records_unlock(void);
/* Whether the calling thread is inside a buffer callback, and so has the lock. */
bool in_buffer_callback(void);
void buffers_callbacks(CUpti_BuffersCallbackRequestFunc request, CUpti_BuffersCallbackCompleteFunc complete);
/* Room for a record; NULL when it had to be dropped, which is counted. `own`: in the calling thread's own buffer.
 * `*buffer`, where not NULL, gets the buffer if the record will be completed later. Locked. */
struct buffer;
uint8_t *buffers_take(size_t size, bool own, struct buffer **buffer);
/* A record that was taken with `buffer` is complete. False when its buffer was returned before. Locked. */
bool buffers_finish(struct buffer *buffer);
size_t buffers_dropped(void);
/* Returns buffers through the callback on this thread: those without incomplete records, or all. */
void buffers_flush(bool forced);
void buffers_forget(void);
extern bool buffers_zeroed; /* the client promises zeroed buffers */

/* ---- records.c ---- */
extern const struct fakegpu_observer records_observer;
void on_queued(const struct fakegpu_record *op);
struct recording {
    bool kinds[CUPTI_ACTIVITY_KINDS];
    bool api[3][MAX_FUNCTION_ID]; /* by domain: activity records */
    /* Work is recorded that was queued between these times of CLOCK_MONOTONIC, whenever it ends. */
    int64_t on_ns[CUPTI_ACTIVITY_KINDS], off_ns[CUPTI_ACTIVITY_KINDS];
    int64_t clock_offset_ns; /* from CLOCK_MONOTONIC to the clock of records */
};
extern struct recording recording; /* written with the records' lock held */
void record_overhead(int64_t start_ns, int64_t end_ns);
/* Buffers went out: texts of kernel names may change now. */
void names_rotate(void);
void records_forget(void);

/* ---- callbacks.c ---- */
struct subscriber {
    CUpti_CallbackFunc callback;
    void *user;
    bool enabled[3][MAX_FUNCTION_ID];
};
extern struct subscriber *_Atomic subscribed;
/* Notifies the subscriber of a call. */
void callbacks_tell(int site, const struct fakegpu_api_record *call, CUpti_CallbackId id);
/* Whether this thread is in a subscriber's callback at the exit of a call. */
bool in_api_exit(void);
void callbacks_forget(void);

/* ---- control.c ---- */
/* False, and no lock, inside a buffer callback. */
bool control_lock(void);
/* Has the engine observed if anything is on, and left alone if not; then unlocks. */
void control_unlock(void);

#endif
