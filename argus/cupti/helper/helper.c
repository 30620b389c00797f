/* What runs inside a traced process: keeps CUPTI's buffers in memory that Argus reads from outside. See argus_cupti.h.
 *
 * Rules: nothing of Python, nothing of CUPTI's record layouts, no allocation on CUPTI's threads, no signal handled, no
 * descriptor kept open, no memory that CUPTI may write to ever unmapped. CUPTI is touched only after Argus asks for it, and
 * switched off when Argus leaves or dies. */
#define _GNU_SOURCE
#include "argus_cupti.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define TICK_MS 100                  /* how soon a returned buffer is walked */
#define VANISHED_NS 10000000000ll    /* without a heartbeat for so long, Argus is gone */
#define HOLD_NS 10000000000ll        /* cuInit waits no longer, whatever Argus does */
#define LOOK_NS 250000000ll          /* how often it is tried whether another profiler has come */
#define FINISH_NS 500000000ll        /* what was launched before the end of recording may take so long */
#define QUIET_NS 50000000ll          /* after so long without a new buffer, all of it has run */
#define CACHE_LINE 64
#define AHEAD 4096                   /* bytes; measured: 1 KiB to 8 KiB differ little (scripts/bench cupti) */
#define NAME_MAX_BYTES 4096
#define NAME_SLOTS 65536u            /* of the hash table; at most 3/4 are used */
#define MAX_BUFFERS_BYTES (1ull << 30)

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define KIND_DRIVER 4u  /* CUPTI_ACTIVITY_KIND_DRIVER, _RUNTIME */
#define KIND_RUNTIME 5u
#define THREAD_ID_TYPE_SYSTEM 1u
#define MULTIPLE_SUBSCRIBERS 39 /* CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED */
#define MAX_LIMIT_REACHED 12    /* CUPTI_ERROR_MAX_LIMIT_REACHED: older versions say this instead */
#define CALLS_END 2048u /* above every callback id; CUPTI refuses ids that it does not know */

#define load(word) __atomic_load_n(&(word), __ATOMIC_ACQUIRE)
#define store(word, value) __atomic_store_n(&(word), (value), __ATOMIC_RELEASE)
#define add(word, value) __atomic_fetch_add(&(word), (value), __ATOMIC_RELAXED)

struct name_slot {
	uint64_t pointer;
	uint32_t id, length, epoch;
	uint32_t offset; /* of the text in the name table */
};

struct recent_name {
	uint64_t pointer;
	uint32_t id, epoch;
};

static struct {
	struct argus_cupti_control *head;
	struct argus_cupti_slot *slots;
	uint8_t *names, *buffers; /* NULL until the first wake, then for ever */
	struct name_slot *hash;
	struct recent_name recent[1024]; /* of this buffer: what fits a core's first cache */
	uint64_t stride;
	uint32_t served;          /* command_seq that was obeyed last */
	uint32_t epoch;           /* counts flushes: names that were looked at since the last need not be again */
	uint64_t sequence;
	long pid;                 /* whose memory it is */
	bool on, paused, exiting, taken;  /* taken: another profiler came while CUPTI was on */
	uint32_t thread_id_type;  /* before Argus came */
	uint32_t beat;
	int64_t beat_ns;
	pthread_mutex_t work;     /* held while commands are obeyed, buffers are walked, or the process exits */
} g = {.thread_id_type = THREAD_ID_TYPE_SYSTEM, .work = PTHREAD_MUTEX_INITIALIZER};

typedef void (*callback_fn)(void *, uint32_t, uint32_t, const void *);

static struct {
	void *library;
	int (*GetVersion)(uint32_t *);
	int (*GetResultString)(int, const char **);
	int (*Subscribe)(void **, callback_fn, void *);
	int (*Unsubscribe)(void *);
	int (*ActivityRegisterCallbacks)(void (*)(uint8_t **, size_t *, size_t *),
					 void (*)(void *, uint32_t, uint8_t *, size_t, size_t));
	int (*ActivityRegisterTimestampCallback)(uint64_t (*)(void));
	int (*ActivityEnable)(uint32_t);
	int (*ActivityDisable)(uint32_t);
	int (*ActivityFlushAll)(uint32_t);
	int (*ActivitySetAttribute)(uint32_t, size_t *, void *);
	int (*ActivityGetNumDroppedRecords)(void *, uint32_t, size_t *);
	int (*ActivityEnableRuntimeApi)(uint32_t, uint8_t); /* these came later: may be absent */
	int (*ActivityEnableDriverApi)(uint32_t, uint8_t);
	int (*GetThreadIdType)(uint32_t *);
	int (*SetThreadIdType)(uint32_t);
} cupti;

static int64_t clock_ns(clockid_t clock) {
	struct timespec now;
	clock_gettime(clock, &now);
	return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static int64_t now_ns(void) {
	return clock_ns(CLOCK_MONOTONIC);
}

/* CUPTI interpolates the GPU's clock onto this one, so that its times are those of every other record of Argus. */
static uint64_t timestamp(void) {
	return (uint64_t)now_ns();
}

static void futex_wait(uint32_t *word, uint32_t value, int64_t timeout_ms) {
	struct timespec limit = {timeout_ms / 1000, timeout_ms % 1000 * 1000000};
	syscall(SYS_futex, word, FUTEX_WAIT, value, timeout_ms < 0 ? NULL : &limit, NULL, 0);
}

static void futex_wake(uint32_t *word) {
	syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

__attribute__((format(printf, 2, 3))) static void set_state(uint32_t state, const char *format, ...) {
	char text[sizeof g.head->reason];
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(text, sizeof text, format, arguments);
	va_end(arguments);
	memcpy(g.head->reason, text, sizeof text);
	store(g.head->state, state);
}

static void fail(const char *call, int result) {
	const char *text = NULL;
	if (cupti.GetResultString && cupti.GetResultString(result, &text) != 0)
		text = NULL;
	g.head->cupti_result = result;
	set_state(ARGUS_CUPTI_FAILED, "%s: %s (%d)", call, text ? text : "error", result);
}

/* Whether this is a child that has g and not the memory: that of a raw clone or of _Fork calls no handler of pthread_atfork. */
static bool in_child(void) {
	return syscall(SYS_getpid) != g.pid;
}

static void walk_returned(bool alive);
static void walk_unless_argus_does(void);
static __thread bool flushing; /* this thread flushes, and holds `work` */

static void count_dropped(void *context, uint32_t stream) {
	size_t dropped = 0;
	if (cupti.ActivityGetNumDroppedRecords(context, stream, &dropped) == 0 && dropped)
		add(g.head->cupti_dropped, dropped);
}

/* ---- CUPTI's buffers: called by CUPTI, on any thread, with CUPTI's own lock held ---- */

static void buffer_requested(uint8_t **buffer, size_t *size, size_t *max_records) {
	struct argus_cupti_control *head = g.head;
	*buffer = NULL;
	*size = 0;
	*max_records = 0;
	if (!head || !g.buffers || in_child())
		return;
	int64_t begin = now_ns();
	add(head->requests, 1);
	/* The first that is free, not the next: few buffers go round then, and stay in the cache on their way. */
	for (uint32_t slot = 0; slot < head->slots; slot++) {
		uint32_t expected = ARGUS_CUPTI_FREE;
		if (!__atomic_compare_exchange_n(&g.slots[slot].state, &expected, ARGUS_CUPTI_LENT, false, __ATOMIC_ACQ_REL,
						 __ATOMIC_RELAXED))
			continue;
		*buffer = g.buffers + slot * g.stride;
		*size = head->buffer_bytes;
		break;
	}
	if (!*buffer)
		add(head->refused, 1);
	add(head->callback_ns, (uint64_t)(now_ns() - begin));
}

static void buffer_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
	struct argus_cupti_control *head = g.head;
	(void)size;
	if (!head || !g.buffers || in_child())
		return;
	int64_t begin = now_ns();
	count_dropped(context, stream);
	uint64_t offset = (uint64_t)(buffer - g.buffers);
	if (!buffer || buffer < g.buffers || offset / g.stride >= head->slots || offset % g.stride) {
		if (buffer)
			add(head->strangers, 1);
	} else {
		struct argus_cupti_slot *slot = &g.slots[offset / g.stride];
		slot->stream = stream;
		slot->valid = valid <= head->buffer_bytes ? valid : head->buffer_bytes;
		slot->sequence = __atomic_add_fetch(&g.sequence, 1, __ATOMIC_RELAXED);
		add(head->completed, 1);
		store(slot->state, ARGUS_CUPTI_FULL);
	}
	add(head->callback_ns, (uint64_t)(now_ns() - begin));
	if (flushing) /* now: once all buffers are out, CUPTI may use the memory of names again */
		walk_unless_argus_does();
}

/* ---- names and indices: in the helper's own thread ---- */

/* The id of the name at `pointer`. The text is compared anew in each epoch: its memory may be used again. */
static uint32_t intern(uint64_t pointer) {
	struct argus_cupti_control *head = g.head;
	uint32_t place = (uint32_t)((pointer * 0x9e3779b97f4a7c15ull) >> 48) % NAME_SLOTS;
	struct name_slot *found;
	for (;; place = (place + 1) % NAME_SLOTS) {
		found = &g.hash[place];
		if (found->pointer == pointer && found->epoch == g.epoch)
			return found->id;
		if (found->pointer == pointer || !found->pointer)
			break;
	}
	const char *text = (const char *)(uintptr_t)pointer;
	uint32_t length = (uint32_t)strnlen(text, NAME_MAX_BYTES);
	if (found->pointer && found->length == length && !memcmp(g.names + found->offset, text, length)) {
		found->epoch = g.epoch;
		return found->id;
	}
	uint64_t used = head->names_used, bytes = sizeof(struct argus_cupti_name) + ((length + 7u) & ~7u);
	if (used + bytes > ARGUS_CUPTI_NAMES_BYTES || (!found->pointer && head->names_count >= NAME_SLOTS / 4 * 3)) {
		head->names_lost++;
		return 0;
	}
	struct argus_cupti_name *entry = (struct argus_cupti_name *)(g.names + used);
	*entry = (struct argus_cupti_name){pointer, (uint32_t)head->names_count + 1, length};
	memcpy(entry + 1, text, length);
	*found = (struct name_slot){pointer, entry->id, length, g.epoch, (uint32_t)(used + sizeof *entry)};
	head->names_count++;
	store(head->names_used, used + bytes);
	return entry->id;
}

static uint32_t name_id(uint64_t pointer) {
	struct recent_name *recent = &g.recent[pointer * 0x9e3779b97f4a7c15ull >> 54];
	if (recent->pointer != pointer || recent->epoch != g.epoch)
		*recent = (struct recent_name){pointer, intern(pointer), g.epoch};
	return recent->id;
}

/* One pass, since a buffer is more than a core's cache holds: nearly all of its time is memory's. Lines are asked for before
 * they are needed, because the place of each record depends on the one before. `named`: ids of names replace pointers. */
static inline uint32_t walk(uint8_t *buffer, uint64_t valid, const struct argus_cupti_layout *layouts, uint32_t *index,
			    uint32_t room, uint64_t *lost, bool named) {
	uint64_t at = 0, asked = 0;
	uint32_t count = 0;
	*lost = 0;
	while (at + sizeof(uint32_t) <= valid) {
		uint32_t kind;
		memcpy(&kind, buffer + at, sizeof kind);
		if (kind == 0)
			return count;
		if (kind >= ARGUS_CUPTI_MAX_KINDS)
			break;
		const struct argus_cupti_layout layout = layouts[kind];
		if (layout.size < sizeof kind || at + layout.size > valid || count == room)
			break;
		uint64_t ask = at + AHEAD < valid ? at + AHEAD : valid;
		for (; asked < ask; asked += CACHE_LINE)
			__builtin_prefetch(buffer + asked, 1);
		index[count++] = (uint32_t)at;
		for (int n = 0; named && n < 2 && layout.name[n]; n++) {
			uint64_t word;
			if (layout.name[n] + sizeof word > layout.size)
				break;
			memcpy(&word, buffer + at + layout.name[n], sizeof word);
			if (word)
				word = name_id(word);
			memcpy(buffer + at + layout.name[n], &word, sizeof word);
		}
		at += layout.size;
	}
	*lost = valid - at;
	return count;
}

EXPORT uint32_t argus_cupti_walk(const uint8_t *buffer, uint64_t valid, const struct argus_cupti_layout *layouts,
				 uint32_t *index, uint32_t room, uint64_t *lost) {
	return walk((uint8_t *)buffer, valid, layouts, index, room, lost, false);
}

EXPORT uint32_t argus_cupti_claim(uint32_t *state) {
	uint32_t expected = ARGUS_CUPTI_FULL;
	return __atomic_compare_exchange_n(state, &expected, ARGUS_CUPTI_CLAIMED, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

/* Walks the buffers that CUPTI has returned, oldest first. `alive`: whether the names they point at are. */
static void walk_returned(bool alive) {
	if (!g.buffers)
		return;
	int64_t begin = 0;
	for (;;) {
		struct argus_cupti_slot *oldest = NULL;
		for (uint32_t i = 0; i < g.head->slots; i++)
			if (load(g.slots[i].state) == ARGUS_CUPTI_FULL && (!oldest || g.slots[i].sequence < oldest->sequence))
				oldest = &g.slots[i];
		if (!oldest)
			break;
		if (!argus_cupti_claim(&oldest->state))
			continue;
		if (!begin)
			begin = clock_ns(CLOCK_THREAD_CPUTIME_ID);
		uint8_t *buffer = g.buffers + (uint64_t)(oldest - g.slots) * g.stride;
		uint32_t *index = (uint32_t *)(buffer + g.head->buffer_bytes);
		uint32_t room = g.head->buffer_bytes / ARGUS_CUPTI_INDEX_DIVISOR / sizeof *index;
		oldest->count = walk(buffer, oldest->valid, g.head->layouts, index, room, &oldest->lost, alive);
		oldest->flags = alive;
		g.head->records += oldest->count;
		g.head->unknown_bytes += oldest->lost;
		store(oldest->state, ARGUS_CUPTI_READY);
	}
	if (begin)
		g.head->walk_ns += (uint64_t)(clock_ns(CLOCK_THREAD_CPUTIME_ID) - begin);
}

static void walk_unless_argus_does(void) {
	if (!load(g.head->walks_outside))
		walk_returned(true);
}

/* ---- finding CUPTI ---- */

static void *open_cupti(const char *path, int flags) {
	void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL | flags);
	return library;
}

/* The one that the process has already, which its own profiler would use; else those that Argus found; else the system's. */
static void *find_cupti(void) {
	static const char *const sonames[] = {"libcupti.so.13", "libcupti.so.12"};
	void *library = NULL;
	for (size_t i = 0; !library && i < 2; i++)
		library = open_cupti(sonames[i], RTLD_NOLOAD);
	char paths[sizeof g.head->candidates], *rest = NULL;
	memcpy(paths, g.head->candidates, sizeof paths);
	paths[sizeof paths - 1] = 0;
	for (char *path = strtok_r(paths, "\n", &rest); !library && path; path = strtok_r(NULL, "\n", &rest))
		library = open_cupti(path, 0);
	for (size_t i = 0; !library && i < 2; i++)
		library = open_cupti(sonames[i], 0);
	return library;
}

static bool symbol(const char *name, void *where, bool needed) {
	void *found = dlsym(cupti.library, name);
	if (!found && needed)
		set_state(ARGUS_CUPTI_FAILED, "%s has no %s", g.head->library, name);
	memcpy(where, &found, sizeof found);
	return found || !needed;
}

static bool load_cupti(void) {
	if (cupti.GetVersion)
		return true;
	if (!cupti.library)
		cupti.library = find_cupti();
	if (!cupti.library) {
		set_state(ARGUS_CUPTI_FAILED, "no libcupti.so.13 or .12 found: install CUPTI beside the process's CUDA "
					      "(pip install nvidia-cuda-cupti)");
		return false;
	}
#define SYMBOL(name, needed) symbol("cupti" #name, &cupti.name, needed)
	bool complete = SYMBOL(GetResultString, true) && SYMBOL(Subscribe, true) && SYMBOL(Unsubscribe, true) &&
			SYMBOL(ActivityRegisterCallbacks, true) &&
			SYMBOL(ActivityRegisterTimestampCallback, true) && SYMBOL(ActivityEnable, true) &&
			SYMBOL(ActivityDisable, true) && SYMBOL(ActivityFlushAll, true) &&
			SYMBOL(ActivitySetAttribute, true) && SYMBOL(ActivityGetNumDroppedRecords, true) &&
			SYMBOL(ActivityEnableRuntimeApi, false) &&
			SYMBOL(ActivityEnableDriverApi, false) &&
			SYMBOL(GetThreadIdType, false) && SYMBOL(SetThreadIdType, false) && SYMBOL(GetVersion, true);
#undef SYMBOL
	if (!complete) {
		cupti.GetVersion = NULL;
		return false;
	}
	Dl_info where;
	if (dladdr((void *)cupti.GetVersion, &where) && where.dli_fname)
		snprintf(g.head->library, sizeof g.head->library, "%s", where.dli_fname);
	return true;
}

static void probe(void) {
	uint32_t version = 0;
	if (!load_cupti())
		return;
	int result = cupti.GetVersion(&version);
	if (result) {
		fail("cuptiGetVersion", result);
		return;
	}
	g.head->cupti_version = version;
	if (!g.on)
		set_state(ARGUS_CUPTI_PROBED, "%s", "");
}

static void flush(uint32_t flag) {
	walk_unless_argus_does(); /* what came before need not be walked with CUPTI's lock held */
	flushing = true;
	cupti.ActivityFlushAll(flag);
	flushing = false;
	g.epoch++;
	g.head->flushes++;
	count_dropped(NULL, 0); /* with no buffer left to give back, nobody else would ask */
}

/* ---- on ---- */

static bool map_ring(void) {
	struct argus_cupti_control *head = g.head;
	if (g.buffers)
		return true;
	uint64_t slots = head->want_slots, bytes = head->want_buffer_bytes;
	uint64_t stride = bytes + bytes / ARGUS_CUPTI_INDEX_DIVISOR;
	if (!slots || slots > ARGUS_CUPTI_MAX_SLOTS || bytes < 4096 || bytes % 4096 || stride % 4096 ||
	    slots * stride > MAX_BUFFERS_BYTES) {
		set_state(ARGUS_CUPTI_FAILED, "bad geometry of buffers");
		return false;
	}
	uint64_t total = ARGUS_CUPTI_BUFFERS_OFFSET + slots * stride;
	if (total > head->file_bytes) {
		set_state(ARGUS_CUPTI_FAILED, "buffers of %llu MiB are more than the helper allows", (unsigned long long)total >> 20);
		return false;
	}
	/* A length of 0 makes a second mapping of the same pages: no descriptor is needed, so none is kept. */
	uint8_t *base = mremap(head, 0, total, MREMAP_MAYMOVE);
	struct name_slot *hash = mmap(NULL, NAME_SLOTS * sizeof *hash, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (base == MAP_FAILED || hash == MAP_FAILED) {
		set_state(ARGUS_CUPTI_FAILED, "no memory for buffers: %s", strerror(errno));
		return false;
	}
	madvise(base, total, MADV_DONTFORK);
	madvise(base, total, MADV_DONTDUMP);
	madvise(hash, NAME_SLOTS * sizeof *hash, MADV_DONTFORK);
	head->slots = (uint32_t)slots;
	head->buffer_bytes = (uint32_t)bytes;
	g.hash = hash;
	g.stride = stride;
	g.names = base + ARGUS_CUPTI_NAMES_OFFSET;
	store(g.buffers, base + ARGUS_CUPTI_BUFFERS_OFFSET);
	return true;
}

/* Touches every page now: CUPTI will write into them while the process launches kernels. */
static bool populate(void) {
	uint64_t bytes = g.head->slots * g.stride;
	if (madvise(g.buffers, bytes, MADV_POPULATE_WRITE) == 0)
		return true;
	if (errno == EINVAL) { /* before Linux 5.14 */
		for (uint64_t at = 0; at < bytes; at += 4096)
			__atomic_fetch_or(&g.buffers[at], 0, __ATOMIC_RELAXED);
		return true;
	}
	set_state(ARGUS_CUPTI_FAILED, "no memory for %llu MiB of buffers: %s", (unsigned long long)bytes >> 20, strerror(errno));
	return false;
}

/* API records of the chosen calls only, for the launch times. Enabling single calls has no effect once the process has a
 * context (CUDA 13.0), so the whole kind is enabled and all other calls are taken out again. */
static void record_calls(uint32_t kind, int (*enable)(uint32_t, uint8_t), const uint32_t *calls, uint32_t count) {
	if (!count || !enable || cupti.ActivityEnable(kind))
		return;
	for (uint32_t call = 1; call < CALLS_END; call++) {
		bool chosen = false;
		for (uint32_t i = 0; i < count && i < ARGUS_CUPTI_MAX_CALLBACKS; i++)
			chosen |= calls[i] == call;
		if (!chosen)
			enable(call, 0);
	}
}

/* Records name threads by pthread_self otherwise, which nobody outside knows. */
static void name_threads_as_the_kernel_does(void) {
	g.thread_id_type = THREAD_ID_TYPE_SYSTEM;
	if (cupti.GetThreadIdType && cupti.SetThreadIdType && cupti.GetThreadIdType(&g.thread_id_type) == 0)
		cupti.SetThreadIdType(THREAD_ID_TYPE_SYSTEM);
}

static void restore_thread_names(void) {
	if (g.thread_id_type != THREAD_ID_TYPE_SYSTEM)
		cupti.SetThreadIdType(g.thread_id_type);
}

/* Returns what CUPTI says to the first kind, which is what it is all for; `refused` lists the others that it refuses. */
static int switch_kinds(bool on) {
	struct argus_cupti_control *head = g.head;
	int first = 0;
	head->refused_kinds = 0;
	if (on)
		name_threads_as_the_kernel_does();
	for (uint32_t i = 0; i < head->kinds_count && i < ARGUS_CUPTI_MAX_KINDS; i++) {
		int result = on ? cupti.ActivityEnable(head->kinds[i]) : cupti.ActivityDisable(head->kinds[i]);
		if (i == 0)
			first = result;
		if (on && result && head->kinds[i] < 64)
			head->refused_kinds |= 1ull << head->kinds[i];
	}
	if (on) {
		record_calls(KIND_RUNTIME, cupti.ActivityEnableRuntimeApi, head->runtime_calls, head->runtime_calls_count);
		record_calls(KIND_DRIVER, cupti.ActivityEnableDriverApi, head->driver_calls, head->driver_calls_count);
	} else {
		cupti.ActivityDisable(KIND_RUNTIME);
		cupti.ActivityDisable(KIND_DRIVER);
		restore_thread_names();
	}
	return first;
}

static void at_exit(void);

static void ignore(const char *call, int result) {
	const char *text = NULL;
	if (cupti.GetResultString(result, &text) != 0)
		text = NULL;
	g.head->cupti_result = result;
	set_state(ARGUS_CUPTI_IGNORED, "%s: %s (%d)", call, text ? text : "error", result);
}

static void no_callback(void *user, uint32_t domain, uint32_t call, const void *data) {
	(void)user, (void)domain, (void)call, (void)data;
}

static bool held_by_another(int result) {
	return result == MULTIPLE_SUBSCRIBERS || result == MAX_LIMIT_REACHED;
}

/* 0: nobody holds CUPTI. There is one subscription for a process. Argus does not keep it: a profiler of the program's own that
 * finds it taken gives up for ever (torch.profiler does), and Argus must not change what the program can do. */
static int somebody_else(void) {
	void *subscriber = NULL;
	int result = cupti.Subscribe(&subscriber, no_callback, NULL);
	if (!result)
		cupti.Unsubscribe(subscriber);
	return result;
}

/* Another profiler had the callbacks: buffers that CUPTI gave back then went to it. What CUPTI has still comes back now;
 * what does not, it does not have. */
static void take_back(void) {
	if (cupti.ActivityRegisterCallbacks(buffer_requested, buffer_completed))
		return;
	flush(1);
	walk_returned(true);
	for (uint32_t i = 0; i < g.head->slots; i++)
		if (load(g.slots[i].state) == ARGUS_CUPTI_LENT) {
			madvise(g.buffers + i * g.stride, g.stride, MADV_REMOVE);
			store(g.slots[i].state, ARGUS_CUPTI_FREE);
		}
	g.taken = false;
}

static void start(void) {
	struct argus_cupti_control *head = g.head;
	int result;
	if (g.on || !load_cupti() || !map_ring())
		return;
	head->cupti_result = 0;
	if ((result = somebody_else()) != 0) {
		(held_by_another(result) ? ignore : fail)("cuptiSubscribe", result);
		return;
	}
	if (g.taken)
		take_back();
	if (!populate())
		return;
	for (uint32_t i = 0; i < head->attributes_count && i < 8; i++) {
		uint64_t value = head->attributes[i].value;
		size_t size = head->attributes[i].bytes;
		if (size <= sizeof value)
			cupti.ActivitySetAttribute(head->attributes[i].attribute, &size, &value);
	}
	const char *call = "cuptiActivityRegisterTimestampCallback";
	result = cupti.ActivityRegisterTimestampCallback(timestamp);
	if (!result) {
		call = "cuptiActivityRegisterCallbacks";
		result = cupti.ActivityRegisterCallbacks(buffer_requested, buffer_completed);
	}
	if (!result) {
		call = "cuptiActivityEnable";
		result = switch_kinds(true);
	}
	if (result) {
		switch_kinds(false);
		fail(call, result);
		return;
	}
	atexit(at_exit); /* again at each start: the last to be registered runs first, before CUDA's own end */
	g.on = true;
	g.paused = false;
	g.epoch++;
	g.beat = load(head->heartbeat);
	g.beat_ns = now_ns();
	head->wakes++;
	set_state(ARGUS_CUPTI_ON, "%s", "");
}

/* ---- off ---- */

/* What is launched before the end is recorded when it has run, in buffers that CUPTI may only then ask for: they are waited
 * for until none has come for a while. */
static void flush_all(void) {
	int64_t begin = now_ns(), last = begin;
	uint64_t requests = g.head->requests;
	for (int64_t now = begin; now - last < QUIET_NS && now - begin < FINISH_NS; now = now_ns()) {
		bool lent = false;
		flush(0);
		for (uint32_t slot = 0; slot < g.head->slots; slot++)
			lent |= load(g.slots[slot].state) == ARGUS_CUPTI_LENT;
		uint64_t asked = load(g.head->requests);
		if (lent || asked != requests)
			last = now_ns();
		requests = asked;
		nanosleep(&(struct timespec){0, 10000000}, NULL);
	}
	flush(1);
}

/* Everything is disabled and every buffer returned; CUPTI itself stays attached. cuptiFinalize would take it out, and on
 * CUDA 13.0 corrupts the heap of a training process within some ten uses, at the exit of a synchronising call too, while
 * what a disabled CUPTI costs is not measurable (docs/gpu.md). */
static void stop(const char *why) {
	struct argus_cupti_control *head = g.head;
	if (g.on) {
		g.on = false;
		switch_kinds(false);
		flush_all();
		walk_unless_argus_does();
	} else if (head->state != ARGUS_CUPTI_PROBED && head->state != ARGUS_CUPTI_IGNORED) {
		return;
	}
	set_state(ARGUS_CUPTI_OFF, "%s", why);
}

/* Whether a profiler of the program's own came, which then has the buffer callbacks and must not be disturbed. */
static void look_for_others(void) {
	int result = somebody_else();
	if (!held_by_another(result))
		return;
	g.on = false;
	g.taken = true;
	restore_thread_names();
	walk_unless_argus_does();
	ignore("taken over", result);
}

static void release(void) {
	if (g.on || !g.buffers)
		return;
	for (uint32_t i = 0; i < g.head->slots; i++) {
		if (load(g.slots[i].state) == ARGUS_CUPTI_LENT) /* CUPTI has not given it back: it may still write there */
			continue;
		madvise(g.buffers + i * g.stride, g.stride, MADV_REMOVE);
		store(g.slots[i].state, ARGUS_CUPTI_FREE);
	}
	set_state(ARGUS_CUPTI_DORMANT, "%s", "");
}

/* Whether Argus is reading a buffer outside, and the names that it points at, which end with the process. */
static bool argus_reads(void) {
	for (uint32_t i = 0; g.buffers && i < g.head->slots; i++)
		if (load(g.slots[i].state) == ARGUS_CUPTI_CLAIMED)
			return true;
	return false;
}

static void at_exit(void) {
	struct timespec limit, now, turn = {.tv_nsec = 1000000};
	if (!g.head || in_child() || __atomic_exchange_n(&g.exiting, true, __ATOMIC_ACQ_REL))
		return;
	clock_gettime(CLOCK_REALTIME, &limit);
	limit.tv_sec += 2;
	if (pthread_mutex_timedlock(&g.work, &limit))
		return;
	if (g.on) { /* after a stop names may be gone: what Argus has not read by now is left to it */
		flush(1);
		walk_returned(true);
	}
	while (argus_reads() && !clock_gettime(CLOCK_REALTIME, &now) && now.tv_sec < limit.tv_sec)
		nanosleep(&turn, NULL);
	set_state(ARGUS_CUPTI_ENDED, "the process ended");
	/* The lock stays held: nothing of CUPTI may be called from here on. */
}

/* ---- the helper's thread ---- */

static void obey(void) {
	uint32_t sequence = load(g.head->command_seq);
	if (sequence == g.served)
		return;
	switch (g.head->command) {
	case ARGUS_CUPTI_PROBE: probe(); break;
	case ARGUS_CUPTI_START: start(); break;
	case ARGUS_CUPTI_STOP: stop("switched off"); break;
	case ARGUS_CUPTI_RELEASE: release(); break;
	}
	g.served = sequence;
	store(g.head->done_seq, sequence);
	futex_wake(&g.head->done_seq);
}

static void look_for_argus(void) {
	uint32_t beat = load(g.head->heartbeat);
	int64_t now = now_ns();
	if (beat != g.beat) {
		g.beat = beat;
		g.beat_ns = now;
	} else if (now - g.beat_ns > VANISHED_NS) {
		stop("Argus vanished");
		release();
	}
}

/* CUDA loads this library inside cuInit. Argus may be faster than cuInit, and CUPTI must not be touched by another thread
 * before it is done: a second call of it waits for the first. */
static void wait_for_cuda(void) {
	void *cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
	int (*init)(unsigned) = NULL;
	if (cuda) {
		void *found = dlsym(cuda, "cuInit");
		memcpy(&init, &found, sizeof init);
	}
	if (init)
		init(0);
}

/* A share of the time costs a share of CUPTI's price. Aligned to the clock, so that all ranks record the same steps. */
static void keep_to_the_share(void) {
	uint32_t period = g.head->period_ms;
	bool pause = period && (uint64_t)now_ns() / 1000000 % period >= g.head->on_ms;
	if (pause == g.paused)
		return;
	switch_kinds(!pause);
	g.paused = pause;
}

static void *serve(void *loaded_by_cuda) {
	int64_t flushed_ns = now_ns(), looked_ns = flushed_ns;
	if (loaded_by_cuda) {
		if (!g.on)
			futex_wait(&g.head->command_seq, g.served, -1);
		wait_for_cuda();
	}
	for (;;) {
		pthread_mutex_lock(&g.work);
		if (g.exiting)
			return NULL; /* with the lock, which at_exit may be waiting for in vain: it has a time limit */
		obey();
		if (g.on) {
			uint32_t every_ms = g.head->flush_ms ? g.head->flush_ms : 1000;
			if (now_ns() - looked_ns >= LOOK_NS) {
				look_for_others();
				looked_ns = now_ns();
			}
			if (g.on && now_ns() - flushed_ns >= every_ms * 1000000ll) {
				flush(0);
				flushed_ns = now_ns();
			}
			if (g.on)
				keep_to_the_share();
			if (g.on)
				look_for_argus();
		}
		walk_unless_argus_does();
		bool on = g.on;
		pthread_mutex_unlock(&g.work);
		futex_wait(&g.head->command_seq, g.served, on ? TICK_MS : -1);
	}
}

/* ---- loaded ---- */

static void forked(void) {
	/* CUDA does not work in a forked child, and the mappings are not there (MADV_DONTFORK). */
	g.head = NULL;
	g.buffers = NULL;
	g.on = false;
}

/* Processes of a job that are no ranks: they would be armed for nothing. */
static bool no_rank(void) {
	static const char *const words[] = {"torch/_inductor/compile_worker", "multiprocessing.resource_tracker", "torchrun",
					    "torch.distributed.run", "torch.distributed.launch", "accelerate-launch"};
	const char *wish = getenv("ARGUS_CUPTI");
	if (wish && !strcmp(wish, "0"))
		return true;
	char line[4096];
	int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
	ssize_t got = file < 0 ? -1 : read(file, line, sizeof line - 1);
	if (file >= 0)
		close(file);
	if (got <= 0)
		return false;
	/* Only what is run, not what it is given: the first words up to the program. */
	size_t words_seen = 0;
	for (char *word = line; word < line + got && words_seen < 6; word += strlen(word) + 1, words_seen++) {
		line[got] = 0;
		for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
			const char *at = strstr(word, words[i]);
			if (at && (at[strlen(words[i])] == 0 || strchr("/. (", at[strlen(words[i])])))
				return true;
		}
		size_t length = strlen(word);
		if (word != line && length > 3 && !strcmp(word + length - 3, ".py"))
			return false;
	}
	return false;
}

static bool map_head(void) {
	int file = (int)syscall(SYS_memfd_create, ARGUS_CUPTI_MEMFD, 3u /* MFD_CLOEXEC, MFD_ALLOW_SEALING */);
	/* Sparse: pages exist once they are touched. */
	uint64_t total = ARGUS_CUPTI_BUFFERS_OFFSET + (uint64_t)MAX_BUFFERS_BYTES;
	if (file < 0)
		return false;
	/* It never becomes shorter: Argus would be killed if it read what was cut off. Argus must not seal it itself, since
	 * whoever writes to the file holds a lock that this waits for. */
	void *head = ftruncate(file, (off_t)total) || fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK)
			     ? MAP_FAILED
			     : mmap(NULL, ARGUS_CUPTI_HEAD_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	close(file);
	if (head == MAP_FAILED)
		return false;
	madvise(head, ARGUS_CUPTI_HEAD_BYTES, MADV_DONTFORK);
	g.head = head;
	g.pid = syscall(SYS_getpid);
	g.slots = (struct argus_cupti_slot *)((uint8_t *)head + ARGUS_CUPTI_SLOTS_OFFSET);
	g.head->head_bytes = ARGUS_CUPTI_HEAD_BYTES;
	g.head->pid = (uint32_t)getpid();
	g.head->file_bytes = total;
	set_state(ARGUS_CUPTI_DORMANT, "%s", "");
	store(g.head->magic, ARGUS_CUPTI_MAGIC);
	return true;
}

/* The decimal number that a text begins with, at most a day of milliseconds. No strtol: the headers of glibc 2.38 and later
 * turn it into __isoc23_strtol, which older ones lack. */
static int64_t decimal(const char *text) {
	int64_t value = 0;
	for (; *text >= '0' && *text <= '9' && value < 86400000; text++)
		value = 10 * value + (*text - '0');
	return value;
}

/* `argus run` asks for the first kernel too: then commands are obeyed here, inside cuInit, until it is on or time is out. */
static void serve_first(const char *wait) {
	int64_t begin = now_ns(), patience = decimal(wait) * 1000000ll, deadline = begin + patience;
	uint32_t beat = load(g.head->heartbeat);
	pthread_mutex_lock(&g.work);
	store(g.head->holding, 1);
	while (now_ns() < deadline && (g.head->state == ARGUS_CUPTI_DORMANT || g.head->state == ARGUS_CUPTI_PROBED)) {
		futex_wait(&g.head->command_seq, g.served, 20);
		obey();
		if (beat != load(g.head->heartbeat)) { /* Argus has found it: a busy machine gets more time */
			beat = load(g.head->heartbeat);
			deadline = now_ns() + patience < begin + HOLD_NS ? now_ns() + patience : begin + HOLD_NS;
		}
	}
	store(g.head->holding, 0);
	pthread_mutex_unlock(&g.work);
}

/* Called by CUDA in cuInit (CUDA_INJECTION64_PATH), or by whoever loaded the library. Returns 1, as CUDA expects. */
EXPORT int InitializeInjection(void) {
	static uint32_t once;
	static const char name[] = "argus-cupti";
	pthread_t thread;
	pthread_attr_t attributes;
	sigset_t all, before;
	if (__atomic_exchange_n(&once, 1, __ATOMIC_ACQ_REL) || no_rank() || !map_head())
		return 1;
	pthread_atfork(NULL, NULL, forked);
	Dl_info caller;
	bool by_cuda = dladdr(__builtin_return_address(0), &caller) && caller.dli_fname && strstr(caller.dli_fname, "libcuda");
	const char *wait = getenv("ARGUS_CUPTI_WAIT_MS");
	if (wait && by_cuda)
		serve_first(wait);
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, 1 << 20);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* the thread inherits it: signals stay the program's own */
	if (pthread_create(&thread, &attributes, serve, by_cuda ? &g : NULL) == 0)
		pthread_setname_np(thread, name);
	else
		set_state(ARGUS_CUPTI_FAILED, "no thread could be made: %s", strerror(errno));
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attributes);
	return 1;
}
