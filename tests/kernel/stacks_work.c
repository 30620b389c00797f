/* Threads that burn CPU, block and exec in ways that can be counted. tests/kernel/test_stack_probes.py runs it.
 *
 *   stacks_work burn THREADS       threads that burn in outer -> middle -> inner
 *   stacks_work block              waits for a line, blocks prime numbers of times in four ways, prints after each how often
 *                                  the kernel counted it (voluntary context switches), then stays
 *   stacks_work fast N             waits for a line, blocks N times for no time, prints the same, then stays
 *   stacks_work places N MS K      waits for a line, then N times: sleeps MS ms in one place and K moments in the same,
 *                                  2 ms in twelve others, and a moment in those, 200 times in all; then stays
 *   stacks_work threads N          starts and ends N threads, four at a time, that burn for some ms each, then stays
 *   stacks_work hang               stays in inner <- middle <- outer, blocked in poll
 *   stacks_work exec               waits for a line, then executes itself as "burn 1"
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MS 3

static volatile int stop;

static void pause_ms(long ms)
{
	struct timespec time = {ms / 1000, ms % 1000 * 1000000};
	nanosleep(&time, 0);
}

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec * 1e-9;
}

__attribute__((noinline)) void inner(double seconds)
{
	if (seconds < 0)
		poll(0, 0, -1);
	double end = now() + seconds;
	while (!stop && now() < end)
		for (volatile int i = 0; i < 20000; i++)
			;
	__asm__ volatile("");
}
__attribute__((noinline)) void middle(double seconds) { inner(seconds); __asm__ volatile(""); }
__attribute__((noinline)) void outer(double seconds) { middle(seconds); __asm__ volatile(""); }

static void *burn(void *seconds)
{
	outer(*(double *)seconds);
	return 0;
}

static int there[2], back[2];

static void *answer(void *unused)
{
	char byte;
	while (read(there[0], &byte, 1) == 1) {
		pause_ms(MS);
		if (write(back[1], &byte, 1) != 1)
			break;
	}
	return unused;
}

static void *echo(void *unused)
{
	char byte;
	while (read(there[0], &byte, 1) == 1 && write(back[1], &byte, 1) == 1)
		;
	return unused;
}

/* Sleeps in another place for each depth: a place is identified by the stack pointer. */
__attribute__((noinline)) static void sleep_below(int depth, long ns)
{
	volatile char room[64];
	struct timespec time = {0, ns};
	room[0] = 0;
	if (depth > 0)
		sleep_below(depth - 1, ns);
	else
		nanosleep(&time, 0);
	__asm__ volatile("" : : "r"(room) : "memory");
}

static void end(void)
{
	printf("\n");
	fflush(stdout);
	pause();
}

static long voluntary;

static void report(void)
{
	struct rusage usage;
	getrusage(RUSAGE_THREAD, &usage);
	printf("%ld ", usage.ru_nvcsw - voluntary);
	voluntary = usage.ru_nvcsw;
}

int main(int argc, char **argv)
{
	char line[16], byte = 0;
	const char *mode = argv[1];
	int number = argc > 2 ? atoi(argv[2]) : 0;
	double forever = 1e9, moment = 0.004;
	pthread_t thread[4];
	if (pipe(there) || pipe(back))
		return 1;
	if (strcmp(mode, "burn") == 0) {
		for (int i = 1; i < number; i++)
			pthread_create(&thread[0], 0, burn, &forever);
		burn(&forever);
	} else if (strcmp(mode, "block") == 0) {
		int word = 0;
		pthread_create(&thread[0], 0, answer, 0);
		if (!fgets(line, sizeof(line), stdin))
			return 1;
		report();
		for (int i = 0; i < 101; i++)
			pause_ms(MS);
		report();
		for (int i = 0; i < 103; i++)
			poll(0, 0, MS);
		report();
		for (int i = 0; i < 107; i++) {
			struct timespec time = {0, MS * 1000000};
			syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &time, 0, 0);
		}
		report();
		for (int i = 0; i < 109; i++)
			if (write(there[1], &byte, 1) != 1 || read(back[0], &byte, 1) != 1)
				return 1;
		report();
		end();
	} else if (strcmp(mode, "fast") == 0) {
		pthread_create(&thread[0], 0, echo, 0);
		if (!fgets(line, sizeof(line), stdin))
			return 1;
		for (int i = 0; i < number; i++)
			if (write(there[1], &byte, 1) != 1 || read(back[0], &byte, 1) != 1)
				return 1;
		report();
		end();
	} else if (strcmp(mode, "places") == 0) {
		if (!fgets(line, sizeof(line), stdin))
			return 1;
		for (int i = 0; i < number; i++) {
			for (int j = 0; j <= atoi(argv[4]); j++) {
				struct timespec time = {0, j ? 50000 : atoi(argv[3]) * 1000000};
				ppoll(0, 0, &time, 0);
			}
			for (int j = 0; j < 12; j++)
				sleep_below(300 + j, 2000000);
			for (int j = 0; j < 200; j++)
				sleep_below(300 + j % 12, 1);
		}
		report();
		end();
	} else if (strcmp(mode, "threads") == 0) {
		if (!fgets(line, sizeof(line), stdin))
			return 1;
		for (int i = 0; i < number; i += 4) {
			for (int j = 0; j < 4; j++)
				pthread_create(&thread[j], 0, burn, &moment);
			for (int j = 0; j < 4; j++)
				pthread_join(thread[j], 0);
		}
		report();
		end();
	} else if (strcmp(mode, "hang") == 0) {
		printf("%p %p %p\n", (void *)inner, (void *)middle, (void *)outer);
		fflush(stdout);
		if (!fgets(line, sizeof(line), stdin))
			return 1;
		outer(-1);
	} else if (strcmp(mode, "exec") == 0) {
		if (!fgets(line, sizeof(line), stdin))
			return 1;
		execl("/proc/self/exe", argv[0], "burn", "1", (char *)0);
	}
	return 1;
}
