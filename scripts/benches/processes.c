/* One rank that does next to nothing, linked against functions with the names of CUDA's and NCCL's that do nothing either
 * (overhead_calls.c): a step a second of four launches, a collective and a wait. Ends with its parent.
 *
 *   processes RANK */
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include "overhead_calls.h"

int main(int argc, char **argv)
{
	struct timespec next;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	clock_gettime(CLOCK_MONOTONIC, &next);
	next.tv_nsec = argc > 1 ? atol(argv[1]) * 7919 % 1000 * 1000000 : 0; /* not all at once */
	for (;;) {
		next.tv_sec++;
		while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, 0))
			;
		for (int i = 0; i < 4; i++)
			cuLaunchKernel((void *)(0x1000ul + i), 64, 1, 1, 256, 1, 1, 0, 0, 0, 0);
		ncclAllReduce((void *)0x2000, (void *)0x3000, 1 << 20, 7, 0, (void *)0x4000, 0);
		cuStreamSynchronize(0);
	}
}
