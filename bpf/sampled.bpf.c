/* Programs that run at each sample of a CPU: take the stack of the thread that runs there. */

int on_sample(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32, tid = (u32)id;
	if (!tid || !may_be_target(tgid))
		return 0;
	struct target *target = stack_targets.lookup(&tgid);
	if (!target)
		return 0;
	int zero = 0;
	struct argus_board *b = the_board();
	struct scratch *s = scratches.lookup(&zero);
	if (!s || !b || b->ended)
		return 0;
	count(ARGUS_SC_SAMPLES);
	u64 now = bpf_ktime_get_ns();
	struct thread *thread = thread_of(target, tgid, tid);
	if (thread && thread->off_ns)
		thread->on_ns = now;
	s->what = ARGUS_NO_SYSCALL;
	s->flags = 0;
	if (IN_KERNEL(ctx)) {
		struct entry entry = {};
		read_entry(&entry);
		s->flags = ARGUS_STACK_KERNEL;
		s->what = ARGUS_WHAT_KERNEL | entry.call;
	}
	begin_stack(s, target, thread, id, now);
	if (s->walking)
		sample_programs.call(ctx, WALK);
	sample_programs.call(ctx, FINISH);
	count(ARGUS_SC_SAMPLES_DROPPED); /* one comes back only if it failed */
	return 0;
}

int walk_sampled(struct pt_regs *ctx)
{
	if (walk_on() == WALK)
		sample_programs.call(ctx, WALK);
	sample_programs.call(ctx, FINISH);
	count(ARGUS_SC_SAMPLES_DROPPED);
	return 0;
}

int finish_sampled(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tid = (u32)id;
	int zero = 0;
	struct scratch *s = scratches.lookup(&zero);
	if (!s)
		return 0;
	struct thread *thread = threads.lookup(&tid);
	u64 stack = finish_stack(ctx, s, thread, id);
	if (thread)
		follow_pause(thread, tid, s->what, stack, s->now);
	tally(s->now, s->owner, stack, id, s->what, s->now, s->now, period_ns(), 0, 0);
	if (s->fresh) {
		sample_programs.call(ctx, SEND);
		count(ARGUS_SC_STACKS_DROPPED);
	}
	spent_at_sample(s->owner, s->now);
	return 0;
}

int send_sampled(struct pt_regs *ctx)
{
	if (send_stack()) {
		sample_programs.call(ctx, SEND);
		count(ARGUS_SC_STACKS_DROPPED);
	}
	int zero = 0;
	struct scratch *s = scratches.lookup(&zero);
	if (s)
		spent_at_sample(s->owner, s->now);
	return 0;
}
