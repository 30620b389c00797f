/* Sleeps 200 us again and again, each time with another stack: 24 calls deep, each through one of two functions. */

#include <time.h>

#define STEP __attribute__((noinline)) static void

STEP wait_here(void)
{
	struct timespec pause = {0, 200000};
	nanosleep(&pause, 0);
	__asm__ volatile("" ::: "memory");
}

static void go_on(unsigned bits, int depth);

STEP a(unsigned bits, int depth)
{
	go_on(bits, depth);
	__asm__ volatile("" ::: "memory");
}

STEP b(unsigned bits, int depth)
{
	go_on(bits, depth);
	__asm__ volatile("" ::: "memory");
}

STEP go_on(unsigned bits, int depth)
{
	if (!depth)
		wait_here();
	else
		(bits & 1 ? a : b)(bits >> 1, depth - 1);
	__asm__ volatile("" ::: "memory");
}

int main(void)
{
	for (unsigned number = 0;; number++)
		go_on(number * 2654435761u, 24);
}
