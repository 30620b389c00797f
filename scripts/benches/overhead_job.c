/* A job that is bound by what its only thread does: steps of launches, copies, collectives and a wait, with a fixed amount
 * of work between them, so that whatever a call costs more makes the step longer.
 *
 *   overhead_job LOG STEP_US LAUNCHES COPIES COLLECTIVES
 *
 * The log has four 64-bit numbers a step: its end (CLOCK_MONOTONIC), its duration, the thread's CPU time in it, and how
 * long an eighth of its work took in which nothing is called: the machine's speed at that moment; ns. It ends when standard
 * input does. */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include "overhead_calls.h"

static ul now(clockid_t clock)
{
	struct timespec t;
	clock_gettime(clock, &t);
	return t.tv_sec * 1000000000UL + t.tv_nsec;
}

__attribute__((noinline)) static void work(ul turns)
{
	while (turns--)
		__asm__ volatile("");
}

enum { GAUGES = 8 };

/* Returns how long the gauges took. */
static ul step(ul turns, ul gauge_turns, u launches, u copies, u collectives)
{
	ul gauged = 0;
	u most = launches > copies ? launches : copies;
	most = collectives > most ? collectives : most;
	for (u i = 0, gauges = 0; i < most; i++) {
		if (i * GAUGES >= gauges * most) {
			ul begin = now(CLOCK_MONOTONIC);
			work(gauge_turns);
			gauged += now(CLOCK_MONOTONIC) - begin;
			gauges++;
		}
		if (i < launches) {
			cuLaunchKernel((void *)0x1000, 64, 1, 1, 256, 1, 1, 0, 0, 0, 0);
			work(turns);
		}
		if (i < copies) {
			cuMemcpyAsync(0x2000, 0x3000, 4096, 0);
			work(turns);
		}
		if (i < collectives) {
			ncclAllReduce((void *)0x2000, (void *)0x3000, 1 << 20, 7, 0, (void *)0x4000, 0);
			work(turns);
		}
	}
	cuStreamSynchronize(0);
	return gauged;
}

int main(int argc, char **argv)
{
	if (argc != 6)
		return 2;
	u launches = atoi(argv[3]), copies = atoi(argv[4]), collectives = atoi(argv[5]);
	ul step_ns = 1000UL * atol(argv[2]), calls = launches + copies + collectives;
	double per_turn = 1e9;
	for (int i = 0; i < 20; i++) {
		ul begin = now(CLOCK_MONOTONIC);
		work(1000000);
		double took = (now(CLOCK_MONOTONIC) - begin) / 1e6;
		per_turn = took < per_turn ? took : per_turn;
	}
	ul all = step_ns / per_turn, gauge_turns = all / 8 / GAUGES, turns = all * 7 / 8 / calls;
	int log = open(argv[1], O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
	struct pollfd input = {.fd = 0, .events = POLLIN};
	puts("ready");
	fflush(stdout);
	ul cpu = now(CLOCK_THREAD_CPUTIME_ID), at = now(CLOCK_MONOTONIC), looked = at;
	static ul rows[64][4];
	for (u n = 0;;) {
		rows[n][3] = step(turns, gauge_turns, launches, copies, collectives);
		ul cpu_now = now(CLOCK_THREAD_CPUTIME_ID), at_now = now(CLOCK_MONOTONIC);
		rows[n][0] = at_now;
		rows[n][1] = at_now - at;
		rows[n][2] = cpu_now - cpu;
		cpu = cpu_now, at = at_now;
		if (++n == 64 || at - looked > 100000000UL) { /* what follows is part of the next step, every time */
			if (write(log, rows, n * sizeof(rows[0])) < 0)
				return 1;
			n = 0, looked = at;
			if (poll(&input, 1, 0) > 0)
				return 0;
		}
	}
}
