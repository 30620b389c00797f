/* Python's garbage collections: their beginning and end, from what samples and switches show of them. */

INLINE void end_pause(struct thread *thread, u32 tid, u64 after)
{
	struct argus_pause pause = {};
	pause.begin_ns = thread->gc_begin_ns;
	pause.end_ns = thread->gc_end_ns;
	pause.before_ns = thread->gc_before_ns;
	pause.after_ns = after;
	pause.stack = thread->gc_stack;
	pause.period_ns = period_ns();
	pause.pid = thread->pid;
	pause.tid = tid;
	thread->gc_begin_ns = 0;
	if (pauses.ringbuf_output(&pause, sizeof(pause), NO_WAKEUP) != 0)
		count(ARGUS_SC_PAUSES_DROPPED);
}

INLINE void follow_pause(struct thread *thread, u32 tid, u32 what, u64 stack, u64 now)
{
	if (what & ARGUS_WHAT_GC) {
		if (!thread->gc_begin_ns) {
			thread->gc_begin_ns = now;
			thread->gc_before_ns = thread->sample_ns;
			thread->gc_stack = stack;
		} else if (!thread->gc_stack) {
			thread->gc_stack = stack;
		}
		thread->gc_end_ns = now;
	} else if (thread->gc_begin_ns) {
		end_pause(thread, tid, now);
	}
	thread->sample_ns = now;
}
