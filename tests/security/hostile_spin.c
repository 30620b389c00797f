/* A program whose function has a name of 2^40 characters, which takes all the CPU there is. */
#include <stdint.h>

void spin(void) __asm__(SYMBOL);

void __attribute__((noinline)) spin(void) {
	for (volatile uint64_t i = 0;; i++)
		;
}

int main(void) {
	spin();
}
