/* PUSH: the first instruction is emulated by every kernel. SUB: as of functions with a frame that keep no register, as
 * NVIDIA's; it is single-stepped, what follows need not be. FIXED: nothing in them is emulated. */
#include "overhead_calls.h"

#if defined(FIXED)
#define BODY __asm__("mov %rdi, %rax\n\txor %eax, %eax\n\tret");
#define KIND __attribute__((naked, noinline))
#elif defined(SUB)
#define BODY __asm__("sub $0x38, %rsp\n\ttest %rsp, %rsp\n\tje 1f\n1:\txor %eax, %eax\n\tadd $0x38, %rsp\n\tret");
#define KIND __attribute__((naked, noinline))
#else
#define BODY                                           \
	{                                              \
		__asm__ volatile("" ::: "rbx", "memory"); \
		return 0;                              \
	}
#define KIND __attribute__((noinline))
#endif
#pragma GCC diagnostic ignored "-Wunused-parameter"

#ifdef NCCL
KIND CALL(ncclAllReduce, const void *from, void *to, ul count, int dtype, int op, void *comm, void *stream) { BODY }
#else
KIND CALL(cuLaunchKernel, void *f, u gx, u gy, u gz, u bx, u by, u bz, u shared, void *stream, void **params, void **extra) { BODY }
KIND CALL(cuMemcpyAsync, ul to, ul from, ul bytes, void *stream) { BODY }
KIND CALL(cuStreamSynchronize, void *stream) { BODY }
#endif
