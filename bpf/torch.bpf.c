/* PyTorch: collectives of its gloo process groups, and marks of what a step does, NVTX's ranges among them.
 *
 * Those of PyTorch are C++ functions, which exceptions may leave: only their entries are probed. A return probe takes the place of the
 * return address, no unwinder finds its way past that, and the program would be terminated.
 */

#define MAX_TENSORS 16

/* Elements and type of the tensors that a method of a process group is called with. at::Tensor is a pointer to a
 * c10::TensorImpl; std::vector begins with pointers to its first element and behind its last. */
INLINE void read_tensors(struct argus_collective *r, u64 tensors, u32 in_vector, u32 numel_at)
{
	u64 range[2] = {tensors, tensors + 8};
	if (!numel_at)
		return;
	if (in_vector && bpf_probe_read_user(range, sizeof(range), (void *)tensors) != 0) {
		r->flags |= ARGUS_F_READ_FAULT;
		return;
	}
	for (int i = 0; i < MAX_TENSORS; i++) {
		u64 at = range[0] + 8 * i;
		if (at >= range[1])
			return;
		u64 impl = read_u64(at, &r->flags);
		u64 words[2] = {};
		if (bpf_probe_read_user(words, sizeof(words), (void *)(impl + numel_at)) != 0) {
			r->flags |= ARGUS_F_READ_FAULT;
			return;
		}
		r->count += words[0];
		r->dtype = ARGUS_TORCH_DTYPE + (words[1] & 0x7f);
	}
	if (range[0] + 8 * MAX_TENSORS < range[1]) { /* more than are added up here */
		r->count = 0;
		r->dtype = 255;
	}
}

/* Whether another method of the same class calls this one: the outer call has been recorded. */
INLINE int called_from_family(struct pt_regs *ctx, u64 sp, u64 cookie, u8 *flags)
{
	int at = ARGUS_FILE(cookie) << 8 | ARGUS_CALL(cookie);
	u64 *reach = family_reach.lookup(&at);
	s64 distance = CALLER(ctx, sp, flags) - IP(ctx);
	return reach && distance >= -(s64)(u32)*reach && distance < (s64)(*reach >> 32);
}

int torch_enter(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32;
	struct argus_target *target = traced(id, 1);
	if (!target)
		return 0;
	u64 cookie = argus_cookie(ctx);
	count_own_hit(target, cookie, 0);
	u64 sp = entry_sp(ctx, cookie);
	struct argus_collective r = {};
	if (called_from_family(ctx, sp, cookie, &r.flags)) {
		count(ARGUS_C_NESTED);
		return 0;
	}
	u32 shape = ARGUS_SHAPE(cookie);
	struct argus_torch *layout = torch_layout(target, tgid, cookie);
	r.pid = tgid;
	r.tid = (u32)id;
	r.call = ARGUS_CALL(cookie);
	r.duration_ns = -1;
	r.peer = -1;
	r.redop = 255;
	r.dtype = 255;
	r.comm = arg(ctx, sp, ARGUS_ARG(cookie, 4), &r.flags);
	if (ARGUS_ARG(cookie, 3) != 15)
		r.peer = (s32)arg(ctx, sp, ARGUS_ARG(cookie, 3), &r.flags);
	if (layout && ARGUS_ARG(cookie, 0) != 15)
		read_tensors(&r, arg(ctx, sp, ARGUS_ARG(cookie, 0), &r.flags), ARGUS_ARG(cookie, 1), layout->numel);
	if (layout && layout->counter && shape == ARGUS_S_C10D)
		r.stream = 1 + (u64)read_u32(r.comm + layout->counter, &r.flags);
	r.seq = next_sequence(target, tgid, r.comm, shape == ARGUS_S_C10D_P2P);
	r.ts_ns = bpf_ktime_get_ns();
	send_collective(target, &r, r.ts_ns);
	return 0;
}

/* Where nvtxEventAttributes_t has its message and what that is (nvtx3/nvToolsExt.h, the same since NVTX 1). */
#define NVTX_MESSAGE_TYPE_AT 32
#define NVTX_MESSAGE_AT 40
#define NVTX_ASCII 1
#define NVTX_UNICODE 2

/* Characters of a wide string that are kept. */
#define WIDE_CHARS 32

INLINE void read_mark_name(struct argus_mark *r, u64 at, u32 form)
{
	if (form == ARGUS_N_STRING) {
		u64 text[2] = {};
		if (bpf_probe_read_user(text, sizeof(text), (void *)at) != 0)
			r->flags |= ARGUS_F_READ_FAULT;
		u32 length = text[1] < ARGUS_MARK_NAME_LEN ? text[1] : ARGUS_MARK_NAME_LEN;
		if (length && length <= ARGUS_MARK_NAME_LEN) {
			if (bpf_probe_read_user(r->name, length, (void *)text[0]) != 0)
				r->flags |= ARGUS_F_READ_FAULT;
			else
				r->name_len = length;
		}
		return;
	}
	if (form == ARGUS_N_ATTRIBUTES) {
		if (!at)
			return;
		u32 type = read_u32(at + NVTX_MESSAGE_TYPE_AT, &r->flags);
		if (type != NVTX_ASCII && type != NVTX_UNICODE)
			return;
		form = type == NVTX_ASCII ? ARGUS_N_CHARS : ARGUS_N_WIDE;
		at = read_u64(at + NVTX_MESSAGE_AT, &r->flags);
	}
	if (form == ARGUS_N_OLD_STRING) {
		at = read_u64(at, &r->flags);
		form = ARGUS_N_CHARS;
	}
	if (!at)
		return;
	if (form == ARGUS_N_CHARS) {
		long n = bpf_probe_read_user_str(r->name, ARGUS_MARK_NAME_LEN, (void *)at);
		if (n < 0) { /* a constant that nobody has read yet, as with no tool nobody does: user space can wait for it */
			r->flags |= ARGUS_F_NAME_ADDRESS;
			__builtin_memcpy(r->name, &at, sizeof(at));
			r->name_len = sizeof(at);
		} else if (n > 0) {
			r->name_len = n - 1;
		}
		return;
	}
	for (u32 i = 0; i < WIDE_CHARS; i++) {
		u32 letter = read_u32(at + 4 * i, &r->flags);
		if (!letter)
			break;
		r->name[i] = letter < 128 ? letter : '?';
		r->name_len = i + 1;
	}
}

INLINE int mark(struct pt_regs *ctx, u32 at_exit)
{
	u64 id = bpf_get_current_pid_tgid();
	struct argus_target *target = find_target(id);
	if (!is_recorded(target, 1)) /* not among the strangers: marks make no rank, and a data-loader worker's are no loss */
		return 0;
	if (!target) /* for the verifier */
		return 0;
	u64 cookie = argus_cookie(ctx);
	count_own_hit(target, cookie, at_exit);
	struct argus_mark record = {};
	struct argus_mark *r = &record;
	r->ts_ns = bpf_ktime_get_ns();
	r->pid = id >> 32;
	r->tid = (u32)id;
	r->call = ARGUS_CALL(cookie);
	r->at_exit = at_exit;
	u64 sp = at_exit ? SP(ctx) : entry_sp(ctx, cookie);
	if (ARGUS_ARG(cookie, 0) != 15)
		r->handle = arg(ctx, sp, ARGUS_ARG(cookie, 0), &r->flags);
	if (ARGUS_ARG(cookie, 2))
		r->handle = read_u64(r->handle, &r->flags);
	if (ARGUS_ARG(cookie, 1) != 15)
		read_mark_name(r, arg(ctx, sp, ARGUS_ARG(cookie, 1), &r->flags), ARGUS_ARG(cookie, 3));
	if (r->flags & ARGUS_F_READ_FAULT)
		lose(target, ARGUS_C_READ_FAULT);
	int within = WITHIN_BUDGET(target, MARKS, r->ts_ns);
	int may = within && (traced_owners() < 2 || within_share(target, ARGUS_R_MARKS, marks.ringbuf_output(r, 0, READ),
		marks.ringbuf_output(r, 0, WRITTEN), sizeof(*r), ARGUS_MARKS_BYTES));
	if (!may && marks.ringbuf_output(r, 0, HOW_FULL) >= ARGUS_MARKS_SHARED_BYTES) {
		refuse(target, within);
		return 0;
	}
	if (marks.ringbuf_output(r, sizeof(*r), NO_WAKEUP) == 0)
		count(ARGUS_C_MARKS);
	else
		lose(target, ARGUS_C_MARKS_DROPPED);
	return 0;
}

int mark_enter(struct pt_regs *ctx)
{
	return mark(ctx, 0);
}

int mark_exit(struct pt_regs *ctx)
{
	return mark(ctx, 1);
}
