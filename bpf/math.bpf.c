/* cuBLAS: what is multiplied, and when the call begins and ends. Its kernels are those that the thread launches meanwhile.
 *
 * C functions, from which no exception comes: their exits may be probed.
 */

struct math_pending {
	u64 sp;
	struct argus_math record;
};
/* Thread -> the outermost call it is in. */
BPF_HASH(math_inflight, u32, struct math_pending, 8192);

INLINE void send_math(struct argus_math *record)
{
	if (record->flags & ARGUS_F_READ_FAULT)
		count(ARGUS_C_READ_FAULT);
	if (math.ringbuf_output(record, sizeof(*record), NO_WAKEUP) == 0)
		count(ARGUS_C_MATH);
	else
		count(ARGUS_C_MATH_DROPPED);
}

INLINE void read_descriptor(u64 *words, u64 descriptor, u8 *flags)
{
	if (bpf_probe_read_user(words, 8 * ARGUS_DESCRIPTOR_WORDS, (void *)descriptor) != 0)
		*flags |= ARGUS_F_READ_FAULT;
}

int math_enter(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32, tid = (u32)id;
	if (!targets.lookup(&tgid)) /* not among the strangers: these calls make no rank */
		return 0;
	count(ARGUS_C_HITS);
	u64 sp = SP(ctx);
	struct math_pending *outer = math_inflight.lookup(&tid);
	if (outer) {
		if (sp < outer->sp) { /* cublasGemmEx may end in cublasLtMatmul */
			count(ARGUS_C_NESTED);
			return 0;
		}
		count(ARGUS_C_EXIT_MISSED);
		send_math(&outer->record);
	}
	u64 cookie = argus_cookie(ctx);
	struct math_pending p = {};
	struct argus_math *r = &p.record;
	p.sp = sp;
	r->pid = tgid;
	r->tid = tid;
	r->call = ARGUS_CALL(cookie);
	r->duration_ns = -1;
	if (ARGUS_SHAPE(cookie) == ARGUS_S_MATMUL) {
		read_descriptor(r->words, arg(ctx, ARGUS_ARG(cookie, 0), &r->flags), &r->flags);
		read_descriptor(r->words + ARGUS_DESCRIPTOR_WORDS, arg(ctx, ARGUS_ARG(cookie, 1), &r->flags), &r->flags);
		read_descriptor(r->words + 2 * ARGUS_DESCRIPTOR_WORDS, arg(ctx, ARGUS_ARG(cookie, 2), &r->flags), &r->flags);
	} else {
		r->words[0] = arg(ctx, ARGUS_ARG(cookie, 0), &r->flags);
		r->words[1] = arg(ctx, ARGUS_ARG(cookie, 1), &r->flags);
		r->words[2] = arg(ctx, ARGUS_ARG(cookie, 2), &r->flags);
		r->words[3] = arg(ctx, ARGUS_ARG(cookie, 3), &r->flags);
		r->words[4] = ARGUS_OFFSET(cookie) ? arg(ctx, ARGUS_OFFSET(cookie), &r->flags) : 1;
	}
	r->ts_ns = bpf_ktime_get_ns();
	if (math_inflight.update(&tid, &p) != 0) {
		count(ARGUS_C_PENDING_FULL);
		send_math(r);
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
	send_math(&p->record);
	math_inflight.delete(&tid);
	return 0;
}
