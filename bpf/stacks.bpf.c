/* Where the threads of traced processes spend their time: samples on the CPU, intervals off it, each with the Python and
 * the native stack. A stack is numbered by a hash and sent once; what recurs is only counted.
 *
 * Compiled with these definitions (argus/capture/stacks.py):
 *   ARGUS_STACK_PAGES, ARGUS_CODE_PAGES, ARGUS_PAUSE_PAGES  sizes of the rings, in bcc's pages
 *   ARGUS_CPUS, ARGUS_ROWS  how many logs, and rows of each, a power of two
 *   ARGUS_THREADS_EACH  threads of one process that are followed
 *   ARGUS_THREADS, ARGUS_SEEN, ARGUS_CODES, ARGUS_BLOCKS, ARGUS_LEAVES  entries of the maps
 *   ARGUS_THREAD_PAGES  pages of threads_known: enough for every thread number there can be
 *   ARGUS_TASK_PID, ARGUS_TASK_STATE, ARGUS_TASK_RAN  offsets in struct task_struct; absent where the kernel has no BTF
 *   ARGUS_PREV_STATE  1: sched_switch tells the state that a thread goes off in (Linux 5.18)
 *   ARGUS_OFF_CPU_NS  shortest time off the CPU that is counted
 *   ARGUS_WALK_NS  for how long no stack is taken at a place where one proved useless: the thread was back at once
 */
#include <uapi/linux/ptrace.h>
#include "stacks.h"

#define INLINE static inline __attribute__((always_inline))

/* Helpers of the stable BPF interface, by number: bcc declares them only since some version. */
static u64 *(*argus_current_task)(void) = (void *)158;         /* Linux 5.11 */
static void *(*argus_task_regs)(void *task) = (void *)175;     /* Linux 5.15 */
static long (*argus_get_stack)(void *ctx, void *to, u32 size, u64 flags) = (void *)67;
#define USER_STACK 256

/* Wakes nobody: user space polls. */
#define NO_WAKEUP 1

#define TASK_UNINTERRUPTIBLE 2
#define TASK_DEAD 0x80

#define INTERPRETER_STEPS 128 /* thread states and interpreters looked at in one search */
#define FIRST_SEARCH_NS 1000000000ull /* between searches for the thread state of a thread that never had one */
#define NEXT_SEARCH_NS 20000000ull    /* of one that had one: C threads get a new one whenever they call Python */

/* What is known of one thread of a traced process. User space reads it (argus/capture/stacks.py, _THREAD). */
/* A stack is taken by a row of programs that each go over to the next (tail calls, 33 at most in a row): the verifier
 * looks at a program as a whole, and at each pass of a loop. begin -> walk, some frames at a time -> finish -> send, some
 * frames at a time, if it is new. Between them everything is in struct scratch. They run one after another on one CPU,
 * with interrupts off (sampling) or preemption off (a switch). */
#define WALK 0
#define FINISH 1
#define SEND 2
#define FRAMES_A_PASS 32
#define FRAME_STEPS (10 * FRAMES_A_PASS) /* some more than are kept: entry frames are read, and not kept */

#define TARGET_BITS 32768
#define THREADS_A_PAGE 4096

#define LONG_SITES 8
#define TRUST_SHIFT 23 /* ns: 8 ms */
#define FORGET_NS (1ull << 33) /* sites of long ago count less: all are halved when one has so much */

/* A place where a thread has waited for long. */
struct site {
	u64 site;
	u64 ns;
};

struct thread {
	u64 off_ns;        /* off the CPU since; 0: on it */
	u64 off_stack;
	u64 wake_ns;       /* last woken */
	u64 on_ns;         /* last sampled while it was believed to be off */
	u64 ran_ns;        /* its CPU time when it went off */
	u64 walk_ns;       /* when the stacks taken at switches are paid off */
	u64 off_site;      /* where it went off */
	u64 short_site;    /* where it went off last for less than ARGUS_OFF_CPU_NS, with a stack */
	u64 short_ns;
	u64 state;         /* address of its thread state; 0: none known */
	u64 search_ns;     /* no search for it before this */
	u64 sample_ns;     /* last looked at by a sample */
	u64 gc_begin_ns;   /* 0: not collecting garbage */
	u64 gc_end_ns;
	u64 gc_before_ns;
	u64 gc_stack;
	u32 off_what;
	u32 pid;
	u32 ns_tid;        /* its number in the PID namespace of the process; 0: not asked yet */
	u32 had_state;
	u32 unreadable;    /* the last search met memory that could not be read: that it has no state is not known */
	u32 trust;         /* four bits for each of long_sites: stacks that may be wasted there */
	u64 distrusted;    /* thread state under which frames were found that are none: it may be gone */
	struct site long_sites[LONG_SITES]; /* where it was off for the most time (come_back) */
};

struct target {
	u64 refused;       /* samples and switches of threads beyond its share */
	u32 threads;       /* in the map "threads" */
	u32 generation;    /* part of every stack's number: another for each process that gets this PID, and each program it runs */
};

struct nsdata {
	u32 pid;
	u32 tgid;
};

/* CPython 3.11 and later lay frames side by side, a caller's below its callee's: with a frame, so many bytes below it are
 * read, within its page. */
#define WINDOW 512
#define FRAME_BYTES 128

#define KNOWN_CODES 16

/* What the stack being taken has already read of a code object. Between two samples anything may be freed. */
struct known_code {
	u64 code;
	u64 when;          /* s->now of the stack */
	u64 check;
	u64 content;       /* 0: not read yet */
	u64 units;         /* ob_size */
	u64 firstlineno;
};

#define BODY (ARGUS_PYTHON_FRAMES * sizeof(struct argus_frame) + ARGUS_NATIVE_FRAMES * 8)

/* Work space, too large for BPF's stack. Variables that live through a loop are here too: a register whose value the
 * verifier knows multiplies the states that it must look at. */
struct scratch {
	struct argus_stack head;
	u8 body[BODY];
	u8 thread[264];    /* a thread state's beginning */
	u8 frame[2 * WINDOW + FRAME_BYTES]; /* memory from window on */
	u8 code[264];
	struct known_code codes[KNOWN_CODES];
	u64 window;
	u64 window_bytes;
	u64 address;       /* of the frame being read */
	u64 earlier;       /* a frame met before: met again, the chain is a circle */
	u64 hash;
	u64 interpreter;
	u64 state;
	u32 steps;
	u32 frames;
	u32 bottom;        /* the last frame was an entry frame */
	u32 result;        /* of the walk */
	u32 what;          /* ARGUS_WHAT_* and ARGUS_STACK_* as far as they are known */
	u32 flags;
	u32 cut;           /* the last search for a thread state was given up */
	u32 fresh;         /* head and body hold a stack that is to be sent */
	u64 now;
	u64 walked;        /* thread state whose frames are walked; 0: none */
	u32 walking;
	u32 sent_frames;   /* whose contents have been looked at */
	u64 space;         /* of what is known by address: another for each process and program */
	struct argus_code record;
	u8 table[ARGUS_CODE_TABLE]; /* behind it: they are sent together */
};

/* Sixteen bytes of code that lie in one function. */
struct block {
	u64 number;        /* address / 16 */
	u64 space;
};

/* Whether a process may be in stack_targets, a bit each by the low bits of its number, and whether a thread is in threads:
 * one look, at a line that is mostly in a cache, spares those whom nobody traces (every switch of the machine) the rest. */
struct target_bits {
	u64 words[TARGET_BITS / 64];
};
struct thread_page {
	u8 known[THREADS_A_PAGE];
};
BPF_ARRAY(targets_known, struct target_bits, 1);
BPF_ARRAY(threads_known, struct thread_page, ARGUS_THREAD_PAGES);

BPF_HASH(stack_targets, u32, struct target, 16384);
BPF_HASH(pythons, u32, struct argus_python, 4096);
BPF_HASH(threads, u32, struct thread, ARGUS_THREADS);
/* Thread -> address of its thread state, as user space found it. Verified at every use. */
BPF_HASH(thread_states, u32, u64, ARGUS_THREADS);
BPF_TABLE("lru_hash", u64, u8, codes_seen, ARGUS_CODES);
/* Where the function begins that a block lies in. User space tells it of functions that samples met. */
BPF_TABLE("lru_hash", struct block, u64, blocks, ARGUS_BLOCKS);
/* Places (a block's number is the address here) whose chains of frame pointers user space has never believed: what such a
 * chain holds makes stacks different that are the same. */
BPF_TABLE("lru_hash", struct block, u8, leaf_only, ARGUS_LEAVES);
BPF_ARRAY(blank_threads, struct thread, 1);
BPF_PERCPU_ARRAY(scratches, struct scratch, 1);
/* A log in whole. A row of a hash map for each would lie in memory that is in no cache, as would its bucket: counting took
 * more than all of the walk. */
struct log {
	struct argus_log head;
	struct argus_row rows[ARGUS_ROWS];
	u32 newest[ARGUS_ROWS]; /* by a hash of the key: number of the row that was begun last */
};
BPF_F_TABLE("array", u32, struct log, logs, ARGUS_CPUS, BPF_F_MMAPABLE);
/* Numbers of stacks that were sent, in sets of one line of a cache: of a hash map two or three are looked at, at places
 * that are in none. Which of a set goes when a ninth comes is left to its number. */
#define SEEN_WAYS 8
struct seen_set {
	u64 numbers[SEEN_WAYS];
};
BPF_ARRAY(seen, struct seen_set, ARGUS_SEEN / SEEN_WAYS);
struct counters {
	u64 values[ARGUS_SC_COUNT];
};
BPF_PERCPU_ARRAY(stack_counters, struct counters, 1);
BPF_F_TABLE("array", int, struct argus_board, board, 1, BPF_F_MMAPABLE);

BPF_RINGBUF_OUTPUT(stacks, ARGUS_STACK_PAGES);
BPF_RINGBUF_OUTPUT(codes, ARGUS_CODE_PAGES);
BPF_RINGBUF_OUTPUT(pauses, ARGUS_PAUSE_PAGES);

BPF_PROG_ARRAY(sample_programs, 3);
BPF_PROG_ARRAY(switch_programs, 3);

/* Hides a value's origin from the compiler, so that the verifier sees the bound that is checked next. Sizes are 64 bits
 * wide for the same reason: of narrower ones the compiler checks a copy. */
#define OPAQUE(x) asm volatile("" : "+r"(x))

/* Keeps two branches apart. clang 19 and later make one of two tests for null (`!a && !b` becomes `!(a | b)`), and the
 * verifier lets nobody compute with pointers ("pointer |= pointer prohibited"). */
#define APART() asm volatile("")

/* x % size, for a size that is a power of two, in a way that every verifier follows: where clang sees where x comes from,
 * it may mask the parts of an XOR instead, or leave the mask out, and Linux 6.1 knows no bounds of an XOR. */
INLINE u64 within(u64 x, u64 size)
{
	OPAQUE(x);
	return x & (size - 1);
}

INLINE void count(int which)
{
	int zero = 0;
	struct counters *counters = stack_counters.lookup(&zero);
	if (counters)
		__sync_fetch_and_add(&counters->values[which], 1);
}

INLINE struct seen_set *seen_set(u64 number)
{
	u32 which = (u32)number & (ARGUS_SEEN / SEEN_WAYS - 1);
	return seen.lookup(&which);
}

INLINE int was_seen(u64 number)
{
	struct seen_set *set = seen_set(number);
	u64 found = 0;
	for (int i = 0; set && i < SEEN_WAYS; i++)
		found |= set->numbers[i] == number;
	return found != 0;
}

INLINE void see(u64 number)
{
	struct seen_set *set = seen_set(number);
	if (!set)
		return;
	u32 way = number >> 32 & (SEEN_WAYS - 1), full = 1;
	for (int i = 0; i < SEEN_WAYS; i++) {
		if (!set->numbers[i]) {
			way = i;
			full = 0;
		}
	}
	if (full)
		count(ARGUS_SC_STACKS_FORGOTTEN);
	set->numbers[within(way, SEEN_WAYS)] = number;
}

INLINE u64 mix(u64 x)
{
	x *= 0x9E3779B97F4A7C15ull;
	return x ^ (x >> 29);
}

INLINE int read(void *to, u64 bytes, u64 from) { return bpf_probe_read_user(to, bytes, (void *)from); }

/* 1 where x is 0, else 0, without a branch: each branch inside the loop of the walk doubles what the verifier looks at. */
INLINE u64 is_zero(u64 x)
{
	OPAQUE(x);
	return (x - 1) >> 63 & ~x >> 63;
}

#define AT(type, buffer, offset, mask) (*(type *)((buffer) + ((offset) & (mask))))

INLINE int may_be_target(u32 tgid)
{
	int zero = 0;
	struct target_bits *bits = targets_known.lookup(&zero);
	return bits && bits->words[tgid / 64 & (TARGET_BITS / 64 - 1)] >> (tgid & 63) & 1;
}

INLINE u8 *known_thread(u32 tid)
{
	u32 number = tid / THREADS_A_PAGE;
	struct thread_page *page = threads_known.lookup(&number);
	return page ? &page->known[tid & (THREADS_A_PAGE - 1)] : 0;
}

INLINE struct thread *find_thread(u32 tid)
{
	u8 *known = known_thread(tid);
	return known && *known ? threads.lookup(&tid) : 0;
}

INLINE struct argus_board *the_board(void)
{
	int zero = 0;
	return board.lookup(&zero);
}

INLINE u64 period_ns(void)
{
	struct argus_board *b = the_board();
	return b ? b->period_ns : 0;
}

/* Forgets a thread of a process, and that it counts for that. */
INLINE void forget_thread(u32 tgid, u32 tid)
{
	struct target *target = stack_targets.lookup(&tgid);
	if (threads.delete(&tid) != 0 || !target)
		return;
	if (target->threads)
		__sync_fetch_and_add(&target->threads, -1);
}

INLINE struct thread *thread_of(struct target *target, u32 tgid, u32 tid)
{
	struct thread *thread = threads.lookup(&tid);
	if (thread && thread->pid == tgid)
		return thread;
	if (thread)
		forget_thread(thread->pid, tid);
	int zero = 0;
	struct thread *blank = blank_threads.lookup(&zero);
	if (!blank)
		return 0;
	u8 *known = known_thread(tid);
	if (target->threads >= ARGUS_THREADS_EACH) {
		__sync_fetch_and_add(&target->refused, 1);
		count(ARGUS_SC_THREADS_OVER_SHARE);
		return 0;
	}
	if (!known || threads.update(&tid, blank) != 0) {
		count(ARGUS_SC_THREADS_FULL);
		return 0;
	}
	__sync_fetch_and_add(&target->threads, 1);
	*known = 1;
	thread = threads.lookup(&tid);
	if (thread)
		thread->pid = tgid;
	return thread;
}

/* ---- finding the thread state */

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
			thread->unreadable = 1; /* it runs in another namespace than was told */
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
	u64 *told = thread_states.lookup(&tid);
	state = told ? *told : 0;
	u64 distrusted = state && state == thread->distrusted;
	thread->distrusted = 0;
	if (distrusted || !(state && read_state(s, py, state) == 0 && is_state_of(s, py, thread->ns_tid))) {
		if (!distrusted && now < thread->search_ns)
			return 0;
		u64 searched = search_state(s, py, thread);
		/* A list too long to be searched says nothing against what was told. */
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

/* ---- the walk */

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
 * A frame is believed only if its code object has the type of code objects, its instruction lies inside it, and the chain
 * ends in an entry frame (from 3.11 on): a thread is sampled at any instruction, so a frame may be half built. */
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
			/* In 3.11 such a leaf does not tell yet whether C code called it: left out, its caller is the leaf. */
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

/* Whether the thread holds the GIL, and collects garbage. */
INLINE u32 interpreter_flags(struct argus_python *py, u64 state)
{
	u64 gil[2] = {};
	u32 collecting = 0;
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
	if (gil[0] != state || !(u32)gil[1])
		return 0;
	if (py->gc_collecting && read(&collecting, 4, py->gc_collecting) == 0 && collecting)
		return ARGUS_WHAT_GIL | ARGUS_WHAT_GC;
	return ARGUS_WHAT_GIL;
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
	s->space = (u64)target->generation << 32 | tgid;
	s->hash = mix(s->space + 1);
	*(volatile u32 *)&s->result = WALK_NO_PYTHON;
	struct argus_python *py = pythons.lookup(&tgid);
	if (!py || !thread)
		return;
	*(volatile u32 *)&s->result = WALK_NO_STATE;
	u64 state = thread_state(s, py, thread, tid, now);
	if (state) {
		s->walked = state;
		s->what |= interpreter_flags(py, state);
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

#define LARGEST_FRAME (1ull << 26)

/* Reads where the thread is in user space, and the chain of frame pointers. Returns the bytes.
 *
 * Most code keeps something else in that register. The kernel's helper took 2 to 3.5 us more for such a thread, and what it
 * reads on the way makes stacks different that are the same: whatever cannot be a frame is not followed. */
INLINE long native_stack(void *ctx, u64 *native)
{
#if defined(ARGUS_TASK_PID) && !defined(__aarch64__) && !defined(__TARGET_ARCH_arm64)
	/* bp to sp (arch/x86/include/asm/ptrace.h) */
	u64 words[16] = {}, frame[2] = {};
	if (bpf_probe_read_kernel(words, sizeof(words), (void *)argus_task_regs(argus_current_task()) + 32) == 0) {
		u64 bp = words[0], ip = words[12], sp = words[15];
		u64 near = bp - sp < LARGEST_FRAME && !(bp & 7);
		/* A thread that is ending has no memory, and then no stack. */
		if (read(frame, sizeof(frame), near ? bp : sp) == 0 && (!near || frame[1] - 4096 >= 1ull << 47)) {
			native[0] = ip;
			return 8;
		}
	}
#endif
	return argus_get_stack(ctx, native, ARGUS_NATIVE_FRAMES * 8, USER_STACK);
}

/* Ends taking the stack. If it is new, s->fresh is set: it is to be sent (send_stack). Returns its number, never 0. */
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

/* ---- counting */

/* Counts in this CPU's log. Programs that count do not interrupt each other there: the timer and sched_switch have
 * interrupts off. now: of the program; first, last: of what is counted. */
INLINE void tally(u64 now, u64 stack, u64 id, u32 what, u64 first, u64 last, u64 ns, u64 max_ns, u64 runqueue_ns)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct log *log = logs.lookup(&cpu);
	if (!log)
		return;
	u64 thread = id >> 32 | id << 32; /* as they lie in the key */
	u64 when = (last >> ARGUS_WINDOW_BITS) << 32 | what;
	u64 written = log->head.written, window = now >> ARGUS_WINDOW_BITS;
	if (log->head.window != window) {
		/* In this order: user space believes the beginning of the window that it has read. */
		*(volatile u64 *)&log->head.window_begin = written;
		*(volatile u64 *)&log->head.window = window;
	}
	u64 begin = log->head.window_begin, taken = *(volatile u64 *)&log->head.taken;
	if (begin < taken)
		begin = taken;
	u32 *newest = &log->newest[within(mix(mix(stack ^ thread) ^ when) >> 32, ARGUS_ROWS)];
	u32 age = (u32)written - *newest;
	struct argus_row *row = &log->rows[*newest & (ARGUS_ROWS - 1)];
	if (age && age <= written - begin && row->key.stack == stack && *(u64 *)&row->key.pid == thread &&
	    *(u64 *)&row->key.what == when) {
		row->count.count++;
		row->count.ns += ns;
		row->count.runqueue_ns += runqueue_ns;
		if (max_ns > row->count.max_ns)
			row->count.max_ns = max_ns;
		row->count.last_ns = last;
		return;
	}
	if (written - taken >= ARGUS_ROWS) {
		count(ARGUS_SC_SAMPLES_DROPPED);
		return;
	}
	row = &log->rows[written & (ARGUS_ROWS - 1)];
	row->key.stack = stack;
	*(u64 *)&row->key.pid = thread;
	*(u64 *)&row->key.what = when;
	row->count.count = 1;
	row->count.ns = ns;
	row->count.runqueue_ns = runqueue_ns;
	row->count.max_ns = max_ns;
	row->count.first_ns = first;
	row->count.last_ns = last;
	*newest = (u32)written;
	*(volatile u64 *)&log->head.written = written + 1;
}

INLINE void end_pause(struct thread *thread, u32 tid, u64 after)
{
	struct argus_pause pause = {};
	pause.begin_ns = thread->gc_begin_ns;
	pause.end_ns = thread->gc_end_ns;
	pause.before_ns = thread->gc_before_ns;
	pause.after_ns = after;
	pause.stack = thread->gc_stack;
	pause.period_ns = period_ns();
	pause.pid = thread->pid;
	pause.tid = tid;
	thread->gc_begin_ns = 0;
	if (pauses.ringbuf_output(&pause, sizeof(pause), NO_WAKEUP) != 0)
		count(ARGUS_SC_PAUSES_DROPPED);
}

INLINE void follow_pause(struct thread *thread, u32 tid, u32 what, u64 stack, u64 now)
{
	if (what & ARGUS_WHAT_GC) {
		if (!thread->gc_begin_ns) {
			thread->gc_begin_ns = now;
			thread->gc_before_ns = thread->sample_ns;
			thread->gc_stack = stack;
		} else if (!thread->gc_stack) {
			thread->gc_stack = stack;
		}
		thread->gc_end_ns = now;
	} else if (thread->gc_begin_ns) {
		end_pause(thread, tid, now);
	}
	thread->sample_ns = now;
}

/* How the current thread entered the kernel. */
struct entry {
	u32 call;          /* system call, or ARGUS_NO_SYSCALL: an interrupt or a fault */
	u64 argument;      /* its first */
	u64 ip, sp;
};

INLINE void read_entry(struct entry *entry)
{
	entry->call = ARGUS_NO_SYSCALL;
#ifdef ARGUS_TASK_PID
	void *regs = argus_task_regs(argus_current_task());
#if defined(__aarch64__) || defined(__TARGET_ARCH_arm64)
	/* struct pt_regs: sp, pc, pstate, orig_x0, syscallno (arch/arm64/include/asm/ptrace.h). */
	u64 words[5] = {};
	if (bpf_probe_read_kernel(words, sizeof(words), regs + 248) != 0)
		return;
	s64 number = (s32)words[4];
	entry->argument = words[3];
	entry->ip = words[1];
	entry->sp = words[0];
#else
	/* di, orig_ax, ip, cs, flags, sp */
	u64 words[6] = {};
	if (bpf_probe_read_kernel(words, sizeof(words), regs + 112) != 0)
		return;
	s64 number = (s64)words[1];
	if (number > 0)
		number &= ~0x40000000ll; /* x32 */
	entry->argument = words[0];
	entry->ip = words[2];
	entry->sp = words[5];
#endif
	if (number >= 0 && number < ARGUS_NO_SYSCALL)
		entry->call = number;
#endif
}

#if defined(__aarch64__) || defined(__TARGET_ARCH_arm64)
#define IN_KERNEL(ctx) ((ctx)->pstate & 0xf)
#define SYS_FUTEX 98
#else
#define IN_KERNEL(ctx) (((ctx)->cs & 3) == 0)
#define SYS_FUTEX 202
#endif
#define SYS_FUTEX_WAIT 455

/* ---- programs */

int on_sample(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32, tid = (u32)id;
	if (!tid || !may_be_target(tgid))
		return 0;
	struct target *target = stack_targets.lookup(&tgid);
	if (!target)
		return 0;
	int zero = 0;
	struct argus_board *b = the_board();
	struct scratch *s = scratches.lookup(&zero);
	if (!s || !b || b->ended)
		return 0;
	count(ARGUS_SC_SAMPLES);
	u64 now = bpf_ktime_get_ns();
	struct thread *thread = thread_of(target, tgid, tid);
	if (thread && thread->off_ns)
		thread->on_ns = now;
	s->what = ARGUS_NO_SYSCALL;
	s->flags = 0;
	if (IN_KERNEL(ctx)) {
		struct entry entry = {};
		read_entry(&entry);
		s->flags = ARGUS_STACK_KERNEL;
		s->what = ARGUS_WHAT_KERNEL | entry.call;
	}
	begin_stack(s, target, thread, id, now);
	if (s->walking)
		sample_programs.call(ctx, WALK);
	sample_programs.call(ctx, FINISH);
	count(ARGUS_SC_SAMPLES_DROPPED); /* one comes back only if it failed */
	return 0;
}

int walk_sampled(struct pt_regs *ctx)
{
	if (walk_on() == WALK)
		sample_programs.call(ctx, WALK);
	sample_programs.call(ctx, FINISH);
	count(ARGUS_SC_SAMPLES_DROPPED);
	return 0;
}

int finish_sampled(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tid = (u32)id;
	int zero = 0;
	struct scratch *s = scratches.lookup(&zero);
	if (!s)
		return 0;
	struct thread *thread = threads.lookup(&tid);
	u64 stack = finish_stack(ctx, s, thread, id);
	if (thread)
		follow_pause(thread, tid, s->what, stack, s->now);
	tally(s->now, stack, id, s->what, s->now, s->now, period_ns(), 0, 0);
	if (s->fresh) {
		sample_programs.call(ctx, SEND);
		count(ARGUS_SC_STACKS_DROPPED);
	}
	return 0;
}

int send_sampled(struct pt_regs *ctx)
{
	if (send_stack()) {
		sample_programs.call(ctx, SEND);
		count(ARGUS_SC_STACKS_DROPPED);
	}
	return 0;
}

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
	target->generation = (u32)mix(now ^ tgid);
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

#ifdef ARGUS_TASK_PID

/* Which of the thread's long_sites this is, as one in its four bits of trust; 0: none. */
INLINE u32 long_site(struct thread *thread, u64 site)
{
	u32 found = 0;
	for (int i = 0; i < LONG_SITES; i++)
		found |= (u32)is_zero(thread->long_sites[i].site ^ site) << 4 * i;
	return found;
}

/* Remembers the places where a thread was off for the most time: whatever has an eighth of it is among them (Metwally,
 * Agrawal, El Abbadi 2005, "Space-Saving"). A new one takes the place, and the time, of the least. */
INLINE void was_long(struct thread *thread, u64 site, u64 ns)
{
	u64 place = 0, least = ~0ull >> 1, found = 0;
	for (u64 i = 0; i < LONG_SITES; i++) {
		u64 same = is_zero(thread->long_sites[i].site ^ site);
		u64 value = thread->long_sites[i].ns & (same - 1); /* the same site is less than all others */
		u64 better = (value - least) >> 63 | same;
		better &= ~found & 1;
		place ^= (place ^ i) & -better;
		least ^= (least ^ value) & -better;
		found |= same;
	}
	place = within(place, LONG_SITES);
	struct site *one = &thread->long_sites[place];
	one->site = site;
	one->ns += ns < FORGET_NS ? ns : FORGET_NS;
	u32 at = 4 * place;
	u64 trust = (thread->trust >> at & 15) + 1 + (ns >> TRUST_SHIFT);
	thread->trust = (thread->trust & ~(15u << at)) | (u32)(trust < 15 ? trust : 15) << at;
	if (one->ns < FORGET_NS)
		return;
	for (int i = 0; i < LONG_SITES; i++)
		thread->long_sites[i].ns >>= 1;
}

/* when: it came back; now: it is told. */
INLINE void come_back(struct thread *thread, u32 tid, u64 when, u64 now)
{
	u64 since = thread->off_ns;
	u64 ns = when - since;
	thread->off_ns = 0;
	if (thread->gc_begin_ns && (thread->off_what & ARGUS_WHAT_GC))
		thread->gc_end_ns = when;
	if (thread->sample_ns == since)
		thread->sample_ns = when; /* what was seen when it went is as it was */
	if (ns < ARGUS_OFF_CPU_NS) {
		if (thread->off_stack) {
			thread->short_site = thread->off_site;
			thread->short_ns = when;
		}
		u32 wasted = thread->off_stack ? long_site(thread, thread->off_site) : 0;
		if (thread->trust & wasted * 15)
			thread->trust -= wasted;
		return;
	}
	u64 runqueue_ns = 0;
	if (thread->off_what & ARGUS_WHAT_PREEMPTED)
		runqueue_ns = ns;
	else if (thread->wake_ns > since && thread->wake_ns < when)
		runqueue_ns = when - thread->wake_ns;
	count(ARGUS_SC_OFF_CPU);
	if (thread->off_stack)
		thread->walk_ns -= ARGUS_WALK_NS / 2; /* not wasted */
	else
		count(ARGUS_SC_OFF_CPU_NO_STACK);
	was_long(thread, thread->off_site, ns);
	tally(now, thread->off_stack, (u64)thread->pid << 32 | tid, thread->off_what, since, when, ns, ns, runqueue_ns);
}

/* Returns whether a stack is to be taken: the first program that does has been run. */
INLINE u32 go_off(struct bpf_raw_tracepoint_args *ctx, struct target *target, u64 id, u64 now)
{
	u32 tgid = id >> 32, tid = (u32)id;
	u32 state = 0;
#if ARGUS_PREV_STATE
	state = (u32)ctx->args[3];
#else
	bpf_probe_read_kernel(&state, sizeof(state), (void *)(ctx->args[1] + ARGUS_TASK_STATE));
#endif
	u32 preempted = (ctx->args[0] & 1) || !state;
	if (!preempted && (state & TASK_DEAD)) {
		u8 *known = known_thread(tid);
		if (known)
			*known = 0;
		forget_thread(tgid, tid);
		return 0;
	}
	struct thread *thread = thread_of(target, tgid, tid);
	if (!thread)
		return 0;
	int zero = 0;
	struct scratch *s = scratches.lookup(&zero);
	if (!s)
		return 0;
	u64 ran_ns = 0;
	bpf_probe_read_kernel(&ran_ns, sizeof(ran_ns), (void *)(ctx->args[1] + ARGUS_TASK_RAN));
	if (thread->off_ns) {
		/* Nothing told that it was switched in. Linux 6.18 was seen to leave out some events in 1,000 of a busy machine;
		 * its own trace lacks them, too. Since it went off it has run for the difference. */
		u64 ran = ran_ns - thread->ran_ns, longest = now - thread->off_ns;
		if (longest >= ARGUS_OFF_CPU_NS + ran)
			count(ARGUS_SC_OFF_CPU_GUESSED);
		come_back(thread, tid, now - (ran < longest ? ran : longest), now);
	}
	struct argus_board *b = the_board();
	if (!b || b->resting)
		return 0;
	thread->ran_ns = ran_ns;
	struct entry entry = {};
	read_entry(&entry);
	u64 site = preempted ? 1 : mix(entry.ip ^ mix(entry.sp ^ entry.call));
	s->what = ARGUS_WHAT_OFF | entry.call;
	s->flags = entry.call != ARGUS_NO_SYSCALL || !preempted ? ARGUS_STACK_KERNEL : 0;
	if (preempted) {
		s->what |= ARGUS_WHAT_PREEMPTED;
	} else {
		if (state & TASK_UNINTERRUPTIBLE)
			s->what |= ARGUS_WHAT_UNINTERRUPTIBLE;
		if (entry.call == SYS_FUTEX || entry.call == SYS_FUTEX_WAIT) {
			struct argus_python *py = pythons.lookup(&tgid);
			if (py && entry.argument >= py->runtime && entry.argument < py->runtime_end)
				s->what |= ARGUS_WHAT_GIL_WAIT;
		}
	}
	thread->off_stack = 0;
	/* Whether it will be off for long is not known yet, and a thread may go off 20,000 times a second. A place where it
	 * was short is passed over for a while; and all wasted stacks together are limited (GCRA, a burst of four). Places
	 * where it has been off for long before are not passed over, and may waste one more in a row. Each time that it was
	 * off for long buys the place a stack or more that are always taken: one, and one for each 8 ms that it took. */
	u64 due = thread->walk_ns, long_before = long_site(thread, site);
	u64 passed_over = site == thread->short_site && now < thread->short_ns + ARGUS_WALK_NS && !long_before;
	/* Collecting garbage may begin and end between two samples, with others on the CPU meanwhile. */
	u32 flags = 0;
	if (preempted && thread->state) {
		struct argus_python *py = pythons.lookup(&tgid);
		if (py)
			flags = interpreter_flags(py, thread->state);
	}
	u64 begins = (flags & ARGUS_WHAT_GC) && !thread->gc_begin_ns;
	u64 taken = begins || (long_before * 15 & thread->trust) ||
		    (!passed_over && due < now + (long_before ? 4 : 3) * (ARGUS_WALK_NS / 2));
	thread->off_site = site;
	thread->off_ns = now;
	if (taken) {
		thread->off_what = s->what;
		thread->walk_ns = (due > now ? due : now) + ARGUS_WALK_NS / 2;
		count(ARGUS_SC_OFF_STACKS);
		begin_stack(s, target, thread, id, now);
		return 1;
	}
	s->what |= flags;
	if (preempted)
		follow_pause(thread, tid, s->what, 0, now);
	thread->off_what = s->what;
	return 0;
}

int on_switch(struct bpf_raw_tracepoint_args *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32, tid = 0;
	bpf_probe_read_kernel(&tid, sizeof(tid), (void *)(ctx->args[2] + ARGUS_TASK_PID));
	struct thread *thread = find_thread(tid); /* the idle one, 0, is never known */
	struct target *target = (u32)id && may_be_target(tgid) ? stack_targets.lookup(&tgid) : 0;
	if (!thread) {
		APART();
		if (!target)
			return 0;
	}
	struct argus_board *b = the_board();
	if (!b || b->ended)
		return 0;
	u64 now = bpf_ktime_get_ns();
	if (thread && thread->off_ns)
		come_back(thread, tid, now, now);
	if (target && go_off(ctx, target, id, now)) {
		int zero = 0;
		struct scratch *s = scratches.lookup(&zero);
		if (s && s->walking)
			switch_programs.call(ctx, WALK);
		switch_programs.call(ctx, FINISH);
	}
	return 0;
}

int walk_switched(struct bpf_raw_tracepoint_args *ctx)
{
	if (walk_on() == WALK)
		switch_programs.call(ctx, WALK);
	switch_programs.call(ctx, FINISH);
	return 0;
}

int finish_switched(struct bpf_raw_tracepoint_args *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tid = (u32)id;
	int zero = 0;
	struct scratch *s = scratches.lookup(&zero);
	struct thread *thread = threads.lookup(&tid);
	if (!s || !thread)
		return 0;
	thread->off_stack = finish_stack(ctx, s, thread, id);
	thread->off_what = s->what;
	follow_pause(thread, tid, s->what, thread->off_stack, s->now);
	if (s->fresh) {
		switch_programs.call(ctx, SEND);
		count(ARGUS_SC_STACKS_DROPPED); /* one comes back only if it failed */
	}
	return 0;
}

int send_switched(struct bpf_raw_tracepoint_args *ctx)
{
	if (send_stack()) {
		switch_programs.call(ctx, SEND);
		count(ARGUS_SC_STACKS_DROPPED);
	}
	return 0;
}

int on_wakeup(struct bpf_raw_tracepoint_args *ctx)
{
	u32 tid = 0;
	bpf_probe_read_kernel(&tid, sizeof(tid), (void *)(ctx->args[0] + ARGUS_TASK_PID));
	struct thread *thread = find_thread(tid);
	if (thread)
		thread->wake_ns = bpf_ktime_get_ns();
	return 0;
}

#endif
