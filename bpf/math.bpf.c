/* cuBLAS and PyTorch's attention: what is multiplied, and when the call begins and ends. Its kernels are those that the
 * thread launches meanwhile.
 *
 * cuBLAS has C functions, from which no exception comes: their exits may be probed. Those of attention are C++, so only
 * their entries are (torch.bpf.c); whether one is over is seen at the thread's next launch, by its return address.
 */

struct math_pending {
	u64 sp;
	u64 ret; /* return address at entry, of a call whose exit is not probed; 0: it is */
	struct argus_math record;
};
/* Thread -> the outermost call it is in. */
BPF_HASH(math_inflight, u32, struct math_pending, MATH_ENTRIES);

INLINE void send_math(struct argus_target *target, struct argus_math *record, u64 now)
{
	int within = WITHIN_BUDGET(target, MATH, now);
	int may = within && (traced_owners() < 2 || within_share(target, ARGUS_R_MATH, math.ringbuf_output(record, 0, READ),
		math.ringbuf_output(record, 0, WRITTEN), sizeof(*record), ARGUS_MATH_BYTES));
	if (!may && math.ringbuf_output(record, 0, HOW_FULL) >= ARGUS_MATH_SHARED_BYTES) {
		refuse(target, within);
		return;
	}
	if (record->flags & ARGUS_F_READ_FAULT)
		lose(target, ARGUS_C_READ_FAULT);
	if (math.ringbuf_output(record, sizeof(*record), NO_WAKEUP) == 0)
		count(ARGUS_C_MATH);
	else
		lose(target, ARGUS_C_MATH_DROPPED);
}

INLINE void read_descriptor(u64 *words, u64 descriptor, u8 *flags)
{
	if (bpf_probe_read_user(words, 8 * ARGUS_DESCRIPTOR_WORDS, (void *)descriptor) != 0)
		*flags |= ARGUS_F_READ_FAULT;
}

/* Sizes of a tensor with four dimensions, and its type. They are believed if their product is the number of elements. */
INLINE u16 read_sizes(u64 *sizes, u64 tensor, struct argus_torch *layout, u8 *flags)
{
	u64 found[5] = {}, elements[2] = {};
	u64 impl = read_u64(tensor, flags);
	if (bpf_probe_read_user(found, sizeof(found), (void *)(impl + layout->sizes)) != 0 ||
	    bpf_probe_read_user(elements, sizeof(elements), (void *)(impl + layout->numel)) != 0) {
		*flags |= ARGUS_F_READ_FAULT;
		return 0;
	}
	if (found[0] == 4 && found[1] * found[2] * found[3] * found[4] == elements[0])
		for (int i = 0; i < 4; i++)
			sizes[i] = found[1 + i];
	return (u16)elements[1];
}

/* Whether a std::optional of eight bytes has a value: its flag follows it. */
INLINE int has_value(u64 optional, u8 *flags)
{
	return (u8)read_u64(optional + 8, flags) != 0;
}

INLINE void fill_attention(struct pt_regs *ctx, u64 sp, u64 cookie, struct argus_torch *layout, struct argus_math *r)
{
	u32 query = ARGUS_ARG(cookie, 0);
	r->words[12] = read_sizes(r->words, arg(ctx, sp, query, &r->flags), layout, &r->flags);
	read_sizes(r->words + 4, arg(ctx, sp, query + 1, &r->flags), layout, &r->flags);
	read_sizes(r->words + 8, arg(ctx, sp, query + 2, &r->flags), layout, &r->flags);
	r->words[13] = (u8)arg(ctx, sp, ARGUS_ARG(cookie, 1), &r->flags); /* a bool's register has more than the bool */
	if (ARGUS_ARG(cookie, 2) != 15)
		r->words[14] |= has_value(arg(ctx, sp, ARGUS_ARG(cookie, 2), &r->flags), &r->flags);
	if (ARGUS_OFFSET(cookie))
		r->words[14] |= has_value(arg(ctx, sp, ARGUS_OFFSET(cookie), &r->flags), &r->flags);
}

/* Whether the call remembered is still on the thread's stack, below the call that is entered now. */
INLINE int inside_math(u64 sp, struct math_pending *p)
{
	u8 flags = 0;
	if (sp >= p->sp)
		return 0;
	return !p->ret || (read_u64(p->sp, &flags) == p->ret && !flags);
}

/* Records a call that is over, or whose exit will not be seen. */
INLINE void end_math(struct argus_target *target, struct math_pending *p, u64 until)
{
	if (!p->ret)
		lose(target, ARGUS_C_EXIT_MISSED);
	else if (p->record.duration_ns == 0) /* it has launched something */
		p->record.duration_ns = until - p->record.ts_ns;
	send_math(target, &p->record, until);
}

INLINE void forget_math(struct argus_target *target, u64 id, u32 pid)
{
	u32 tid = (u32)id;
	if (math_inflight.delete(&tid) == 0)
		release(target, id, pid, ARGUS_H_MATH);
}

/* A thread launches a kernel: part of the attention it is in, or that is over. */
INLINE void launch_in_math(struct argus_target *target, u64 sp, u64 id, u64 ts)
{
	u32 tid = (u32)id;
	struct math_pending *p = math_inflight.lookup(&tid);
	if (!p || !p->ret || p->record.pid != (u32)(id >> 32))
		return;
	if (inside_math(sp, p)) {
		p->record.duration_ns = 0;
		return;
	}
	end_math(target, p, ts - 1);
	forget_math(target, id, p->record.pid);
}

int math_enter(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32, tid = (u32)id;
	struct argus_target *target = find_target(id);
	if (!is_recorded(target, 1)) /* not among the strangers: these calls make no rank */
		return 0;
	if (!target) /* for the verifier */
		return 0;
	u64 cookie = argus_cookie(ctx);
	count_own_hit(target, cookie, 0);
	u64 sp = entry_sp(ctx, cookie);
	struct argus_torch *layout = 0;
	if (ARGUS_SHAPE(cookie) == ARGUS_S_ATTENTION) {
		layout = torch_layout(target, tgid, cookie);
		if (!layout || !layout->sizes) /* the file has probes for others, who have another version beside it */
			return 0;
	}
	struct math_pending *outer = math_inflight.lookup(&tid);
	u64 now = bpf_ktime_get_ns();
	if (outer && outer->record.pid != tgid) {
		forget_math(target, id, outer->record.pid);
	} else if (outer) {
		if (inside_math(sp, outer)) { /* cublasGemmEx may end in cublasLtMatmul, one attention in another */
			count(ARGUS_C_NESTED);
			return 0;
		}
		end_math(target, outer, now - 1);
		forget_math(target, id, tgid);
	}
	struct math_pending p = {};
	struct argus_math *r = &p.record;
	p.sp = sp;
	r->pid = tgid;
	r->tid = tid;
	r->call = ARGUS_CALL(cookie);
	r->duration_ns = -1;
	if (ARGUS_SHAPE(cookie) == ARGUS_S_MATMUL) {
		read_descriptor(r->words, arg(ctx, sp, ARGUS_ARG(cookie, 0), &r->flags), &r->flags);
		read_descriptor(r->words + ARGUS_DESCRIPTOR_WORDS, arg(ctx, sp, ARGUS_ARG(cookie, 1), &r->flags), &r->flags);
		read_descriptor(r->words + 2 * ARGUS_DESCRIPTOR_WORDS, arg(ctx, sp, ARGUS_ARG(cookie, 2), &r->flags), &r->flags);
	} else if (layout) {
		u8 flags = 0;
		fill_attention(ctx, sp, cookie, layout, r);
		p.ret = read_u64(sp, &flags);
	} else {
		r->words[0] = arg(ctx, sp, ARGUS_ARG(cookie, 0), &r->flags);
		r->words[1] = arg(ctx, sp, ARGUS_ARG(cookie, 1), &r->flags);
		r->words[2] = arg(ctx, sp, ARGUS_ARG(cookie, 2), &r->flags);
		r->words[3] = arg(ctx, sp, ARGUS_ARG(cookie, 3), &r->flags);
		r->words[4] = ARGUS_OFFSET(cookie) ? arg(ctx, sp, ARGUS_OFFSET(cookie), &r->flags) : 1;
	}
	r->ts_ns = now;
	if (has_its_share(target, ARGUS_H_MATH)) {
		refuse_pending(target);
		send_math(target, r, now);
	} else if (math_inflight.insert(&tid, &p) != 0) {
		lose(target, ARGUS_C_PENDING_FULL);
		send_math(target, r, now);
	} else {
		hold(target, ARGUS_H_MATH);
	}
	return 0;
}

int math_exit(struct pt_regs *ctx)
{
	u64 now = bpf_ktime_get_ns();
	u64 id = bpf_get_current_pid_tgid();
	u32 tid = (u32)id;
	struct math_pending *p = math_inflight.lookup(&tid);
	if (!p) {
		count_unmatched(id);
		return 0;
	}
	if (!RETURNED_FROM(ctx, p))
		return 0; /* the exit of a nested call */
	p->record.duration_ns = now - p->record.ts_ns;
	p->record.result = (s32)RESULT(ctx);
	struct argus_target *target = find_target(id);
	if (target)
		send_math(target, &p->record, now);
	forget_math(target, id, p->record.pid);
	return 0;
}
