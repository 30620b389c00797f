/* Finds the thread state of CPython that belongs to the current thread. */

INLINE int read_state(struct scratch *s, struct argus_python *py, u64 state)
{
	u64 bytes = py->thread_frame;
	if (py->thread_id > bytes)
		bytes = py->thread_id;
	if (py->thread_next > bytes)
		bytes = py->thread_next;
	if (py->native_thread_id != ARGUS_NO_OFFSET && py->native_thread_id > bytes)
		bytes = py->native_thread_id;
	bytes += 8;
	OPAQUE(bytes);
	if (bytes > 256)
		return -1;
	return read(s->thread, bytes, state);
}

/* Whether the thread state read last is that of the thread with this number. */
INLINE int is_state_of(struct scratch *s, struct argus_python *py, u32 ns_tid)
{
	u32 native = py->native_thread_id, in_pthread = py->pthread_tid;
	if (native != ARGUS_NO_OFFSET)
		return (u32)AT(u64, s->thread, native, 255) == ns_tid;
	if (in_pthread == ARGUS_NO_OFFSET)
		return 0;
	u64 self = AT(u64, s->thread, py->thread_id, 255);
	u32 tid = 0;
	return self && read(&tid, sizeof(tid), self + in_pthread) == 0 && tid == ns_tid;
}

INLINE u64 search_state(struct scratch *s, struct argus_python *py, struct thread *thread)
{
	count(ARGUS_SC_THREAD_WALKS);
	thread->unreadable = 1;
	s->cut = 0;
	s->state = 0;
	if (read(&s->interpreter, 8, py->runtime + py->interp_head) != 0)
		return 0;
	if (s->interpreter && read(&s->state, 8, s->interpreter + py->threads_head) != 0)
		return 0;
	for (int i = 0; i < INTERPRETER_STEPS; i++) {
		if (!s->state) {
			if (s->interpreter && read(&s->interpreter, 8, s->interpreter + py->interp_next) != 0)
				return 0;
			if (!s->interpreter) {
				thread->unreadable = 0;
				return 0;
			}
			if (read(&s->state, 8, s->interpreter + py->threads_head) != 0)
				return 0;
			continue;
		}
		if (read_state(s, py, s->state) != 0)
			return 0;
		if (is_state_of(s, py, thread->ns_tid)) {
			thread->unreadable = 0;
			return s->state;
		}
		s->state = AT(u64, s->thread, py->thread_next, 255);
	}
	thread->unreadable = 0;
	s->cut = 1;
	count(ARGUS_SC_THREAD_LIST_CUT);
	return 0;
}

/* The thread state of the current thread, read into s->thread. 0: it has none, or (thread->unreadable) nobody knows. */
INLINE u64 thread_state(struct scratch *s, struct argus_python *py, struct thread *thread, u32 tid, u64 now)
{
	if (!thread->ns_tid) {
		struct nsdata numbers = {};
		if (bpf_get_ns_current_pid_tgid(py->ns_dev, py->ns_ino, (void *)&numbers, sizeof(numbers)) != 0) {
			thread->unreadable = 1; /* it runs in another namespace than was passed */
			return 0;
		}
		thread->ns_tid = numbers.pid;
	}
	u64 state = thread->state;
	if (state) {
		if (read_state(s, py, state) != 0)
			thread->unreadable = 1;
		else if (is_state_of(s, py, thread->ns_tid))
			return state;
		thread->state = 0;
	}
	u64 *passed = thread_states.lookup(&tid);
	state = passed ? *passed : 0;
	u64 distrusted = state && state == thread->distrusted;
	thread->distrusted = 0;
	if (distrusted || !(state && read_state(s, py, state) == 0 && is_state_of(s, py, thread->ns_tid))) {
		if (!distrusted && now < thread->search_ns)
			return 0;
		u64 searched = search_state(s, py, thread);
		/* A list too long to be searched does not contradict what was passed. */
		if (!searched && distrusted && (thread->unreadable || s->cut) && read_state(s, py, state) == 0 &&
		    is_state_of(s, py, thread->ns_tid))
			searched = state;
		if (!searched && distrusted)
			thread_states.delete(&tid);
		state = searched;
		if (!state) {
			thread->search_ns =
				now + (thread->had_state || thread->unreadable ? NEXT_SEARCH_NS : FIRST_SEARCH_NS);
			return 0;
		}
	}
	thread->state = state;
	thread->had_state = 1;
	thread->unreadable = 0;
	thread->search_ns = 0;
	return state;
}
