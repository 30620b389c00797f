/* A library that passes for NCCL and cuBLAS, whose calls stay as long as the caller wants (test_neighbours.py). */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <unistd.h>

#define EXPORTED __attribute__((noinline, visibility("default")))

static volatile int started, stuck, leave;

static void stay(void)
{
	__atomic_add_fetch(&stuck, 1, __ATOMIC_SEQ_CST);
	while (!leave)
		usleep(10000);
	__atomic_sub_fetch(&stuck, 1, __ATOMIC_SEQ_CST);
}

/* Without a place for the handle it stays. */
EXPORTED int ncclCommInitRank(void **comm, int ranks, long id, int rank)
{
	if (comm)
		*comm = (void *)0x1234;
	else
		stay();
	return 0;
}

/* Without elements it stays. */
EXPORTED int ncclAllReduce(void *from, void *to, size_t count, int type, int op, void *comm, void *stream)
{
	if (!count)
		stay();
	return 0;
}

EXPORTED int ncclCommDestroy(void *comm)
{
	__asm__ volatile("");
	return 0;
}

/* Writes nothing. */
EXPORTED int ncclCommCount(void *comm, int *count)
{
	__asm__ volatile("");
	return 0;
}

EXPORTED int ncclGroupStart(void)
{
	__asm__ volatile("");
	return 0;
}

EXPORTED int ncclGroupEnd(void)
{
	__asm__ volatile("");
	return 0;
}

EXPORTED int cublasGemmEx(void *handle, int a, int b, int m, int n, int k)
{
	if (!m)
		stay();
	return 0;
}

static void *init(void *end)
{
	ncclCommInitRank(0, 2, 0, 0);
	return end;
}

static void *grouped(void *end)
{
	ncclGroupStart();
	ncclAllReduce(0, 0, 0, 0, 0, (void *)8, 0);
	return end;
}

static void *product(void *end)
{
	cublasGemmEx(0, 0, 0, 0, 0, 0);
	return end;
}

/* Starts threads that stay in a call. Returns how many stay, of all that were started. */
static int start(void *(*of)(void *), int threads)
{
	pthread_attr_t small;
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 65536);
	pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
	for (int i = 0; i < threads; i++) {
		pthread_t thread;
		started += !pthread_create(&thread, &small, of, 0);
	}
	while (stuck < started)
		usleep(1000);
	return stuck;
}

EXPORTED int stay_in_init(int threads)
{
	return start(init, threads);
}

EXPORTED int stay_in_groups(int threads)
{
	return start(grouped, threads);
}

EXPORTED int stay_in_products(int threads)
{
	return start(product, threads);
}

/* Lets all threads return. Groups are never ended. */
EXPORTED int leave_all(void)
{
	leave = 1;
	while (stuck)
		usleep(1000);
	started = leave = 0;
	return stuck;
}

EXPORTED int init_many(int times)
{
	void *comm;
	for (int i = 0; i < times; i++)
		ncclCommInitRank(&comm, 2, 0, 0);
	return times;
}

/* Calls on communicators at ever new addresses. */
EXPORTED int reduce_many(int first, int times)
{
	for (int i = 0; i < times; i++)
		ncclAllReduce(0, 0, 1, 0, 0, (void *)(uintptr_t)(0x1000 + 16 * (first + i)), 0);
	return times;
}

EXPORTED int end_many(int first, int times)
{
	for (int i = 0; i < times; i++)
		ncclCommDestroy((void *)(uintptr_t)(0x1000 + 16 * (first + i)));
	return times;
}
