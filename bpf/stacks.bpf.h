/* Where the threads of traced processes spend their time: samples on the CPU, intervals off it, each with the Python and
 * the native stack. A stack is numbered by a hash and sent once; what recurs is only counted.
 *
 * Compiled with these definitions (argus/capture/sampler.py):
 *   ARGUS_STACK_PAGES, ARGUS_CODE_PAGES, ARGUS_PAUSE_PAGES  sizes of the rings, in bcc's pages
 *   ARGUS_CPUS, ARGUS_ROWS  how many logs, and rows of each, a power of two
 *   ARGUS_THREADS_EACH  threads of one process that are followed
 *   ARGUS_THREAD_OWNERS  owners whose threads are counted
 *   ARGUS_STACK_NS, ARGUS_STACKS_NS  time for each new stack of an owner, and how much of it may be owed
 *   ARGUS_THREADS, ARGUS_SEEN, ARGUS_CODES, ARGUS_BLOCKS, ARGUS_LEAVES  entries of the maps
 *   ARGUS_THREAD_PAGES  pages of threads_known: enough for every thread number there can be
 *   ARGUS_TASK_PID, ARGUS_TASK_STATE, ARGUS_TASK_RAN  offsets in struct task_struct; absent where the kernel has no BTF
 *   ARGUS_PREV_STATE  1: sched_switch has the state that a thread goes off in (Linux 5.18)
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

/* What is known of one thread of a traced process. User space reads it (argus/capture/sampler.py, _THREAD). */
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

#define GIVEN_AWAY_NS 100000000ull /* a thread that collects may be without the GIL for so long */
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
	u32 owner;         /* as in its process's struct target, when it was first met */
	u32 unused;
	u64 distrusted;    /* thread state under which frames were found that are none: it may be gone */
	struct site long_sites[LONG_SITES]; /* where it was off for the most time (come_back) */
};

struct target {
	u64 refused;       /* samples and switches of threads beyond its share */
	u32 threads;       /* in the map "threads" */
	u32 owner;         /* its user in its container: map "owner_threads" */
	u64 space;         /* part of every stack's number: another for each process that gets this PID, and each program it runs.
	                    * Drawn by chance: who knew it could make a stack whose number is that of another process's */
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
	u32 owner;         /* of the process */
	u32 unused;
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
/* How many of these each owner has; 0: all have together. User space counts them again when it forgets a process. */
BPF_ARRAY(owner_threads, u32, ARGUS_THREAD_OWNERS);
BPF_ARRAY(thread_owners, u32, 1); /* how many there are */
/* What the threads of each owner had these programs do. Of owner 0 it is what those of all did whose owner is not known. */
struct owner_use {
	u64 sampled_ns;    /* time that they ran for, at samples */
	u64 switched_ns;   /* and at switches */
	u64 stacks_due;    /* when the new stacks that were sent are paid off */
	u64 refused;       /* new stacks beyond its share */
	u64 rows_refused;  /* rows of logs beyond its share */
};
BPF_ARRAY(owner_uses, struct owner_use, ARGUS_THREAD_OWNERS);
/* Owners whose threads are not followed off the CPU; user space sets it. */
BPF_ARRAY(owners_resting, u32, ARGUS_THREAD_OWNERS);
/* Thread -> address of its thread state, as user space found it. Verified at every use. */
BPF_HASH(thread_states, u32, u64, ARGUS_THREADS);
BPF_TABLE("lru_hash", u64, u8, codes_seen, ARGUS_CODES);
/* Where the function begins that a block lies in. User space passes it for functions that samples met. */
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
/* What each owner has begun in each log. It fills one window of a log after the other: a window is over when all rows that
 * were there as it began have been read. */
struct log_share {
	u64 began;         /* rows that had been begun then */
	u64 rows;          /* its own since then */
};
BPF_ARRAY(log_shares, struct log_share, ARGUS_CPUS * ARGUS_THREAD_OWNERS);
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

INLINE void spent_at_switch(u32 owner, u64 since)
{
	struct owner_use *use = owner_uses.lookup(&owner);
	if (use)
		__sync_fetch_and_add(&use->switched_ns, bpf_ktime_get_ns() - since);
}

INLINE void spent_at_sample(u32 owner, u64 since)
{
	struct owner_use *use = owner_uses.lookup(&owner);
	if (use)
		__sync_fetch_and_add(&use->sampled_ns, bpf_ktime_get_ns() - since);
}

/* While several owners are followed, each may have so many stacks that are new in a second (GCRA), whatever its threads do:
 * each is a row of its own, room in a ring, and time of user space. Others have no stack: they are rows of their thread. */
INLINE int has_stack_share(u32 owner, u64 now)
{
	u32 zero = 0, *owners = thread_owners.lookup(&zero);
	struct owner_use *use = owner_uses.lookup(&owner);
	if (!owners || *owners < 2 || !use)
		return 1;
	u64 due = use->stacks_due;
	if (due > now + ARGUS_STACKS_NS) {
		__sync_fetch_and_add(&use->refused, 1);
		return 0;
	}
	use->stacks_due = (due > now ? due : now) + ARGUS_STACK_NS;
	return 1;
}

INLINE int is_resting(u32 owner)
{
	u32 *resting = owners_resting.lookup(&owner);
	return resting && *resting;
}

INLINE void count_thread(u32 owner, int change)
{
	u32 *number = owner_threads.lookup(&owner);
	if (number && (change > 0 || *number))
		__sync_fetch_and_add(number, change);
}

/* Forgets a thread of a process, and that it counts for that and its owner. */
INLINE void forget_thread(u32 tgid, u32 tid)
{
	struct thread *thread = threads.lookup(&tid);
	u32 owner = thread ? thread->owner : 0;
	struct target *target = stack_targets.lookup(&tgid);
	if (threads.delete(&tid) != 0)
		return;
	count_thread(0, -1);
	if (owner)
		count_thread(owner, -1);
	if (target && target->threads)
		__sync_fetch_and_add(&target->threads, -1);
}

/* What a place of owner_threads has. Counts may be off by those who come and go while user space counts: not below 0. */
INLINE u32 threads_at(u32 place)
{
	u32 *number = owner_threads.lookup(&place);
	return number && (int)*number > 0 ? *number : 0;
}

/* One more thread of a process may be followed. While several owners are, each has as many as stay free at most: one fills
 * half of the room, of k each one in k + 1 parts, and one remains free (as in rings: within_share). An eighth is kept for
 * owners who come later. */
INLINE int has_thread_share(struct target *target)
{
	if (target->threads >= ARGUS_THREADS_EACH)
		return 0;
	u32 zero = 0, taken = threads_at(0);
	u32 *owners = thread_owners.lookup(&zero);
	if (!target->owner || !owners || *owners < 2)
		return taken < ARGUS_THREADS - ARGUS_THREADS / 8;
	return (u64)threads_at(target->owner) + taken < ARGUS_THREADS;
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
	if (!has_thread_share(target)) {
		__sync_fetch_and_add(&target->refused, 1);
		count(ARGUS_SC_THREADS_OVER_SHARE);
		return 0;
	}
	if (!known || threads.update(&tid, blank) != 0) {
		count(ARGUS_SC_THREADS_FULL);
		return 0;
	}
	__sync_fetch_and_add(&target->threads, 1);
	count_thread(0, 1);
	if (target->owner)
		count_thread(target->owner, 1);
	*known = 1;
	thread = threads.lookup(&tid);
	if (thread) {
		thread->pid = tgid;
		thread->owner = target->owner;
	}
	return thread;
}
