/* Walks the frames of CPython of the current thread, leaf first. */

#define WALK_NO_STATE 0
#define WALK_IDLE 1
#define WALK_DONE 2
#define WALK_CUT 3
#define WALK_REJECTED 4
#define WALK_FAULT 5
#define WALK_NO_PYTHON 6

/* Through memory: all ways out of the loop are one to the verifier. */
#define END(how) \
	do { \
		*(volatile u32 *)&s->result = (how); \
		*(volatile u32 *)&s->walking = 0; \
		return; \
	} while (0)

#define FRAME_OWNED_BY_GENERATOR 1

INLINE struct known_code *known_code(struct scratch *s, u64 code)
{
	return &s->codes[within(code >> 4 ^ code >> 8, KNOWN_CODES)];
}

/* Goes to the leaf of the thread state in s->thread. */
INLINE void begin_walk(struct scratch *s, struct argus_python *py)
{
	s->bottom = 0;
	s->earlier = 0;
	s->steps = 0;
	s->window_bytes = 0;
	s->address = AT(u64, s->thread, py->thread_frame, 255);
	if (py->cframe_frame != ARGUS_NO_OFFSET) {
		if (read(&s->address, 8, s->address + py->cframe_frame) != 0)
			END(WALK_FAULT);
	}
	if (!s->address)
		END(WALK_IDLE);
	s->walking = 1;
}

/* Reads some frames into s->body, leaf first, and mixes them into s->hash.
 *
 * A frame is accepted only if its code object has the type of code objects, its instruction lies inside it, and the chain
 * ends in an entry frame (from 3.11 on): a thread is sampled at any instruction, so a frame may be half built.
 *
 * Over 100 lines: one loop body, shaped as a whole so that the verifier accepts FRAMES_A_PASS turns of it. */
INLINE void walk_frames(struct scratch *s, struct argus_python *py)
{
	for (int i = 0; i < FRAMES_A_PASS; i++) {
		u64 bytes = py->frame_bytes;
		OPAQUE(bytes);
		if (bytes > FRAME_BYTES)
			END(WALK_REJECTED);
		u64 owner_at = py->frame_owner;
		if (s->address - s->window + bytes > s->window_bytes || s->address < s->window) {
			u64 below = s->address & 4095, beyond = (WINDOW - below) >> 63;
			below ^= (below ^ WINDOW) & -beyond;
			below &= is_zero(owner_at ^ ARGUS_NO_OFFSET) - 1;
			u64 size = below + bytes;
			OPAQUE(size);
			if (size > WINDOW + FRAME_BYTES)
				END(WALK_REJECTED);
			s->window = s->address - below;
			s->window_bytes = size;
			if (read(s->frame, size, s->window) != 0)
				END(WALK_FAULT);
		}
		u64 offset = *(volatile u64 *)&s->address - *(volatile u64 *)&s->window;
		u8 *here = s->frame + (offset & (2 * WINDOW - 1));
		u64 previous = AT(u64, here, py->frame_previous, 127);

		u64 owner = AT(u8, here, owner_at, 127);
		u64 no_owner = is_zero(owner_at ^ ARGUS_NO_OFFSET);
		u64 entry = no_owner | is_zero(owner ^ py->owner_entry) | is_zero(owner ^ py->owner_entry_2);
		u64 no_frame = entry & is_zero(py->entry_is_frame) & ~no_owner;
		/* In 3.11 a generator that C code resumes is marked before it is linked to its caller. A chain that ends in one
		 * was cut there: what begins a thread is no generator. Its owner lies behind the mark (pycore_frame.h). */
		u64 generator = entry & py->entry_is_frame & is_zero(AT(u8, here, owner_at + 1, 127) ^ FRAME_OWNED_BY_GENERATOR);
		s->bottom = entry & ~(generator & is_zero(is_zero(bytes > owner_at + 1)));

		u64 n = s->frames;
		OPAQUE(n);
		if (n > ARGUS_PYTHON_FRAMES)
			END(WALK_CUT);
		struct argus_frame *frames = (struct argus_frame *)s->body;
		if (no_frame) {
			if (n > 0) {
				frames[n - 1].firstlineno |= ARGUS_FRAME_ENTRY;
				s->hash = mix(s->hash ^ ARGUS_FRAME_ENTRY);
			}
		} else {
			if (n == ARGUS_PYTHON_FRAMES)
				END(WALK_CUT);
			u64 code = AT(u64, here, py->frame_code, 127) & ~((1ull << (py->code_tag_bits & 7)) - 1);
			u64 size = py->code_bytes;
			OPAQUE(size);
			if (size > 256)
				END(WALK_REJECTED);
			struct known_code *known = known_code(s, code);
			if (known->code != code || known->when != s->now) {
				if (read(s->code, size, code) != 0)
					END(WALK_FAULT);
				if (*(u64 *)(s->code + 8) != py->code_type)
					END(WALK_REJECTED);
				u64 check = mix(AT(u64, s->code, py->code_name, 255));
				check ^= AT(u64, s->code, py->code_qualname, 255) &
					 (is_zero(py->code_qualname ^ ARGUS_NO_OFFSET) - 1);
				check = mix(check) ^ AT(u64, s->code, py->code_filename, 255);
				known->check = mix(check) ^ AT(u64, s->code, py->code_linetable, 255);
				known->content = 0;
				known->units = *(u64 *)(s->code + 16);
				known->firstlineno = AT(u32, s->code, py->code_firstlineno, 255) & ~ARGUS_FRAME_ENTRY;
				known->code = code;
				known->when = s->now;
			}
			u64 check = *(volatile u64 *)&known->check;
			/* The last instruction: an index, or an address inside the code object, whose ob_size, at 16, counts units
			 * of two bytes. One unit before its first: none has begun. */
			u64 is_index = is_zero(py->code_adaptive ^ ARGUS_NO_OFFSET);
			u64 instr = AT(u64, here, py->frame_instr, 127);
			s64 at = instr - (code + py->code_adaptive), index = (s64)(s32)instr << (py->instr_shift & 7);
			u64 outside = is_zero(is_zero((u64)(at + 2) >> 63) & ((u64)(at - (s64)(*(volatile u64 *)&known->units << 1)) >> 63));
			if (outside & ~is_index)
				END(WALK_REJECTED);
			at ^= (at ^ index) & -is_index;
			u32 instruction = (u32)at | (u32)(at >> 63);
			/* 3.11 and 3.12 put an empty cframe in place and then fill it. Until then it holds the leaf of an earlier
			 * call, and that may lie on a frame that has not begun: but what has not begun has called nobody. */
			u64 not_begun = (u64)(at >> 63) & (is_zero(py->cframe_frame ^ ARGUS_NO_OFFSET) - 1);
			if (not_begun & -(u64)(n > 0))
				END(WALK_REJECTED);
			/* In 3.11 such a leaf does not show yet whether C code called it: left out, its caller is the leaf. */
			u64 kept = ~(not_begun & -(u64)is_zero(is_zero(py->entry_is_frame)));
			OPAQUE(kept);
			u32 line = *(volatile u32 *)&known->firstlineno | entry << 31;

			struct argus_frame *frame = &frames[n];
			frame->code = code;
			frame->check = check;
			frame->content = 0;
			frame->instruction = instruction;
			frame->firstlineno = line;
			u64 hash = mix(mix(mix(s->hash ^ code) ^ check) ^ ((u64)instruction << 32 | line));
			s->hash ^= (s->hash ^ hash) & kept;
			s->frames = n + (kept & 1);
		}
		if (!previous) {
			if (!s->bottom)
				END(WALK_REJECTED);
			END(WALK_DONE);
		}
		if (previous == s->address || previous == s->earlier)
			END(WALK_REJECTED);
		/* Brent's algorithm: remember the frame at each power of two. */
		u32 steps = s->steps + 1;
		u64 power = is_zero(steps & (steps - 1));
		s->steps = steps;
		s->earlier ^= (s->earlier ^ previous) & -power;
		s->address = previous;
	}
	if (s->steps >= FRAME_STEPS)
		END(WALK_CUT);
}

INLINE u32 holds_gil(struct argus_python *py, u64 state)
{
	u64 gil[2] = {};
	if (!py->gil_holder)
		return 0;
	if (py->gil_locked == py->gil_holder + 8) {
		if (read(gil, sizeof(gil), py->gil_holder) != 0)
			return 0;
	} else {
		if (read(gil, 8, py->gil_holder) != 0)
			return 0;
		gil[1] = 1; /* a holder without a lock word is 0 when nobody holds it */
		if (py->gil_locked && read(&gil[1], 4, py->gil_locked) != 0)
			return 0;
	}
	return gil[0] == state && (u32)gil[1];
}

/* Whether the thread holds the GIL, and collects garbage: ARGUS_WHAT_*. Who collects is seen while it holds the GIL. One of
 * gc.callbacks may give it away meanwhile: nobody else collects before this one is done, so that soon after it is the
 * same one. */
INLINE u32 interpreter_flags(struct argus_python *py, struct thread *thread, u64 state, u64 now)
{
	u32 flags = holds_gil(py, state) ? ARGUS_WHAT_GIL : 0, collecting = 0;
	if (!flags && (!thread->gc_begin_ns || now > thread->gc_end_ns + GIVEN_AWAY_NS))
		return 0;
	if (py->gc_collecting && read(&collecting, 4, py->gc_collecting) == 0 && collecting)
		flags |= ARGUS_WHAT_GC;
	return flags;
}

/* Begins to take the current thread's stack. s->flags: ARGUS_STACK_* known before. s->what: gets ARGUS_WHAT_GIL and
 * ARGUS_WHAT_GC. s->walking: whether there are frames to be walked. */
INLINE void begin_stack(struct scratch *s, struct target *target, struct thread *thread, u64 id, u64 now)
{
	u32 tgid = id >> 32, tid = (u32)id;
	s->now = now;
	s->frames = 0;
	s->fresh = 0;
	s->walked = 0;
	s->walking = 0;
	s->space = target->space;
	s->owner = target->owner;
	s->hash = mix(s->space + 1);
	*(volatile u32 *)&s->result = WALK_NO_PYTHON;
	struct argus_python *py = pythons.lookup(&tgid);
	if (!py || !thread)
		return;
	*(volatile u32 *)&s->result = WALK_NO_STATE;
	u64 state = thread_state(s, py, thread, tid, now);
	if (state) {
		s->walked = state;
		s->what |= interpreter_flags(py, thread, state, now);
		begin_walk(s, py);
	} else if (thread->unreadable) {
		*(volatile u32 *)&s->result = WALK_FAULT;
	}
}

/* Walks on. Returns which program comes next. */
INLINE int walk_on(void)
{
	int zero = 0;
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
	struct scratch *s = scratches.lookup(&zero);
	if (!s)
		return FINISH;
	struct argus_python *py = pythons.lookup(&tgid);
	if (py) {
		walk_frames(s, py);
	} else {
		*(volatile u32 *)&s->result = WALK_REJECTED; /* it was removed just now */
		s->walking = 0;
	}
	return *(volatile u32 *)&s->walking ? WALK : FINISH;
}
