/* NCCL calls: collectives, point to point, groups, and how communicators come and go; and the names of kernels. */

struct sequence_key {
	u64 comm;
	u32 tgid;
	u32 p2p;
};
BPF_HASH(sequences, struct sequence_key, u64, SEQUENCES_ENTRIES);

/* Rare calls: their arguments are needed again at the exit. */
struct control_pending {
	u64 cookie;
	u64 sp;
	u64 out; /* where the call writes the handle it makes */
	struct argus_control record;
};
/* Thread and family (1: kernel names, which NCCL looks up while it makes a communicator) -> the call it is in. */
BPF_HASH(control_inflight, u64, struct control_pending, CONTROL_ENTRIES);

INLINE u64 next_sequence(struct argus_target *target, u32 tgid, u64 comm, u32 p2p)
{
	struct sequence_key key = {};
	key.comm = comm;
	key.tgid = tgid;
	key.p2p = p2p;
	u64 *next = sequences.lookup(&key);
	if (next) {
		/* NCCL allows one caller at a time on a communicator, so this needs no atomic. */
		u64 number = *next;
		*next = number + 1;
		return number;
	}
	u64 one = 1;
	if (has_its_share(target, ARGUS_H_SEQUENCES)) {
		refuse_seq(target);
		return 0;
	}
	if (sequences.insert(&key, &one) == 0)
		hold(target, ARGUS_H_SEQUENCES);
	else if (!sequences.lookup(&key)) /* else another thread was first */
		lose(target, ARGUS_C_SEQ_FULL);
	return 0;
}

/* A communicator ends. The next one at this address is another one: its calls count from 0. */
INLINE void forget_sequences(struct argus_target *target, u32 tgid, u64 comm)
{
	struct sequence_key key = {};
	key.comm = comm;
	key.tgid = tgid;
	if (sequences.delete(&key) == 0)
		drop(target, ARGUS_H_SEQUENCES);
	key.p2p = 1;
	if (sequences.delete(&key) == 0)
		drop(target, ARGUS_H_SEQUENCES);
}

INLINE u32 depth_of_groups(u64 id)
{
	u32 tid = (u32)id;
	u64 *depth = group_depth.lookup(&tid);
	return depth && *depth >> 32 == id >> 32 ? (u32)*depth : 0;
}

INLINE void forget_groups(struct argus_target *target, u64 id)
{
	u32 tid = (u32)id;
	u64 *depth = group_depth.lookup(&tid);
	if (!depth)
		return;
	u32 pid = *depth >> 32;
	if (group_depth.delete(&tid) == 0)
		release(target, id, pid, ARGUS_H_GROUPS);
}

INLINE void begin_group(struct argus_target *target, u64 id)
{
	u32 tid = (u32)id, depth = depth_of_groups(id);
	u64 value = id >> 32 << 32 | (depth + 1);
	if (depth) {
		group_depth.update(&tid, &value);
		return;
	}
	forget_groups(target, id);
	if (has_its_share(target, ARGUS_H_GROUPS))
		refuse_seq(target);
	else if (group_depth.insert(&tid, &value) != 0)
		lose(target, ARGUS_C_SEQ_FULL);
	else
		hold(target, ARGUS_H_GROUPS);
}

INLINE void end_group(struct argus_target *target, u64 id)
{
	u32 tid = (u32)id, depth = depth_of_groups(id);
	u64 value = id >> 32 << 32 | (depth - 1);
	if (depth > 1)
		group_depth.update(&tid, &value);
	else if (depth)
		forget_groups(target, id);
}

int nccl_enter(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32, tid = (u32)id;
	struct argus_target *target = traced(id, 1);
	if (!target)
		return 0;
	u64 cookie = argus_cookie(ctx);
	count_own_hit(target, cookie, 0);
	u64 sp = entry_sp(ctx, cookie);
	u64 key = nccl_key(tid);
	struct pending *outer = inflight.lookup(&key);
	int there = outer && outer->collective.pid == tgid;
	if (outer && !there) {
		forget_call(target, id, &key, outer->collective.pid);
	} else if (outer) {
		if (active(ctx, sp, outer, cookie)) {
			count(ARGUS_C_NESTED);
			return 0;
		}
		if (ARGUS_HAS_EXIT(outer->cookie)) {
			lose(target, ARGUS_C_EXIT_MISSED);
			send_collective(target, &outer->collective, bpf_ktime_get_ns());
		}
	}

	u32 shape = ARGUS_SHAPE(cookie);
	struct pending p = {};
	struct argus_collective *r = &p.collective;
	p.cookie = cookie;
	p.sp = sp;
	p.ip = IP(ctx);
	r->pid = tgid;
	r->tid = tid;
	r->call = ARGUS_CALL(cookie);
	r->duration_ns = -1;
	r->peer = -1;
	r->redop = 255;
	if (shape == ARGUS_S_GROUP_START) {
		begin_group(target, id);
		r->flags |= ARGUS_F_IN_GROUP;
	} else if (shape == ARGUS_S_GROUP_END) {
		end_group(target, id);
		r->flags |= ARGUS_F_IN_GROUP;
	} else {
		r->count = arg(ctx, sp, ARGUS_ARG(cookie, 0), &r->flags);
		r->dtype = (u8)arg(ctx, sp, ARGUS_ARG(cookie, 1), &r->flags);
		if (ARGUS_ARG(cookie, 2) != 15)
			r->redop = (u8)arg(ctx, sp, ARGUS_ARG(cookie, 2), &r->flags);
		if (ARGUS_ARG(cookie, 3) != 15)
			r->peer = (s32)arg(ctx, sp, ARGUS_ARG(cookie, 3), &r->flags);
		r->comm = arg(ctx, sp, ARGUS_ARG(cookie, 4), &r->flags);
		r->stream = arg(ctx, sp, ARGUS_ARG(cookie, 5), &r->flags);
		r->seq = next_sequence(target, tgid, r->comm, shape == ARGUS_S_P2P);
		if (depth_of_groups(id))
			r->flags |= ARGUS_F_IN_GROUP;
	}
	r->ts_ns = bpf_ktime_get_ns();
	if (!ARGUS_HAS_EXIT(cookie)) {
		send_collective(target, r, r->ts_ns);
		p.ret = read_u64(sp, &r->flags);
		remember(target, &key, &p, there);
		return 0;
	}
	if (!remember(target, &key, &p, there))
		send_collective(target, r, r->ts_ns);
	return 0;
}

int nccl_exit(struct pt_regs *ctx)
{
	u64 now = bpf_ktime_get_ns();
	u64 id = bpf_get_current_pid_tgid();
	u64 key = nccl_key((u32)id);
	u64 cookie = argus_cookie(ctx);
	struct pending *p = inflight.lookup(&key);
	if (!p) {
		count_unmatched(id);
		return 0;
	}
	if (ARGUS_CALL(p->cookie) != ARGUS_CALL(cookie) || !RETURNED_FROM(ctx, p))
		return 0; /* the exit of a nested call: ncclBcast calls ncclBroadcast */
	p->collective.duration_ns = now - p->collective.ts_ns;
	p->collective.result = (s32)RESULT(ctx);
	struct argus_target *target = find_target(id);
	if (target)
		send_collective(target, &p->collective, now);
	forget_call(target, id, &key, p->collective.pid);
	return 0;
}

INLINE void send_control(struct argus_target *target, struct argus_control *record, u64 now)
{
	int within = WITHIN_BUDGET(target, CONTROL, now);
	int may = within && (traced_owners() < 2 || within_share(target, ARGUS_R_CONTROL, control.ringbuf_output(record, 0, READ),
		control.ringbuf_output(record, 0, WRITTEN), sizeof(*record), ARGUS_CONTROL_BYTES));
	if (!may && control.ringbuf_output(record, 0, HOW_FULL) >= ARGUS_CONTROL_SHARED_BYTES) {
		refuse(target, within);
		return;
	}
	if (record->flags & ARGUS_F_READ_FAULT)
		lose(target, ARGUS_C_READ_FAULT);
	if (record->flags & ARGUS_F_NAME_ADDRESS)
		count(ARGUS_C_NAMES_READ_LATER);
	if (control.ringbuf_output(record, sizeof(*record), NO_WAKEUP) == 0)
		count(ARGUS_C_CONTROL);
	else
		lose(target, ARGUS_C_CONTROL_DROPPED);
}

INLINE void read_unique_id(struct argus_control *r, u64 address)
{
	if (bpf_probe_read_user(r->data, 128, (void *)address) != 0)
		r->flags |= ARGUS_F_READ_FAULT;
	else
		r->name_len = 128;
}

/* A program may not wait for a page, and those of a library that was just loaded are mostly not there yet. User space can
 * wait: it reads what is missing here, when it needs it. */
INLINE void read_name(struct argus_control *r)
{
	long n = bpf_probe_read_user_str(r->data, ARGUS_NAME_LEN, (void *)r->name_address);
	r->name_len = n > 0 ? (u16)(n - 1) : 0;
	if (n <= 0 || n == ARGUS_NAME_LEN)
		r->flags |= ARGUS_F_NAME_ADDRESS;
	else
		r->flags &= ~ARGUS_F_NAME_ADDRESS;
}

INLINE int remember_control(struct argus_target *target, u64 *key, struct control_pending *p)
{
	if (has_its_share(target, ARGUS_H_CONTROL)) {
		refuse_pending(target);
		return 0;
	}
	if (control_inflight.insert(key, p) != 0) {
		lose(target, ARGUS_C_PENDING_FULL);
		return 0;
	}
	hold(target, ARGUS_H_CONTROL);
	return 1;
}

INLINE void forget_control(struct argus_target *target, u64 id, u64 *key, u32 pid)
{
	if (control_inflight.delete(key) == 0)
		release(target, id, pid, ARGUS_H_CONTROL);
}

INLINE u64 control_key(u32 tid, u64 cookie)
{
	return ((u64)tid << 1) | (ARGUS_SHAPE(cookie) >= ARGUS_S_NAME_OUT);
}

int control_enter(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tid = (u32)id;
	struct argus_target *target = traced(id, 0);
	if (!target)
		return 0;
	u64 cookie = argus_cookie(ctx);
	count_hit(cookie, 0);
	u64 sp = entry_sp(ctx, cookie);
	u64 key = control_key(tid, cookie);
	struct control_pending *outer = control_inflight.lookup(&key);
	if (outer) {
		u32 pid = outer->record.pid;
		if (pid == (u32)(id >> 32)) {
			if (sp < outer->sp) {
				count(ARGUS_C_NESTED);
				return 0;
			}
			lose(target, ARGUS_C_EXIT_MISSED);
			send_control(target, &outer->record, bpf_ktime_get_ns());
		}
		forget_control(target, id, &key, pid);
	}
	/* On the stack: a program may be preempted, and whoever gets the CPU then would find it in memory of the CPU's. */
	struct control_pending p = {};
	p.sp = sp;
	u32 shape = ARGUS_SHAPE(cookie);
	struct argus_control *r = &p.record;
	u8 *flags = &r->flags;
	u64 a0 = arg(ctx, sp, 0, flags), a1 = arg(ctx, sp, 1, flags), a2 = arg(ctx, sp, 2, flags), a3 = arg(ctx, sp, 3, flags);

	p.cookie = cookie;
	r->pid = id >> 32;
	r->tid = tid;
	r->call = ARGUS_CALL(cookie);
	r->duration_ns = -1;
	r->nranks = -1;
	r->rank = -1;
	r->color = -1;
	r->key = -1;
	if (shape == ARGUS_S_COMM_INIT) {
		p.out = a0;
		r->nranks = (s32)a1;
#if REGISTER_ARGS == 8
		read_unique_id(r, a2); /* AAPCS64: a struct over 16 bytes travels by reference */
		r->rank = (s32)a3;
#else
		read_unique_id(r, FIRST_STACK_ARG(sp)); /* System V: in memory, and takes no register */
		r->rank = (s32)a2;
#endif
	} else if (shape == ARGUS_S_COMM_INIT_SCALABLE) {
		p.out = a0;
		r->nranks = (s32)a1;
		r->rank = (s32)a2;
		read_unique_id(r, arg(ctx, sp, 4, flags));
	} else if (shape == ARGUS_S_COMM_INIT_ALL) {
		p.out = a0;
		r->nranks = (s32)a1;
	} else if (shape == ARGUS_S_COMM_SPLIT) {
		r->parent = a0;
		r->color = (s32)a1;
		r->key = (s32)a2;
		p.out = a3;
	} else if (shape == ARGUS_S_COMM_SHRINK) {
		r->parent = a0;
		r->key = (s32)a2;
		p.out = a3;
	} else if (shape == ARGUS_S_COMM_END) {
		r->handle = a0;
		forget_sequences(target, r->pid, a0);
	} else if (shape == ARGUS_S_COMM_COUNT || shape == ARGUS_S_COMM_RANK) {
		r->handle = a0;
		p.out = a1;
	} else if (shape == ARGUS_S_NAME_OUT) {
		p.out = a0;
		r->parent = a1;
		r->name_address = a2;
		read_name(r);
	} else if (shape == ARGUS_S_KERNEL_OUT) {
		p.out = a0;
		r->parent = a1;
	} else if (shape == ARGUS_S_NAME_HOST) {
		r->parent = a0;
		r->handle = a1;
		r->name_address = a3;
		read_name(r);
	}
	r->ts_ns = bpf_ktime_get_ns();
	if (!ARGUS_HAS_EXIT(cookie)) {
		send_control(target, r, r->ts_ns);
		return 0;
	}
	if (!remember_control(target, &key, &p))
		send_control(target, r, r->ts_ns);
	return 0;
}

/* Most GPUs one process drives through ncclCommInitAll. */
#define MAX_INIT_ALL 16
/* ncclInProgress of ncclResult_t. */
#define NCCL_IN_PROGRESS 7

int control_exit(struct pt_regs *ctx)
{
	u64 now = bpf_ktime_get_ns();
	u64 id = bpf_get_current_pid_tgid();
	u32 tid = (u32)id;
	u64 cookie = argus_cookie(ctx);
	u64 key = control_key(tid, cookie);
	struct control_pending *p = control_inflight.lookup(&key);
	if (!p) {
		count_unmatched(id);
		return 0;
	}
	if (ARGUS_CALL(p->cookie) != ARGUS_CALL(cookie) || !RETURNED_FROM(ctx, p))
		return 0;
	struct argus_target *target = find_target(id);
	if (!target) /* it was removed just now */
		return 0;
	u32 shape = ARGUS_SHAPE(cookie);
	struct argus_control *r = &p->record;
	r->duration_ns = now - r->ts_ns;
	r->result = (s32)RESULT(ctx);
	if ((r->flags & ARGUS_F_NAME_ADDRESS) && r->name_len == 0)
		read_name(r); /* the call itself has most likely read it by now, and its caller may free it afterwards */
	/* A non-blocking communicator exists already while its making is in progress. */
	if (p->out && (r->result == 0 || r->result == NCCL_IN_PROGRESS)) {
		if (shape == ARGUS_S_COMM_COUNT)
			r->nranks = (s32)read_u32(p->out, &r->flags);
		else if (shape == ARGUS_S_COMM_RANK)
			r->rank = (s32)read_u32(p->out, &r->flags);
		else if (shape != ARGUS_S_COMM_INIT_ALL)
			r->handle = read_u64(p->out, &r->flags);
	}
	if (shape == ARGUS_S_COMM_INIT_ALL && r->result == 0) {
		if (r->nranks > MAX_INIT_ALL)
			lose(target, ARGUS_C_INIT_ALL_CUT);
#pragma unroll
		for (int i = 0; i < MAX_INIT_ALL; i++) {
			if (i < r->nranks) {
				r->rank = i;
				r->handle = read_u64(p->out + 8 * i, &r->flags);
				send_control(target, r, now);
			}
		}
	} else {
		send_control(target, r, now);
	}
	forget_control(target, id, &key, p->record.pid);
	return 0;
}

INLINE void end_launch(struct argus_target *target, u64 id, u64 key, u64 now)
{
	struct pending *p = inflight.lookup(&key);
	if (!p)
		return;
	if (ARGUS_HAS_EXIT(p->cookie)) {
		p->launch.flags |= ARGUS_F_UNFINISHED;
		count(ARGUS_C_UNFINISHED);
		send_launch(target, &p->launch, now);
	}
	forget_call(target, id, &key, p->launch.pid);
}

INLINE void end_control(struct argus_target *target, u64 id, u64 key, u64 now)
{
	struct control_pending *p = control_inflight.lookup(&key);
	if (!p)
		return;
	p->record.flags |= ARGUS_F_UNFINISHED;
	count(ARGUS_C_UNFINISHED);
	send_control(target, &p->record, now);
	forget_control(target, id, &key, p->record.pid);
}

/* A thread that ends takes its unreturned calls with it: they are reported as unfinished, and their room is freed. */
int thread_exit(void *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tid = (u32)id;
	struct argus_target *target = find_target(id);
	if (!target)
		return 0;
	u64 now = bpf_ktime_get_ns();
	end_launch(target, id, cuda_key(tid), now);
	end_launch(target, id, module_key(tid), now);
	u64 key = nccl_key(tid);
	struct pending *p = inflight.lookup(&key);
	if (p) {
		if (ARGUS_HAS_EXIT(p->cookie)) { /* else it was reported when it began */
			p->collective.flags |= ARGUS_F_UNFINISHED;
			count(ARGUS_C_UNFINISHED);
			send_collective(target, &p->collective, now);
		}
		forget_call(target, id, &key, p->collective.pid);
	}
	end_control(target, id, (u64)tid << 1, now);
	end_control(target, id, (u64)tid << 1 | 1, now);
	forget_groups(target, id);
	struct math_pending *product = math_inflight.lookup(&tid);
	if (product) {
		if (product->ret)
			end_math(target, product, now);
		else
			count(ARGUS_C_UNFINISHED);
		forget_math(target, id, product->record.pid);
	}
	return 0;
}
