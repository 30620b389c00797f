/* Counts stacks in the log of this CPU. */

/* One more row of a log may be begun for an owner. While several are followed, each has as many as stay free at most: one
 * fills half of a log, of k each one in k + 1 parts, and one remains free (as in rings: within_share). Only what finds a log
 * full in which it has nothing concerns everybody. */
INLINE int has_row(u32 cpu, u32 owner, u64 taken, u64 written)
{
	u32 place = cpu * ARGUS_THREAD_OWNERS + owner, zero = 0;
	struct log_share *share = log_shares.lookup(&place);
	if (!share)
		return 0;
	if (taken >= share->began) {
		share->began = written;
		share->rows = 0;
	}
	u64 used = written - taken, rows = share->rows;
	if (rows && rows + used >= ARGUS_ROWS) {
		u32 *owners = thread_owners.lookup(&zero);
		struct owner_use *use = owner_uses.lookup(&owner);
		if (owners && *owners > 1 && use) {
			__sync_fetch_and_add(&use->rows_refused, 1);
			return 0;
		}
	}
	if (used >= ARGUS_ROWS) {
		count(ARGUS_SC_SAMPLES_DROPPED);
		return 0;
	}
	share->rows = rows + 1;
	return 1;
}

/* Counts in this CPU's log. Programs that count do not interrupt each other there: the timer and sched_switch have
 * interrupts off. now: of the program; first, last: of what is counted. */
INLINE void tally(u64 now, u32 owner, u64 stack, u64 id, u32 what, u64 first, u64 last, u64 ns, u64 max_ns, u64 runqueue_ns)
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
	if (!has_row(cpu, owner, taken, written))
		return;
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
