/* How the current thread entered the kernel. */
struct entry {
	u32 call;          /* system call, or ARGUS_NO_SYSCALL: an interrupt or a fault */
	u64 argument;      /* its first */
	u64 ip, sp;
};

INLINE void read_entry(struct entry *entry)
{
	entry->call = ARGUS_NO_SYSCALL;
#ifdef ARGUS_TASK_PID
	void *regs = argus_task_regs(argus_current_task());
#if defined(__aarch64__) || defined(__TARGET_ARCH_arm64)
	/* struct pt_regs: sp, pc, pstate, orig_x0, syscallno (arch/arm64/include/asm/ptrace.h). */
	u64 words[5] = {};
	if (bpf_probe_read_kernel(words, sizeof(words), regs + 248) != 0)
		return;
	s64 number = (s32)words[4];
	entry->argument = words[3];
	entry->ip = words[1];
	entry->sp = words[0];
#else
	/* di, orig_ax, ip, cs, flags, sp */
	u64 words[6] = {};
	if (bpf_probe_read_kernel(words, sizeof(words), regs + 112) != 0)
		return;
	s64 number = (s64)words[1];
	if (number > 0)
		number &= ~0x40000000ll; /* x32 */
	entry->argument = words[0];
	entry->ip = words[2];
	entry->sp = words[5];
#endif
	if (number >= 0 && number < ARGUS_NO_SYSCALL)
		entry->call = number;
#endif
}

#if defined(__aarch64__) || defined(__TARGET_ARCH_arm64)
#define IN_KERNEL(ctx) ((ctx)->pstate & 0xf)
#define SYS_FUTEX 98
#else
#define IN_KERNEL(ctx) (((ctx)->cs & 3) == 0)
#define SYS_FUTEX 202
#endif
#define SYS_FUTEX_WAIT 455
