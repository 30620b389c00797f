/* What every probe shares: registers, counters, which processes are traced, calls that have not returned yet.
 * Concatenated in front of the programs (bcc rewrites map operations in the main file only). */
#include <uapi/linux/ptrace.h>
#include "argus.h"

#define INLINE static inline __attribute__((always_inline))

/* Helper 174 of the stable BPF interface (Linux 5.15), which older bcc does not declare. */
static u64 (*argus_cookie)(void *ctx) = (void *)174;

/* Wakes nobody: user space polls, which costs it less than a wake-up for each event. */
#define NO_WAKEUP 1

struct pending {
	u64 sp;      /* stack pointer at entry */
	u64 ret;     /* return address at entry */
	u64 ip;      /* address of the function */
	u64 cookie;
	union {
		struct argus_launch launch;
		struct argus_collective collective;
	};
};

/* Of each map that processes fill, one may have so many entries: no process takes the room of the others. */
#define EACH(entries) ((entries) / ARGUS_SHARES)
/* For so many at once a process asks its owner's share. Most have few threads in calls, and ask once: counting each call
 * for its owner would have all CPUs write to the same memory. */
#define GRANT(entries) ((entries) / 8192)

#define CALLS_ENTRIES 65536
#define CONTROL_ENTRIES 8192
#define MATH_ENTRIES 8192
#define SEQUENCES_ENTRIES 65536
/* Thread and family of calls -> the call it is in. */
BPF_HASH(inflight, u64, struct pending, CALLS_ENTRIES);
/* Size of the code of each probed file, by the slot in the cookie. */
BPF_ARRAY(text_bytes, u64, ARGUS_FILES);
/* How far the code that may call a function from inside its own family reaches before (low half) and behind it, bytes, by
 * the cookie's slot and call. */
BPF_ARRAY(family_reach, u64, ARGUS_FILES * 256);
/* By the cookie's slot and call: bytes that the stack pointer is below the entry's where an entry probe is, since it stands
 * on a later instruction (argus/capture/process/instructions.py). */
BPF_ARRAY(below, u64, ARGUS_FILES * 256);
/* What a call costs its thread in traps, ns, by the cookie's slot and call: each file has prices of its own. Those in the last
 * slot have the least of theirs here, and each owner's in "shared_prices". */
BPF_ARRAY(trap_prices, u64, ARGUS_FILES * 256);
#define GROUPS_ENTRIES 16384
/* Thread -> its process (upper half), and how many groups of NCCL it is in. */
BPF_HASH(group_depth, u32, u64, GROUPS_ENTRIES);
/* Processes being traced, by thread group. */
BPF_HASH(targets, u32, struct argus_target, 16384);
BPF_HASH(torch_layouts, u32, struct argus_torches, 16384);
/* Hits by processes that are not traced (yet): thread group -> hits. A followed child's count shows what came too early. */
BPF_TABLE("lru_hash", u32, u64, strangers, 4096);
/* Of how many owners, and of how many users, processes are traced. Of one, nothing is shared. */
BPF_ARRAY(owners_traced, u32, 2);
BPF_ARRAY(owners, struct argus_owner, ARGUS_OWNERS);
BPF_ARRAY(rooms, struct argus_room, ARGUS_OWNERS + 1);
BPF_ARRAY(shared_prices, struct argus_prices, ARGUS_OWNERS);
BPF_PERCPU_ARRAY(counters, u64, ARGUS_C_COUNT);
BPF_PERCPU_ARRAY(hits_of, struct argus_hits, 1);

BPF_RINGBUF_OUTPUT(launches, ARGUS_LAUNCH_PAGES);
BPF_RINGBUF_OUTPUT(collectives, ARGUS_COLLECTIVE_PAGES);
BPF_RINGBUF_OUTPUT(control, ARGUS_CONTROL_PAGES);
BPF_RINGBUF_OUTPUT(marks, ARGUS_MARK_PAGES);
BPF_RINGBUF_OUTPUT(math, ARGUS_MATH_PAGES);

#if defined(__aarch64__) || defined(__TARGET_ARCH_arm64)
#define REGISTER_ARGS 8
#define SP(ctx) ((ctx)->sp)
#define RESULT(ctx) ((ctx)->regs[0])
#define FIRST_STACK_ARG(sp) (sp)
#define IP(ctx) ((ctx)->pc)
#define CALLER(ctx, sp, flags) ((ctx)->regs[30])
#define RETURNED_FROM(ctx, p) (SP(ctx) == (p)->sp)
#else
#define REGISTER_ARGS 6
#define SP(ctx) ((ctx)->sp)
#define RESULT(ctx) ((ctx)->ax)
#define FIRST_STACK_ARG(sp) ((sp) + 8)
#define IP(ctx) ((ctx)->ip)
#define CALLER(ctx, sp, flags) read_u64(sp, flags)
#define RETURNED_FROM(ctx, p) (SP(ctx) == (p)->sp + 8)
#endif

INLINE void count(int which)
{
	u64 *value = counters.lookup(&which);
	if (value)
		__sync_fetch_and_add(value, 1); /* uprobe programs may be preempted */
}

/* A loss, which concerns the jobs of the process's owner. */
INLINE void lose(struct argus_target *target, u32 which)
{
	count(which);
	u32 number = target->owner;
	struct argus_owner *owner = owners.lookup(&number);
	if (owner)
		__sync_fetch_and_add(&owner->lost[which], 1);
}

/* A hit in a traced process. Function by function, since each has a price of its own (argus/capture/prices.py). */
INLINE void count_hit(u64 cookie, u32 at_exit)
{
	int zero = 0;
	struct argus_hits *all = hits_of.lookup(&zero);
	if (all)
		__sync_fetch_and_add(&all->of[(at_exit & 1) << 8 | ARGUS_CALL(cookie)], 1);
}

INLINE u64 price_of(struct argus_target *target, u64 cookie)
{
	int at = ARGUS_FILE(cookie) << 8 | ARGUS_CALL(cookie);
	u32 number = target->owner;
	u64 *price = trap_prices.lookup(&at);
	if (ARGUS_FILE(cookie) == ARGUS_FILES - 1) {
		struct argus_prices *own = shared_prices.lookup(&number);
		if (own && own->of[ARGUS_CALL(cookie)])
			return own->of[ARGUS_CALL(cookie)];
	}
	return price ? *price : 0;
}

/* The same of one that counts among the process's hits. The price is that of the whole call, with its exit. */
INLINE void count_own_hit(struct argus_target *target, u64 cookie, u32 at_exit)
{
	count_hit(cookie, at_exit);
	if (!at_exit)
		__sync_fetch_and_add(&target->trap_ns, price_of(target, cookie));
}

/* Where the objects of the calling process's PyTorch keep things. 0: it is not known yet, which is counted. */
INLINE struct argus_torch *torch_layout(struct argus_target *target, u32 tgid, u64 cookie)
{
	u32 file = ARGUS_FILE(cookie) + 1;
	struct argus_torches *own = torch_layouts.lookup(&tgid);
	if (own) {
		if (own->of[0].file == file)
			return &own->of[0];
		if (own->of[1].file == file)
			return &own->of[1];
	}
	lose(target, ARGUS_C_LAYOUT_UNKNOWN);
	return 0;
}

/* The stack pointer as it was at the function's first instruction. */
INLINE u64 entry_sp(struct pt_regs *ctx, u64 cookie)
{
	u64 sp = SP(ctx);
	if (ARGUS_IS_MOVED(cookie)) {
		int at = ARGUS_FILE(cookie) << 8 | ARGUS_CALL(cookie);
		u64 *bytes = below.lookup(&at);
		if (bytes)
			sp += *bytes;
	}
	return sp;
}

INLINE u64 read_u64(u64 address, u8 *flags)
{
	u64 value = 0;
	if (bpf_probe_read_user(&value, sizeof(value), (void *)address) != 0) {
		*flags |= ARGUS_F_READ_FAULT;
		return 0;
	}
	return value;
}

INLINE u32 read_u32(u64 address, u8 *flags)
{
	u32 value = 0;
	if (bpf_probe_read_user(&value, sizeof(value), (void *)address) != 0) {
		*flags |= ARGUS_F_READ_FAULT;
		return 0;
	}
	return value;
}

/* Integer argument n of the function entered: System V x86_64 or AAPCS64. 15: there is none. sp: at entry. */
INLINE u64 arg(struct pt_regs *ctx, u64 sp, u32 n, u8 *flags)
{
#if REGISTER_ARGS == 8
	if (n == 0) return ctx->regs[0];
	if (n == 1) return ctx->regs[1];
	if (n == 2) return ctx->regs[2];
	if (n == 3) return ctx->regs[3];
	if (n == 4) return ctx->regs[4];
	if (n == 5) return ctx->regs[5];
	if (n == 6) return ctx->regs[6];
	if (n == 7) return ctx->regs[7];
#else
	if (n == 0) return ctx->di;
	if (n == 1) return ctx->si;
	if (n == 2) return ctx->dx;
	if (n == 3) return ctx->cx;
	if (n == 4) return ctx->r8;
	if (n == 5) return ctx->r9;
#endif
	if (n == 15)
		return 0;
	return read_u64(FIRST_STACK_ARG(sp) + 8 * (u64)(n - REGISTER_ARGS), flags);
}

INLINE struct argus_target *find_target(u64 id)
{
	u32 tgid = id >> 32;
	return targets.lookup(&tgid);
}

/* Counts a hit of a process that may be traced. Returns whether it is recorded. */
INLINE int is_recorded(struct argus_target *target, int hits)
{
	if (target) {
		__sync_fetch_and_add(&target->hits, hits);
		if (!target->ignored)
			return 1;
	}
	count(ARGUS_C_HITS_IGNORED);
	return 0;
}

/* The process of a call that is entered, 0: nothing of it is recorded. Of one that is not traced (yet), calls are counted. */
INLINE struct argus_target *traced(u64 id, int counts)
{
	u32 tgid = id >> 32;
	struct argus_target *target = find_target(id);
	if (is_recorded(target, counts))
		return target;
	if (target)
		return 0;
	u64 *hits = strangers.lookup(&tgid);
	if (hits) {
		__sync_fetch_and_add(hits, 1);
	} else {
		u64 one = 1;
		strangers.update(&tgid, &one);
	}
	return 0;
}

/* An exit without an entry: the call began before Argus attached. */
INLINE void count_unmatched(u64 id)
{
	struct argus_target *target = find_target(id);
	if (target && !target->ignored)
		count(ARGUS_C_EXIT_UNMATCHED);
}

/* Takes a token for a record. 0: there is none. The arithmetic of a bucket (GCRA): records are paid off one after the other,
 * each within its cost, and a process may be so far ahead as the burst says. */
INLINE int within_budget(struct argus_target *target, u32 ring, u64 now, u64 cost_ns, u64 burst_ns)
{
	u64 *paid_ns = &target->paid_ns[ring];
	s64 ahead = *paid_ns - now;
	if (ahead > (s64)burst_ns)
		return 0;
	if (ahead < 0)
		*paid_ns = now + cost_ns; /* two threads at once: one record is for free */
	else
		__sync_fetch_and_add(paid_ns, cost_ns);
	return 1;
}

/* bcc knows no map.ringbuf_query, and makes map.ringbuf_output into this: with these flags, what a ring is asked for. How
 * many bytes wait to be read, or the positions up to which was read and written. Constants, so that one call remains. */
#define HOW_FULL (1ull << 63)
#define READ (HOW_FULL | 2)
#define WRITTEN (HOW_FULL | 3)
#define bpf_ringbuf_output(ring, data, bytes, flags) \
	((flags) & HOW_FULL ? (long)bpf_ringbuf_query(ring, (flags) & 3) : (long)bpf_ringbuf_output(ring, data, bytes, flags))

/* A record of the process may be written: within its budget and its owner's share always, above them only while the ring is
 * nearly empty. So no process, and no owner with many, fills a ring for the others, and one whose records are read in time
 * loses nothing. */
#define WITHIN_BUDGET(target, ring, now) \
	within_budget(target, ARGUS_R_##ring, now, ARGUS_##ring##_COST_NS, ARGUS_##ring##_BURST_NS)

#define RECORD_HEADER_BYTES 8 /* the kernel's, BPF_RINGBUF_HDR_SZ */

INLINE u32 traced_owners(void)
{
	u32 place = 0, *number = owners_traced.lookup(&place);
	return number ? *number : 0;
}

INLINE u32 traced_users(void)
{
	u32 place = 1, *number = owners_traced.lookup(&place);
	return number ? *number : 0;
}

/* What one may write in a window: a multiple of what remains free (the dynamic threshold of Choudhury and Hahne, 1998). An
 * owner as much as remains: one alone fills half a ring, of k each one in k + 1 parts, and one remains free. A user in all
 * containers eight times as much: however many flood, one part in nine remains for other users. What several CPUs write at
 * the same moment may be more by a few records. */
#define USER_SHARE 8

INLINE int has_share(struct argus_owner *whose, u32 ring, u64 read, u64 written, u64 bytes, u64 size, u32 multiple)
{
	if (read >= whose->began[ring]) {
		whose->began[ring] = written;
		whose->bytes[ring] = 0;
	}
	return whose->bytes[ring] + bytes + multiple * (written - read) <= multiple * size;
}

/* Whether a process may write so many bytes more: its owner has its share, and its user. */
INLINE int within_share(struct argus_target *target, u32 ring, u64 read, u64 written, u64 bytes, u64 size)
{
	u32 number = target->owner;
	struct argus_owner *owner = owners.lookup(&number), *user = 0;
	if (!owner)
		return 1;
	bytes += RECORD_HEADER_BYTES;
	if (!has_share(owner, ring, read, written, bytes, size, 1))
		return 0;
	number = target->user;
	if (number && traced_users() > 1) {
		user = owners.lookup(&number);
		if (user && user != owner) {
			if (!has_share(user, ring, read, written, bytes, size, USER_SHARE))
				return 0;
			__sync_fetch_and_add(&user->bytes[ring], bytes);
		}
	}
	__sync_fetch_and_add(&owner->bytes[ring], bytes);
	return 1;
}

INLINE void refuse(struct argus_target *target, int within)
{
	if (within) {
		__sync_fetch_and_add(&target->owner_refused, 1);
		count(ARGUS_C_RECORDS_OVER_SHARE);
	} else {
		__sync_fetch_and_add(&target->refused, 1);
		count(ARGUS_C_RECORDS_OVER_BUDGET);
	}
}

/* Room of the map, a constant. */
INLINE s64 entries_of(u32 what)
{
	if (what == ARGUS_H_CONTROL)
		return CONTROL_ENTRIES;
	if (what == ARGUS_H_MATH)
		return MATH_ENTRIES;
	if (what == ARGUS_H_GROUPS)
		return GROUPS_ENTRIES;
	return what == ARGUS_H_SEQUENCES ? SEQUENCES_ENTRIES : CALLS_ENTRIES;
}

/* Counts may be off by what is granted while user space counts: not below 0. */
INLINE s64 granted_to(struct argus_room *room, u32 what)
{
	s32 granted = room->granted[what];
	return granted > 0 ? granted : 0;
}

INLINE void add_to_room(u32 number, u32 what, s32 more)
{
	struct argus_room *room = rooms.lookup(&number);
	if (room)
		__sync_fetch_and_add(&room->granted[what], more);
}

INLINE void grant(struct argus_target *target, u32 what, s32 more)
{
	add_to_room(target->owner, what, more);
	if (target->user)
		add_to_room(target->user, what, more);
	add_to_room(ARGUS_OWNERS, what, more);
	__sync_fetch_and_add(&target->granted[what], more);
}

/* Grants a process more entries of a map, if its owner and its user have their share of it, as of a ring (has_share). A
 * user's is bounded also while nobody else's processes are traced: entries may stay, and others come later. */
INLINE int may_have_more(struct argus_target *target, u32 what)
{
	s64 entries = entries_of(what), more = GRANT(entries);
	u32 number = target->owner, whose = target->user, last = ARGUS_OWNERS;
	struct argus_room *owner = rooms.lookup(&number), *all = rooms.lookup(&last);
	if (!owner)
		return 0;
	if (!all)
		return 0;
	s64 taken = granted_to(all, what), of_user = granted_to(owner, what);
	if (traced_owners() > 1 && of_user + more + taken > entries)
		return 0;
	if (whose) {
		struct argus_room *user = rooms.lookup(&whose);
		if (user)
			of_user = granted_to(user, what);
	}
	if (of_user + more + USER_SHARE * taken > USER_SHARE * entries)
		return 0;
	grant(target, what, more);
	return 1;
}

/* Whether a process has its share of a map, or its owner. What it cannot keep then counts against it alone. CPUs that look
 * at once see the same that is spare: each may hold one more than was granted. */
INLINE int has_its_share(struct argus_target *target, u32 what)
{
	s32 held = target->held[what];
	if (held >= EACH(entries_of(what)))
		return 1;
	return held >= target->granted[what] && !may_have_more(target, what);
}

INLINE void hold(struct argus_target *target, u32 what)
{
	__sync_fetch_and_add(&target->held[what], 1);
}

/* An entry of a process is gone. What was granted stays, as long as little of it is spare. */
INLINE void drop(struct argus_target *target, u32 what)
{
	s32 each = GRANT(entries_of(what));
	__sync_fetch_and_add(&target->held[what], -1);
	if (target->granted[what] >= target->held[what] + 2 * each)
		grant(target, what, -each);
}

/* An entry is gone. It counted for the process that it names: another one than the current one, if the end of its thread
 * was not seen and the thread's number was given again. */
INLINE void release(struct argus_target *target, u64 id, u32 pid, u32 what)
{
	if (pid != (u32)(id >> 32))
		target = targets.lookup(&pid);
	if (target)
		drop(target, what);
}

INLINE void refuse_pending(struct argus_target *target)
{
	__sync_fetch_and_add(&target->pending_refused, 1);
	count(ARGUS_C_PENDING_OVER_SHARE);
}

INLINE void refuse_seq(struct argus_target *target)
{
	__sync_fetch_and_add(&target->seq_refused, 1);
	count(ARGUS_C_SEQ_OVER_SHARE);
}

/* Remembers a call until its exit. there: in the place of an earlier one of its process. Returns whether it is remembered. */
INLINE int remember(struct argus_target *target, u64 *key, struct pending *p, int there)
{
	if (there) {
		inflight.update(key, p);
		return 1;
	}
	if (has_its_share(target, ARGUS_H_CALLS)) {
		refuse_pending(target);
		return 0;
	}
	if (inflight.insert(key, p) != 0) {
		lose(target, ARGUS_C_PENDING_FULL);
		return 0;
	}
	hold(target, ARGUS_H_CALLS);
	return 1;
}

INLINE void forget_call(struct argus_target *target, u64 id, u64 *key, u32 pid)
{
	if (inflight.delete(key) == 0)
		release(target, id, pid, ARGUS_H_CALLS);
}

/* Families: a call is nested only in one of its own. Loading code is one of its own, since it happens inside launches. */
INLINE u64 cuda_key(u32 tid) { return (u64)tid << 2; }
INLINE u64 nccl_key(u32 tid) { return ((u64)tid << 2) | 1; }
INLINE u64 module_key(u32 tid) { return ((u64)tid << 2) | 2; }
INLINE u64 family_key(u32 tid, u64 cookie)
{
	return ARGUS_IS_MODULE(cookie) ? module_key(tid) : cuda_key(tid);
}

/* Whether the call remembered in p is still on this thread's stack below the call that is entered now.
 *
 * A call whose exit is traced is forgotten at its exit, so it is, unless the stack has been unwound past it. For one whose
 * exit is not (a runtime launch), two things must hold: its return address is still where it was, since a later call from
 * the same frame returns elsewhere; and the new call was made by code of the file that holds the old one, since a deeper
 * frame may have left the old slot untouched.
 * At the very same stack pointer the new call is either entered by a jump from the old one (a tail call), or it is the
 * next turn of a loop around the same call. */
INLINE int active(struct pt_regs *ctx, u64 sp, struct pending *p, u64 cookie)
{
	u8 flags = 0;
	if (sp > p->sp)
		return 0;
	if (ARGUS_HAS_EXIT(p->cookie))
		return sp != p->sp || ARGUS_CALL(cookie) != ARGUS_CALL(p->cookie);
	if (read_u64(p->sp, &flags) != p->ret || flags)
		return 0;
	if (sp == p->sp)
		return ARGUS_LAYER(cookie) < ARGUS_LAYER(p->cookie);
	int slot = ARGUS_FILE(p->cookie);
	u64 *size = text_bytes.lookup(&slot);
	u64 caller = CALLER(ctx, sp, &flags);
	u64 distance = caller > p->ip ? caller - p->ip : p->ip - caller;
	return size && !flags && distance < *size;
}

INLINE void send_launch(struct argus_target *target, struct argus_launch *record, u64 now)
{
	int within = WITHIN_BUDGET(target, LAUNCHES, now);
	int may = within && (traced_owners() < 2 || within_share(target, ARGUS_R_LAUNCHES, launches.ringbuf_output(record, 0, READ),
		launches.ringbuf_output(record, 0, WRITTEN), sizeof(*record), ARGUS_LAUNCHES_BYTES));
	if (!may && launches.ringbuf_output(record, 0, HOW_FULL) >= ARGUS_LAUNCHES_SHARED_BYTES) {
		refuse(target, within);
		return;
	}
	if (record->flags & ARGUS_F_READ_FAULT)
		lose(target, ARGUS_C_READ_FAULT);
	if (launches.ringbuf_output(record, sizeof(*record), NO_WAKEUP) == 0)
		count(ARGUS_C_LAUNCHES);
	else
		lose(target, ARGUS_C_LAUNCHES_DROPPED);
}

INLINE void send_collective(struct argus_target *target, struct argus_collective *record, u64 now)
{
	int within = WITHIN_BUDGET(target, COLLECTIVES, now);
	int may = within && (traced_owners() < 2 || within_share(target, ARGUS_R_COLLECTIVES, collectives.ringbuf_output(record, 0, READ),
		collectives.ringbuf_output(record, 0, WRITTEN), sizeof(*record), ARGUS_COLLECTIVES_BYTES));
	if (!may && collectives.ringbuf_output(record, 0, HOW_FULL) >= ARGUS_COLLECTIVES_SHARED_BYTES) {
		refuse(target, within);
		return;
	}
	if (record->flags & ARGUS_F_READ_FAULT)
		lose(target, ARGUS_C_READ_FAULT);
	if (collectives.ringbuf_output(record, sizeof(*record), NO_WAKEUP) == 0)
		count(ARGUS_C_COLLECTIVES);
	else
		lose(target, ARGUS_C_COLLECTIVES_DROPPED);
}
