/* Threads that block, for scripts/benches/stacks.py. Reads commands, prints three numbers for each: nanoseconds, times
 * that threads went off the CPU, CPU time of the process in nanoseconds.
 *
 *   t N       two threads on one CPU hand a byte to each other N times
 *   b HZ MS   one thread blocks HZ times a second for MS milliseconds
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static int there[2], back[2];

static long now(clockid_t clock)
{
	struct timespec time;
	clock_gettime(clock, &time);
	return time.tv_sec * 1000000000L + time.tv_nsec;
}

static long switches(void)
{
	struct rusage usage;
	getrusage(RUSAGE_SELF, &usage);
	return usage.ru_nvcsw + usage.ru_nivcsw;
}

static void *echo(void *unused)
{
	char byte;
	while (read(there[0], &byte, 1) == 1 && write(back[1], &byte, 1) == 1)
		;
	return unused;
}

static void take_turns(long n)
{
	char byte = 0;
	for (long i = 0; i < n; i++)
		if (write(there[1], &byte, 1) != 1 || read(back[0], &byte, 1) != 1)
			return;
}

static void block(long hz, long ms)
{
	long period = 1000000000L / hz, due = now(CLOCK_MONOTONIC), end = due + ms * 1000000L;
	while (due < end) {
		long late = now(CLOCK_MONOTONIC) - due;
		due += late > period ? late - late % period : period;
		struct timespec time = {due / 1000000000L, due % 1000000000L};
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, 0);
	}
}

int main(void)
{
	char line[64], what;
	long first, second;
	pthread_t thread;
	cpu_set_t cpus, one;
	if (pipe(there) || pipe(back))
		return 1;
	/* The last CPU it may use, for both: no wake-up then crosses to another. */
	sched_getaffinity(0, sizeof(cpus), &cpus);
	int last = CPU_SETSIZE - 1;
	while (last && !CPU_ISSET(last, &cpus))
		last--;
	CPU_ZERO(&one);
	CPU_SET(last, &one);
	sched_setaffinity(0, sizeof(one), &one);
	prctl(PR_SET_TIMERSLACK, 1);
	pthread_create(&thread, 0, echo, 0);
	while (fgets(line, sizeof(line), stdin)) {
		int fields = sscanf(line, "%c %ld %ld", &what, &first, &second);
		long began = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID), off = switches();
		if (what == 't' && fields == 2)
			take_turns(first);
		else if (what == 'b' && fields == 3)
			block(first, second);
		else
			return 1;
		long ns = now(CLOCK_MONOTONIC) - began;
		printf("%ld %ld %ld\n", ns, switches() - off, now(CLOCK_PROCESS_CPUTIME_ID) - cpu);
		fflush(stdout);
	}
	return 0;
}
