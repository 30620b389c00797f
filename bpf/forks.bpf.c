/* Children of traced processes: traced from their first call on, before user space has noticed the fork. */

/* Where struct task_struct has pid and tgid, bytes: user space knows by the kernel's types. 0: nowhere. */
BPF_ARRAY(task_fields, u32, 2);

INLINE u32 read_task(u64 task, int field)
{
	u32 value = 0, *at = task_fields.lookup(&field);
	if (at && *at)
		bpf_probe_read_kernel(&value, sizeof(value), (void *)(task + *at));
	return value;
}

/* The parent is the current process. The child has not run yet. */
int follow_fork(struct bpf_raw_tracepoint_args *ctx)
{
	u32 parent = bpf_get_current_pid_tgid() >> 32;
	u32 child = read_task(ctx->args[1], 1);
	if (!child || read_task(ctx->args[1], 0) != child)
		return 0; /* a thread */
	/* The number of a process is given again only when that has ended: the new one is none that is traced. */
	if (targets.lookup(&child))
		targets.delete(&child);
	if (torch_layouts.lookup(&child))
		torch_layouts.delete(&child);
	struct argus_target *whose = targets.lookup(&parent), fresh = {};
	if (!whose)
		return 0;
	fresh.owner = whose->owner;
	fresh.user = whose->user;
	if (targets.update(&child, &fresh) != 0)
		return 0;
	struct argus_torches *torches = torch_layouts.lookup(&parent);
	if (torches) { /* it maps the same files; if it executes another program, which has other files, those are not among these */
		struct argus_torches same = *torches;
		torch_layouts.update(&child, &same);
	}
	return 0;
}
