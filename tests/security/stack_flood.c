/* Sleeps 200 us again and again, each time with another stack: 24 calls deep, each through one of two functions. */

#include <time.h>

static void b(unsigned bits, int depth);

__attribute__((noinline)) static void wait_here(void)
{
	struct timespec pause = {0, 200000};
	nanosleep(&pause, 0);
	__asm__ volatile("" ::: "memory");
}

__attribute__((noinline)) static void a(unsigned bits, int depth)
{
	if (!depth)
		wait_here();
	else if (bits & 1)
		a(bits >> 1, depth - 1);
	else
		b(bits >> 1, depth - 1);
	__asm__ volatile("" ::: "memory");
}

__attribute__((noinline)) static void b(unsigned bits, int depth)
{
	if (!depth)
		wait_here();
	else if (bits & 1)
		a(bits >> 1, depth - 1);
	else
		b(bits >> 1, depth - 1);
	__asm__ volatile("" ::: "memory");
}

int main(void)
{
	for (unsigned number = 0;; number++)
		a(number * 2654435761u, 24);
}
