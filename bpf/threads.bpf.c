/* Programs that run when threads and processes begin, end, or become another program. */

int on_exit(void *ctx)
{
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u8 *known = known_thread(tid);
	if (!known || !*known)
		return 0;
	*known = 0;
	struct thread *thread = threads.lookup(&tid);
	if (!thread)
		return 0;
	if (thread->gc_begin_ns)
		end_pause(thread, tid, bpf_ktime_get_ns());
	forget_thread(thread->pid, tid);
	thread_states.delete(&tid);
	return 0;
}

/* The parent is the current one. */
int on_fork(struct bpf_raw_tracepoint_args *ctx)
{
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
#ifdef ARGUS_TASK_PID
	/* The number of a traced process is given again only when that has ended: the new one is none. */
	u32 child = 0;
	bpf_probe_read_kernel(&child, sizeof(child), (void *)(ctx->args[1] + ARGUS_TASK_PID));
	if (child && may_be_target(child)) {
		stack_targets.delete(&child);
		pythons.delete(&child);
	}
#endif
	if (!may_be_target(tgid) || !stack_targets.lookup(&tgid))
		return 0;
	struct argus_board *b = the_board();
	if (b)
		__sync_fetch_and_add(&b->clones, 1);
	return 0;
}

int on_exec(void *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32, tid = (u32)id;
	struct target *target = may_be_target(tgid) ? stack_targets.lookup(&tgid) : 0;
	if (!target)
		return 0;
	count(ARGUS_SC_EXECS);
	struct argus_board *b = the_board();
	if (b)
		__sync_fetch_and_add(&b->execs, 1);
	u64 now = bpf_ktime_get_ns();
	target->space = mix(target->space ^ now);
	pythons.delete(&tgid);
	thread_states.delete(&tid);
	struct thread *thread = threads.lookup(&tid);
	if (thread) {
		if (thread->gc_begin_ns)
			end_pause(thread, tid, now);
		forget_thread(tgid, tid);
	}
	return 0;
}
