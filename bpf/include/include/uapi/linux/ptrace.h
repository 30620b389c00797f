#ifndef ARGUS_STUB_PTRACE_H
#define ARGUS_STUB_PTRACE_H
/* Registers as the kernel hands them to a probe: x86_64 as in arch/x86/include/asm/ptrace.h, aarch64 as user_pt_regs of
 * arch/arm64/include/uapi/asm/ptrace.h (the part of pt_regs that BPF may read). */
#if defined(__aarch64__) || defined(__TARGET_ARCH_arm64)
struct user_pt_regs {
	unsigned long long regs[31];
	unsigned long long sp;
	unsigned long long pc;
	unsigned long long pstate;
};
struct pt_regs {
	unsigned long long regs[31];
	unsigned long long sp;
	unsigned long long pc;
	unsigned long long pstate;
};
#else
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx;
	unsigned long r11, r10, r9, r8, ax, cx, dx, si, di;
	unsigned long orig_ax, ip, cs, flags, sp, ss;
};
#endif
#endif
