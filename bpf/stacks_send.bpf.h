/* Ends a stack, and sends what was not sent before: the stack, and the names of its code objects. */

/* Ends taking the stack. If it is new, s->fresh is set: it is to be sent (send_stack). Returns its number; 0: there are too
 * many new ones. */
INLINE u64 finish_stack(void *ctx, struct scratch *s, struct thread *thread, u64 id)
{
	u32 tgid = id >> 32, tid = (u32)id;
	struct argus_python *py = pythons.lookup(&tgid);
	u32 result = *(volatile u32 *)&s->result;
	if (result == WALK_NO_STATE) {
		count(ARGUS_SC_NO_THREAD_STATE);
	} else if (result == WALK_IDLE || (result == WALK_DONE && !s->frames)) { /* nothing but an entry frame */
		s->flags |= ARGUS_STACK_IDLE_PYTHON;
	} else if (result == WALK_DONE) {
		s->flags |= ARGUS_STACK_PYTHON;
		count(ARGUS_SC_PYTHON);
	} else if (result == WALK_CUT) {
		s->flags |= ARGUS_STACK_PYTHON_CUT;
		count(ARGUS_SC_PYTHON);
		count(ARGUS_SC_PYTHON_CUT);
	} else if (result != WALK_NO_PYTHON) {
		s->flags |= ARGUS_STACK_PYTHON_REJECTED;
		if (thread) {
			thread->distrusted = s->walked;
			thread->state = 0;
		}
		/* Otherwise the rejected frames would number the stack. */
		s->frames = 0;
		s->hash = mix(s->space + 1);
	}

	u64 n = s->frames;
	OPAQUE(n);
	if (n > ARGUS_PYTHON_FRAMES)
		return 1;
	u8 *native = s->body + n * sizeof(struct argus_frame);
	long got = native_stack(ctx, (u64 *)native);
	u64 addresses = 0;
	if (got > 0)
		addresses = (u64)got / 8;
	else
		count(ARGUS_SC_NATIVE_NONE);
	/* Else most samples would be stacks not seen before. */
	if (addresses) {
		u64 leaf = *(u64 *)native;
		struct block block = {.number = leaf >> 4, .space = s->space};
		if (py && leaf >= py->eval_begin && leaf < py->eval_end) {
			*(u64 *)native = py->eval_begin;
		} else {
			u64 *begin = blocks.lookup(&block);
			if (begin)
				*(u64 *)native = *begin;
		}
		block.number = *(u64 *)native;
		if (addresses > 1 && leaf_only.lookup(&block))
			addresses = 1;
	}
	if (py && s->flags & ARGUS_STACK_PYTHON_REJECTED) { /* else nobody wants to know any more: it was removed just now */
		if (*(volatile u32 *)&s->result != WALK_FAULT)
			count(ARGUS_SC_PYTHON_REJECTED);
		else if (addresses)
			count(ARGUS_SC_PYTHON_FAULT);
		else
			s->flags &= ~ARGUS_STACK_PYTHON_REJECTED; /* it has no memory any more: it is ending */
	}
	if (addresses >= ARGUS_NATIVE_FRAMES) {
		addresses = ARGUS_NATIVE_FRAMES;
		s->flags |= ARGUS_STACK_NATIVE_CUT;
		count(ARGUS_SC_NATIVE_CUT);
	}
	for (int i = 0; i < ARGUS_NATIVE_FRAMES; i++) {
		OPAQUE(addresses); /* or clang makes one bound of two, which the verifier cannot follow */
		if (i >= addresses)
			break;
		s->hash = mix(s->hash ^ *(u64 *)(native + 8 * i));
	}
	u64 number = mix(s->hash ^ ((u64)s->flags << 32 | n << 16 | addresses));
	if (!number)
		number = 1;

	if (was_seen(number))
		return number;
	if (!has_stack_share(s->owner, s->now))
		return 0;
	s->head.stack = number;
	s->head.ts_ns = s->now;
	s->head.pid = tgid;
	s->head.tid = tid;
	s->head.python_frames = n;
	s->head.native_frames = addresses;
	s->head.flags = s->flags;
	s->head.reserved = 0;
	s->fresh = 1;
	s->sent_frames = 0;
	return number;
}

/* ---- sending */

/* Reads an object of up to so many bytes: less where the memory ends behind it. Returns how many. */
INLINE u64 read_object(u8 *to, u64 size, u64 from)
{
	if (!from)
		return 0;
	if (read(to, size, from) == 0)
		return size;
	u64 rest = -from & 4095; /* of its page */
	OPAQUE(rest);
	if (rest > size)
		return 0;
	return read(to, rest, from) == 0 ? rest : 0;
}

#define HASHED_BYTES 96

/* Of an object's size and the end of its bytes, which is what file names and qualified names differ in. mask: 8 less than
 * the buffer's size, a power of two. */
INLINE u64 hash_bytes(u8 *object, u64 mask, u64 begin, u64 bytes)
{
	u64 end = begin + bytes, hash = mix(bytes + 1);
	u64 beyond = is_zero((end - (mask + 8)) >> 63); /* it is longer than the buffer */
	end ^= (end ^ (mask + 8)) & -beyond;
	u64 tail = (end - HASHED_BYTES) & ~7ull, is_long = is_zero((end - (begin + HASHED_BYTES)) >> 63);
	u64 at = begin ^ ((begin ^ tail) & -is_long);
#pragma clang loop unroll(disable)
	for (int i = 0; i <= HASHED_BYTES / 8; i++) {
		u64 offset = at + 8 * i, inside = (offset - end) >> 63;
		hash = mix(hash ^ (AT(u64, object, offset, mask) & -inside));
	}
	return hash;
}

INLINE u64 hash_text(u8 *text, u64 mask, struct argus_python *py)
{
	u32 state = *(u32 *)(text + 32) >> (py->unicode_kind_shift & 31);
	u64 ascii = state >> 4 & 1, begin = py->unicode_compact ^ ((py->unicode_compact ^ py->unicode_ascii) & -ascii);
	return hash_bytes(text, mask, begin & 0xf8, *(u64 *)(text + 16) * (state & 7)) ^ (state & 31);
}

/* Finds out which content a frame's code object has, and sends it if that was never met. */
INLINE void read_content(struct scratch *s, struct argus_python *py, struct argus_frame *frame)
{
	struct known_code *known = known_code(s, frame->code);
	u64 is_known = is_zero(known->code ^ frame->code) & is_zero(known->when ^ s->now);
	if (is_known && known->content) {
		frame->content = known->content;
		return;
	}
	u64 size = py->code_bytes;
	OPAQUE(size);
	if (size > 256 || read(s->code, size, frame->code) != 0)
		return;
	u64 name_at = py->code_qualname, no_qualname = is_zero(name_at ^ ARGUS_NO_OFFSET);
	name_at ^= (name_at ^ py->code_name) & -no_qualname;
	u64 table = AT(u64, s->code, py->code_linetable, 255);
	struct argus_code *record = &s->record;
	u64 name_bytes = read_object(record->name, ARGUS_CODE_NAME, AT(u64, s->code, name_at, 255));
	u64 file_bytes = read_object(record->file, ARGUS_CODE_FILE, AT(u64, s->code, py->code_filename, 255));
	u64 table_bytes = read_object(s->table, 256, table);
	if (name_bytes < 64 || file_bytes < 64 || table_bytes < 40)
		return;
	u64 content = hash_text(record->name, ARGUS_CODE_NAME - 8, py);
	content = mix(content) ^ hash_text(record->file, ARGUS_CODE_FILE - 8, py);
	content = mix(content) ^ hash_bytes(s->table, 256 - 8, 32, *(u64 *)(s->table + 16));
	content += is_zero(content);
	frame->content = content;
	known->content ^= (known->content ^ content) & -is_known;
	u64 number = mix(mix(mix(content ^ s->space) ^ frame->code) ^ frame->check);
	if (codes_seen.lookup(&number))
		return;
	u64 whole = *(u64 *)(s->table + 16) + 33;
	OPAQUE(whole);
	if (whole > ARGUS_CODE_TABLE)
		whole = ARGUS_CODE_TABLE;
	table_bytes = read(s->table, whole, table) == 0 ? whole : 0;
	record->code = frame->code;
	record->check = frame->check;
	record->content = content;
	record->pid = s->head.pid;
	record->name_bytes = name_bytes;
	record->file_bytes = file_bytes;
	record->table_bytes = table_bytes;
	u64 bytes = sizeof(*record) + table_bytes;
	OPAQUE(bytes);
	if (bytes > sizeof(*record) + ARGUS_CODE_TABLE)
		return;
	if (codes.ringbuf_output(record, bytes, NO_WAKEUP) != 0) {
		count(ARGUS_SC_CODES_DROPPED);
		return;
	}
	count(ARGUS_SC_CODES_SENT);
	u8 one = 1;
	codes_seen.update(&number, &one);
}

/* Sends the stack that finish_stack found to be new, after what its frames are called. Returns whether there are more
 * frames to be looked at: then it was not sent yet. */
INLINE int send_stack(void)
{
	int zero = 0;
	struct scratch *s = scratches.lookup(&zero);
	if (!s || !s->fresh)
		return 0;
	u32 tgid = s->head.pid;
	struct argus_python *py = pythons.lookup(&tgid);
	u64 n = s->head.python_frames, addresses = s->head.native_frames;
	for (int i = 0; py && i < FRAMES_A_PASS; i++) {
		u64 at = s->sent_frames;
		OPAQUE(at);
		if (at >= n || at >= ARGUS_PYTHON_FRAMES)
			break;
		s->sent_frames = at + 1;
		read_content(s, py, (struct argus_frame *)s->body + at);
	}
	if (py && s->sent_frames < n)
		return 1;
	s->fresh = 0;
	OPAQUE(n);
	OPAQUE(addresses);
	if (n > ARGUS_PYTHON_FRAMES || addresses > ARGUS_NATIVE_FRAMES)
		return 0;
	u64 bytes = sizeof(s->head) + n * sizeof(struct argus_frame) + addresses * 8;
	OPAQUE(bytes);
	if (bytes > sizeof(s->head) + BODY)
		return 0;
	if (stacks.ringbuf_output(s, bytes, NO_WAKEUP) != 0) {
		count(ARGUS_SC_STACKS_DROPPED);
		return 0;
	}
	count(ARGUS_SC_STACKS_SENT);
	see(s->head.stack);
	return 0;
}
