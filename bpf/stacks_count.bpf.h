/* Counts stacks in the log of this CPU. */

/* Counts in this CPU's log. Programs that count do not interrupt each other there: the timer and sched_switch have
 * interrupts off. now: of the program; first, last: of what is counted. */
INLINE void tally(u64 now, u64 stack, u64 id, u32 what, u64 first, u64 last, u64 ns, u64 max_ns, u64 runqueue_ns)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct log *log = logs.lookup(&cpu);
	if (!log)
		return;
	u64 thread = id >> 32 | id << 32; /* as they lie in the key */
	u64 when = (last >> ARGUS_WINDOW_BITS) << 32 | what;
	u64 written = log->head.written, window = now >> ARGUS_WINDOW_BITS;
	if (log->head.window != window) {
		/* In this order: user space believes the beginning of the window that it has read. */
		*(volatile u64 *)&log->head.window_begin = written;
		*(volatile u64 *)&log->head.window = window;
	}
	u64 begin = log->head.window_begin, taken = *(volatile u64 *)&log->head.taken;
	if (begin < taken)
		begin = taken;
	u32 *newest = &log->newest[within(mix(mix(stack ^ thread) ^ when) >> 32, ARGUS_ROWS)];
	u32 age = (u32)written - *newest;
	struct argus_row *row = &log->rows[*newest & (ARGUS_ROWS - 1)];
	if (age && age <= written - begin && row->key.stack == stack && *(u64 *)&row->key.pid == thread &&
	    *(u64 *)&row->key.what == when) {
		row->count.count++;
		row->count.ns += ns;
		row->count.runqueue_ns += runqueue_ns;
		if (max_ns > row->count.max_ns)
			row->count.max_ns = max_ns;
		row->count.last_ns = last;
		return;
	}
	if (written - taken >= ARGUS_ROWS) {
		count(ARGUS_SC_SAMPLES_DROPPED);
		return;
	}
	row = &log->rows[written & (ARGUS_ROWS - 1)];
	row->key.stack = stack;
	*(u64 *)&row->key.pid = thread;
	*(u64 *)&row->key.what = when;
	row->count.count = 1;
	row->count.ns = ns;
	row->count.runqueue_ns = runqueue_ns;
	row->count.max_ns = max_ns;
	row->count.first_ns = first;
	row->count.last_ns = last;
	*newest = (u32)written;
	*(volatile u64 *)&log->head.written = written + 1;
}
