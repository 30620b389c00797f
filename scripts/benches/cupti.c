/* What the target of the cupti bench runs: launches kernels of many names at a given rate, on a thread of its own, through
 * whatever libcuda.so.1 is there; and a client of CUPTI that does nothing with what it gets, for comparison. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_NAMES 1000
#define BATCH 64
#define NULL_BUFFERS 64
#define NULL_BYTES (1u << 20)

static void *functions[MAX_NAMES];
static int names;
static long count, rate;
static pthread_t thread;
int finished;
long null_records;

static int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static int (*set_current)(void *);
static int (*synchronize)(void);
static void *context;

static int64_t now_ns(void) {
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* Returns a CUDA error; -1: no libcuda. */
int prepare(int wanted) {
	void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), *module;
	if (!cuda)
		return -1;
	int (*init)(unsigned) = dlsym(cuda, "cuInit");
	int (*retain)(void **, int) = dlsym(cuda, "cuDevicePrimaryCtxRetain");
	int (*load)(void **, const void *) = dlsym(cuda, "cuModuleLoadData");
	int (*get)(void **, void *, const char *) = dlsym(cuda, "cuModuleGetFunction");
	launch = dlsym(cuda, "cuLaunchKernel");
	set_current = dlsym(cuda, "cuCtxSetCurrent");
	synchronize = dlsym(cuda, "cuCtxSynchronize");
	size_t room = 256 + (size_t)wanted * 64, at = 0;
	char *ptx = malloc(room);
	at += snprintf(ptx, room, ".version 7.0\n.target sm_50\n.address_size 64\n");
	for (int i = 0; i < wanted; i++)
		at += snprintf(ptx + at, room - at, ".visible .entry kernel_%d() { ret; }\n", i);
	int result = init(0);
	if (!result)
		result = retain(&context, 0);
	if (!result)
		result = set_current(context);
	if (!result)
		result = load(&module, ptx);
	for (names = 0; !result && names < wanted; names++) {
		char name[32];
		snprintf(name, sizeof name, "kernel_%d", names);
		result = get(&functions[names], module, name);
	}
	free(ptx);
	return result;
}

static void *produce(void *unused) {
	int64_t begin = now_ns();
	set_current(context);
	for (long i = 0; i < count; i++) {
		if (rate && i % BATCH == 0) {
			int64_t due = begin + (int64_t)(i * 1e9 / rate);
			struct timespec until = {due / 1000000000, due % 1000000000};
			if (now_ns() < due)
				clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
		}
		launch(functions[i % names], 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
	}
	synchronize();
	__atomic_store_n(&finished, 1, __ATOMIC_RELEASE);
	return unused;
}

/* Launches so many kernels, so many a second (0: as fast as possible), on a thread. */
int begin(long launches, long per_second) {
	count = launches;
	rate = per_second;
	finished = 0;
	return pthread_create(&thread, NULL, produce, NULL);
}

void end(void) {
	pthread_join(thread, NULL);
}

/* ---- the client that does nothing ---- */

static uint8_t *buffers[NULL_BUFFERS];
static unsigned next;

static void requested(uint8_t **buffer, size_t *size, size_t *most) {
	*buffer = buffers[__atomic_fetch_add(&next, 1, __ATOMIC_RELAXED) % NULL_BUFFERS];
	*size = NULL_BYTES;
	*most = 0;
}

static void completed(void *ctx, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
	(void)ctx, (void)stream, (void)buffer, (void)size;
	__atomic_fetch_add(&null_records, (long)valid, __ATOMIC_RELAXED);
}

/* `zeroed`: says that its buffers are, which they are not, since nobody reads them: the fake does not look. */
int null_client(const char *path, int on, int zeroed) {
	enum { KERNEL = 10, ZEROED_OUT_BUFFER = 5 };
	void *cupti = dlopen(path, RTLD_NOW);
	if (!cupti)
		return -1;
	int (*set)(unsigned, size_t *, void *) = dlsym(cupti, "cuptiActivitySetAttribute");
	int (*callbacks)(void *, void *) = dlsym(cupti, "cuptiActivityRegisterCallbacks");
	int (*enable)(unsigned) = dlsym(cupti, on ? "cuptiActivityEnable" : "cuptiActivityDisable");
	int (*flush)(unsigned) = dlsym(cupti, "cuptiActivityFlushAll");
	if (!on) {
		int result = enable(KERNEL);
		return result ? result : flush(1);
	}
	for (int i = 0; i < NULL_BUFFERS; i++)
		if (!buffers[i] && (buffers[i] = aligned_alloc(4096, NULL_BYTES)))
			memset(buffers[i], 0, NULL_BYTES);
	uint64_t yes = 1;
	size_t size = 1;
	if (zeroed)
		set(ZEROED_OUT_BUFFER, &size, &yes);
	int result = callbacks(requested, completed);
	return result ? result : enable(KERNEL);
}
