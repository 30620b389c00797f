/* Native frames of the current thread: those that frame pointers lead to, else the innermost only. */

#define LARGEST_FRAME (1ull << 26)

/* Reads where the thread is in user space, and the chain of frame pointers. Returns the bytes.
 *
 * Most code keeps something else in that register. The kernel's helper took 2 to 3.5 us more for such a thread, and what it
 * reads on the way makes stacks different that are the same: whatever cannot be a frame is not followed. */
INLINE long native_stack(void *ctx, u64 *native)
{
#if defined(ARGUS_TASK_PID) && !defined(__aarch64__) && !defined(__TARGET_ARCH_arm64)
	/* bp to sp (arch/x86/include/asm/ptrace.h) */
	u64 words[16] = {}, frame[2] = {};
	if (bpf_probe_read_kernel(words, sizeof(words), (void *)argus_task_regs(argus_current_task()) + 32) == 0) {
		u64 bp = words[0], ip = words[12], sp = words[15];
		u64 near = bp - sp < LARGEST_FRAME && !(bp & 7);
		/* A thread that is ending has no memory, and then no stack. */
		if (read(frame, sizeof(frame), near ? bp : sp) == 0 && (!near || frame[1] - 4096 >= 1ull << 47)) {
			native[0] = ip;
			return 8;
		}
	}
#endif
	return argus_get_stack(ctx, native, ARGUS_NATIVE_FRAMES * 8, USER_STACK);
}
