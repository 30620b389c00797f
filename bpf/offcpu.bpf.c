/* Programs that run when a thread leaves a CPU or is woken: times off the CPU, each with the stack and the system call. */

#ifdef ARGUS_TASK_PID

/* Which of the thread's long_sites this is, as one in its four bits of trust; 0: none. */
INLINE u32 long_site(struct thread *thread, u64 site)
{
	u32 found = 0;
	for (int i = 0; i < LONG_SITES; i++)
		found |= (u32)is_zero(thread->long_sites[i].site ^ site) << 4 * i;
	return found;
}

/* Remembers the places where a thread was off for the most time: whatever has an eighth of it is among them (Metwally,
 * Agrawal, El Abbadi 2005, "Space-Saving"). A new one takes the place, and the time, of the least. */
INLINE void was_long(struct thread *thread, u64 site, u64 ns)
{
	u64 place = 0, least = ~0ull >> 1, found = 0;
	for (u64 i = 0; i < LONG_SITES; i++) {
		u64 same = is_zero(thread->long_sites[i].site ^ site);
		u64 value = thread->long_sites[i].ns & (same - 1); /* the same site is less than all others */
		u64 better = (value - least) >> 63 | same;
		better &= ~found & 1;
		place ^= (place ^ i) & -better;
		least ^= (least ^ value) & -better;
		found |= same;
	}
	place = within(place, LONG_SITES);
	struct site *one = &thread->long_sites[place];
	one->site = site;
	one->ns += ns < FORGET_NS ? ns : FORGET_NS;
	u32 at = 4 * place;
	u64 trust = (thread->trust >> at & 15) + 1 + (ns >> TRUST_SHIFT);
	thread->trust = (thread->trust & ~(15u << at)) | (u32)(trust < 15 ? trust : 15) << at;
	if (one->ns < FORGET_NS)
		return;
	for (int i = 0; i < LONG_SITES; i++)
		thread->long_sites[i].ns >>= 1;
}

/* when: it came back; now: it is reported. */
INLINE void come_back(struct thread *thread, u32 tid, u64 when, u64 now)
{
	u64 since = thread->off_ns;
	u64 ns = when - since;
	thread->off_ns = 0;
	/* It cannot have begun another one; without the GIL another thread can. */
	if (thread->gc_begin_ns && (thread->off_what & ARGUS_WHAT_GC) && (thread->off_what & ARGUS_WHAT_GIL))
		thread->gc_end_ns = when;
	if (thread->sample_ns == since)
		thread->sample_ns = when; /* what was seen when it went is as it was */
	if (ns < ARGUS_OFF_CPU_NS) {
		if (thread->off_stack) {
			thread->short_site = thread->off_site;
			thread->short_ns = when;
		}
		u32 wasted = thread->off_stack ? long_site(thread, thread->off_site) : 0;
		if (thread->trust & wasted * 15)
			thread->trust -= wasted;
		return;
	}
	u64 runqueue_ns = 0;
	if (thread->off_what & ARGUS_WHAT_PREEMPTED)
		runqueue_ns = ns;
	else if (thread->wake_ns > since && thread->wake_ns < when)
		runqueue_ns = when - thread->wake_ns;
	count(ARGUS_SC_OFF_CPU);
	if (thread->off_stack)
		thread->walk_ns -= ARGUS_WALK_NS / 2; /* not wasted */
	else
		count(ARGUS_SC_OFF_CPU_NO_STACK);
	was_long(thread, thread->off_site, ns);
	tally(now, thread->owner, thread->off_stack, (u64)thread->pid << 32 | tid, thread->off_what, since, when, ns, ns,
	      runqueue_ns);
}

/* Returns whether a stack is to be taken: the first program that does has been run. */
INLINE u32 go_off(struct bpf_raw_tracepoint_args *ctx, struct target *target, u64 id, u64 now)
{
	u32 tgid = id >> 32, tid = (u32)id;
	u32 state = 0;
#if ARGUS_PREV_STATE
	state = (u32)ctx->args[3];
#else
	bpf_probe_read_kernel(&state, sizeof(state), (void *)(ctx->args[1] + ARGUS_TASK_STATE));
#endif
	u32 preempted = (ctx->args[0] & 1) || !state;
	if (!preempted && (state & TASK_DEAD)) {
		u8 *known = known_thread(tid);
		if (known)
			*known = 0;
		forget_thread(tgid, tid);
		return 0;
	}
	struct thread *thread = thread_of(target, tgid, tid);
	if (!thread)
		return 0;
	int zero = 0;
	struct scratch *s = scratches.lookup(&zero);
	if (!s)
		return 0;
	u64 ran_ns = 0;
	bpf_probe_read_kernel(&ran_ns, sizeof(ran_ns), (void *)(ctx->args[1] + ARGUS_TASK_RAN));
	if (thread->off_ns) {
		/* No event showed that it was switched in. Linux 6.18 was seen to leave out some events in 1,000 of a busy machine;
		 * its own trace lacks them, too. Since it went off it has run for the difference. */
		u64 ran = ran_ns - thread->ran_ns, longest = now - thread->off_ns;
		if (longest >= ARGUS_OFF_CPU_NS + ran)
			count(ARGUS_SC_OFF_CPU_GUESSED);
		come_back(thread, tid, now - (ran < longest ? ran : longest), now);
	}
	if (is_resting(target->owner))
		return 0;
	thread->ran_ns = ran_ns;
	struct entry entry = {};
	read_entry(&entry);
	u64 site = preempted ? 1 : mix(entry.ip ^ mix(entry.sp ^ entry.call));
	s->what = ARGUS_WHAT_OFF | entry.call;
	s->flags = entry.call != ARGUS_NO_SYSCALL || !preempted ? ARGUS_STACK_KERNEL : 0;
	if (preempted) {
		s->what |= ARGUS_WHAT_PREEMPTED;
	} else {
		if (state & TASK_UNINTERRUPTIBLE)
			s->what |= ARGUS_WHAT_UNINTERRUPTIBLE;
		if (entry.call == SYS_FUTEX || entry.call == SYS_FUTEX_WAIT) {
			struct argus_python *py = pythons.lookup(&tgid);
			if (py && entry.argument >= py->runtime && entry.argument < py->runtime_end)
				s->what |= ARGUS_WHAT_GIL_WAIT;
		}
	}
	thread->off_stack = 0;
	/* Whether it will be off for long is not known yet, and a thread may go off 20,000 times a second. A place where it
	 * was short is passed over for a while; and all wasted stacks together are limited (GCRA, a burst of four). Places
	 * where it has been off for long before are not passed over, and may waste one more in a row. Each time that it was
	 * off for long buys the place a stack or more that are always taken: one, and one for each 8 ms that it took. */
	u64 due = thread->walk_ns, long_before = long_site(thread, site);
	u64 passed_over = site == thread->short_site && now < thread->short_ns + ARGUS_WALK_NS && !long_before;
	/* Collecting garbage may begin and end between two samples, with others on the CPU meanwhile. */
	u32 flags = 0;
	if (preempted && thread->state) {
		struct argus_python *py = pythons.lookup(&tgid);
		if (py)
			flags = interpreter_flags(py, thread, thread->state, now);
	}
	u64 begins = (flags & ARGUS_WHAT_GC) && !thread->gc_begin_ns;
	u64 taken = begins || (long_before * 15 & thread->trust) ||
		    (!passed_over && due < now + (long_before ? 4 : 3) * (ARGUS_WALK_NS / 2));
	thread->off_site = site;
	thread->off_ns = now;
	if (taken) {
		thread->off_what = s->what;
		thread->walk_ns = (due > now ? due : now) + ARGUS_WALK_NS / 2;
		count(ARGUS_SC_OFF_STACKS);
		begin_stack(s, target, thread, id, now);
		return 1;
	}
	s->what |= flags;
	if (preempted)
		follow_pause(thread, tid, s->what, 0, now);
	thread->off_what = s->what;
	return 0;
}

int on_switch(struct bpf_raw_tracepoint_args *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32, tid = 0;
	bpf_probe_read_kernel(&tid, sizeof(tid), (void *)(ctx->args[2] + ARGUS_TASK_PID));
	struct thread *thread = find_thread(tid); /* the idle one, 0, is never known */
	struct target *target = (u32)id && may_be_target(tgid) ? stack_targets.lookup(&tgid) : 0;
	if (!thread) {
		APART();
		if (!target)
			return 0;
	}
	struct argus_board *b = the_board();
	if (!b || b->ended)
		return 0;
	u64 now = bpf_ktime_get_ns();
	u32 owner = target ? target->owner : thread ? thread->owner : 0;
	if (thread && thread->off_ns)
		come_back(thread, tid, now, now);
	if (target && go_off(ctx, target, id, now)) {
		int zero = 0;
		struct scratch *s = scratches.lookup(&zero);
		if (s && s->walking)
			switch_programs.call(ctx, WALK);
		switch_programs.call(ctx, FINISH);
	}
	spent_at_switch(owner, now);
	return 0;
}

int walk_switched(struct bpf_raw_tracepoint_args *ctx)
{
	if (walk_on() == WALK)
		switch_programs.call(ctx, WALK);
	switch_programs.call(ctx, FINISH);
	return 0;
}

int finish_switched(struct bpf_raw_tracepoint_args *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tid = (u32)id;
	int zero = 0;
	struct scratch *s = scratches.lookup(&zero);
	struct thread *thread = threads.lookup(&tid);
	if (!s || !thread)
		return 0;
	thread->off_stack = finish_stack(ctx, s, thread, id);
	thread->off_what = s->what;
	follow_pause(thread, tid, s->what, thread->off_stack, s->now);
	if (s->fresh) {
		switch_programs.call(ctx, SEND);
		count(ARGUS_SC_STACKS_DROPPED); /* one comes back only if it failed */
	}
	spent_at_switch(s->owner, s->now);
	return 0;
}

int send_switched(struct bpf_raw_tracepoint_args *ctx)
{
	if (send_stack()) {
		switch_programs.call(ctx, SEND);
		count(ARGUS_SC_STACKS_DROPPED);
	}
	int zero = 0;
	struct scratch *s = scratches.lookup(&zero);
	if (s)
		spent_at_switch(s->owner, s->now);
	return 0;
}

int on_wakeup(struct bpf_raw_tracepoint_args *ctx)
{
	u32 tid = 0;
	bpf_probe_read_kernel(&tid, sizeof(tid), (void *)(ctx->args[0] + ARGUS_TASK_PID));
	struct thread *thread = find_thread(tid);
	if (thread)
		thread->wake_ns = bpf_ktime_get_ns();
	return 0;
}

#endif
