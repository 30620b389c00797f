/* CUDA calls, driver and runtime: what was launched, copied, waited for, allocated or loaded, by which thread, when.
 * A call made by another traced CUDA call (cuLaunchKernel inside cudaLaunchKernel) is not reported again. */

INLINE void fill_plain(struct pt_regs *ctx, u64 sp, u64 cookie, struct argus_launch *r)
{
	r->handle = arg(ctx, sp, ARGUS_ARG(cookie, 0), &r->flags);
	r->stream = arg(ctx, sp, ARGUS_ARG(cookie, 1), &r->flags);
	r->bytes = arg(ctx, sp, ARGUS_ARG(cookie, 2), &r->flags) << ARGUS_SCALE(cookie);
	if (ARGUS_ARG(cookie, 3) != 15) /* overwritten at exit by what it points at; without an exit it is not known */
		r->handle = ARGUS_HAS_EXIT(cookie) ? arg(ctx, sp, ARGUS_ARG(cookie, 3), &r->flags) : 0;
	r->direction = (u32)arg(ctx, sp, ARGUS_ARG(cookie, 4), &r->flags);
}

/* CUlaunchConfig and cudaLaunchConfig_t: u32 grid[3], block[3]; shared memory at 24, 4 bytes wide in the first (and 4 of
 * padding), 8 in the second; stream at 32. */
INLINE void fill_config(u64 config, int wide, struct argus_launch *r)
{
	u32 words[10] = {};
	if (bpf_probe_read_user(words, sizeof(words), (void *)config) != 0)
		r->flags |= ARGUS_F_READ_FAULT;
	r->grid[0] = words[0];
	r->grid[1] = words[1];
	r->grid[2] = words[2];
	r->block[0] = words[3];
	r->block[1] = words[4];
	r->block[2] = words[5];
	r->bytes = words[6] | (wide ? (u64)words[7] << 32 : 0);
	r->stream = words[8] | (u64)words[9] << 32;
}

INLINE void fill_launch(struct pt_regs *ctx, u64 sp, u64 cookie, struct argus_launch *r)
{
	u32 shape = ARGUS_SHAPE(cookie);
	u8 *flags = &r->flags;

	if (shape == ARGUS_S_LAUNCH_DRIVER) {
		r->handle = arg(ctx, sp, 0, flags);
		r->grid[0] = (u32)arg(ctx, sp, 1, flags);
		r->grid[1] = (u32)arg(ctx, sp, 2, flags);
		r->grid[2] = (u32)arg(ctx, sp, 3, flags);
		r->block[0] = (u16)arg(ctx, sp, 4, flags);
		r->block[1] = (u16)arg(ctx, sp, 5, flags);
		r->block[2] = (u16)arg(ctx, sp, 6, flags);
		r->bytes = (u32)arg(ctx, sp, 7, flags);
		r->stream = arg(ctx, sp, 8, flags);
	} else if (shape == ARGUS_S_LAUNCH_DRIVER_EX) {
		r->handle = arg(ctx, sp, 1, flags);
		fill_config(arg(ctx, sp, 0, flags), 0, r);
	} else if (shape == ARGUS_S_LAUNCH_RUNTIME) {
		/* A dim3 is 12 bytes: two integer arguments, x and y packed in the first. */
		u64 grid_xy = arg(ctx, sp, 1, flags), block_xy = arg(ctx, sp, 3, flags);
		r->handle = arg(ctx, sp, 0, flags);
		r->grid[0] = (u32)grid_xy;
		r->grid[1] = grid_xy >> 32;
		r->grid[2] = (u32)arg(ctx, sp, 2, flags);
		r->block[0] = (u16)block_xy;
		r->block[1] = (u16)(block_xy >> 32);
		r->block[2] = (u16)arg(ctx, sp, 4, flags);
		r->bytes = arg(ctx, sp, 6, flags);
		r->stream = arg(ctx, sp, 7, flags);
	} else if (shape == ARGUS_S_LAUNCH_RUNTIME_EX) {
		r->handle = arg(ctx, sp, 1, flags);
		fill_config(arg(ctx, sp, 0, flags), 1, r);
	} else {
		fill_plain(ctx, sp, cookie, r);
		if (shape == ARGUS_S_AREA) {
			r->bytes *= arg(ctx, sp, ARGUS_ARG(cookie, 2) + 1, flags);
		} else if (shape == ARGUS_S_EXTENT) {
			u64 extent = arg(ctx, sp, 0, flags) + ARGUS_OFFSET(cookie);
			r->bytes = read_u64(extent, flags) * read_u64(extent + 8, flags);
			if (ARGUS_DIMS(cookie) == 3)
				r->bytes *= read_u64(extent + 16, flags);
		}
	}
}

int cuda_enter(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32, tid = (u32)id;
	struct argus_target *target = traced(id, 1);
	if (!target)
		return 0;
	u64 cookie = argus_cookie(ctx);
	count_own_hit(target, cookie, 0);
	u64 sp = entry_sp(ctx, cookie);
	u64 key = family_key(tid, cookie);
	struct pending *outer = inflight.lookup(&key);
	int there = outer && outer->launch.pid == tgid;
	if (outer && !there) {
		forget_call(target, id, &key, outer->launch.pid);
	} else if (outer) {
		if (active(ctx, sp, outer, cookie)) {
			count(ARGUS_C_NESTED);
			return 0;
		}
		if (ARGUS_HAS_EXIT(outer->cookie)) {
			lose(target, ARGUS_C_EXIT_MISSED);
			send_launch(target, &outer->launch, bpf_ktime_get_ns());
		}
	}

	struct pending p = {};
	p.cookie = cookie;
	p.sp = sp;
	p.ip = IP(ctx);
	p.launch.pid = tgid;
	p.launch.tid = tid;
	p.launch.call = ARGUS_CALL(cookie);
	p.launch.duration_ns = -1;
	fill_launch(ctx, sp, cookie, &p.launch);

	u64 outer_key = nccl_key(tid);
	struct pending *nccl = inflight.lookup(&outer_key);
	if (nccl && active(ctx, sp, nccl, cookie))
		p.launch.flags |= ARGUS_F_IN_NCCL;

	p.launch.ts_ns = bpf_ktime_get_ns();
	if (ARGUS_SHAPE(cookie) >= ARGUS_S_LAUNCH_DRIVER && ARGUS_SHAPE(cookie) <= ARGUS_S_LAUNCH_RUNTIME_EX)
		launch_in_math(target, sp, id, p.launch.ts_ns);
	if (!ARGUS_HAS_EXIT(cookie)) {
		send_launch(target, &p.launch, p.launch.ts_ns);
		if (ARGUS_LAYER(cookie) == ARGUS_LAYER_DRIVER) { /* the driver calls no hooked function */
			if (there)
				forget_call(target, id, &key, tgid);
			return 0;
		}
		u8 flags = 0;
		p.ret = read_u64(sp, &flags);
		remember(target, &key, &p, there); /* if it is not, the driver call inside will count as one of its own */
		return 0;
	}
	if (!remember(target, &key, &p, there))
		send_launch(target, &p.launch, p.launch.ts_ns);
	return 0;
}

int cuda_exit(struct pt_regs *ctx)
{
	u64 now = bpf_ktime_get_ns();
	u64 id = bpf_get_current_pid_tgid();
	u64 cookie = argus_cookie(ctx);
	u64 key = family_key((u32)id, cookie);
	struct pending *p = inflight.lookup(&key);
	if (!p) {
		count_unmatched(id);
		return 0;
	}
	if (ARGUS_CALL(p->cookie) != ARGUS_CALL(cookie) || !RETURNED_FROM(ctx, p))
		return 0; /* the exit of a nested call */
	p->launch.duration_ns = now - p->launch.ts_ns;
	p->launch.result = (s32)RESULT(ctx);
	if (ARGUS_ARG(cookie, 3) != 15 && p->launch.result == 0)
		p->launch.handle = read_u64(p->launch.handle, &p->launch.flags);
	struct argus_target *target = find_target(id);
	if (target)
		send_launch(target, &p->launch, now);
	forget_call(target, id, &key, p->launch.pid);
	return 0;
}
