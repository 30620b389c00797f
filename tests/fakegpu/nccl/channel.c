#define _GNU_SOURCE
#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAGIC "FAKEGPU1"
#define NONCE_CHECKED 56
#define LOOK_PERIOD_NS 200000000
#define DEFAULT_TIMEOUT_S 120

struct member {
    _Alignas(64) _Atomic int32_t pid;
    _Atomic uint32_t joined, left;
    _Atomic uint32_t doorbell;
    /* split and shrink */
    _Atomic uint32_t offered, published, taken; /* how many times this rank did so */
    _Atomic int32_t color, key;
    struct address address;
};

struct header {
    struct address address;
    _Atomic int32_t nranks;
    _Atomic uint32_t joined, closed;
    _Atomic uint32_t change; /* counts everything that somebody blocked may wait for */
};

struct slot {
    /* Goes on counting from use to use: that a rank posts at all to use n proves that use n-1 is over. */
    _Atomic uint64_t posted;
};

struct cell {
    _Atomic uint64_t posted; /* the sequence number this is about, plus 1 */
    _Atomic int64_t ready_ns;
    _Atomic uint64_t bytes;
    _Atomic double factor;
};

struct pair {
    _Atomic uint64_t posted[2]; /* by the sender, by the receiver */
    struct cell cells[2][PAIR_SLOTS];
};

struct channel {
    int nranks, rank;
    size_t size;
    struct header *header;
    struct member *members;
    struct slot *slots;
    struct cell *cells; /* [SLOTS][nranks] */
    struct pair *pairs; /* [from][to] */
    uint32_t splits, shrinks;
};

/* ---- waiting ---- */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int64_t timeout_ns(void) {
    const char *text = getenv("FAKEGPU_INIT_TIMEOUT_S");
    long seconds = text ? strtol(text, NULL, 10) : 0;
    return (seconds > 0 ? seconds : DEFAULT_TIMEOUT_S) * 1000000000LL;
}

static void ring(_Atomic uint32_t *word) {
    atomic_fetch_add(word, 1);
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* A process that has ended counts as dead even while nobody has waited for it. */
static bool dead(int32_t pid) {
    int descriptor = (int)syscall(SYS_pidfd_open, pid, 0);
    if (descriptor < 0) return errno == ESRCH || (errno == ENOSYS && kill(pid, 0) && errno == ESRCH);
    struct pollfd ended = {.fd = descriptor, .events = POLLIN};
    bool is_dead = poll(&ended, 1, 0) > 0;
    close(descriptor);
    return is_dead;
}

static bool member_dead(const struct channel *channel, int rank) {
    int32_t pid = channel->members[rank].pid;
    return pid && pid != getpid() && dead(pid);
}

static bool any_dead(const struct channel *channel) {
    for (int i = 0; i < channel->nranks; i++)
        if (member_dead(channel, i)) return true;
    return false;
}

/* Blocks until the condition holds; every change of what it looks at rings `change`. */
#define AWAIT(channel, condition, broken)                                                                      \
    do {                                                                                                 \
        int64_t give_up_ns = now_ns() + timeout_ns();                                                    \
        for (;;) {                                                                                       \
            uint32_t seen_ = (channel)->header->change;                                                  \
            if (condition) break;                                                                        \
            if (broken) { /* unless the other did its part before it ended */                            \
                if (condition) break;                                                                    \
                return ncclRemoteError;                                                                  \
            }                                                                                            \
            if (now_ns() > give_up_ns) return ncclSystemError;                                           \
            syscall(SYS_futex, &(channel)->header->change, FUTEX_WAIT, seen_,                            \
                    &(struct timespec){.tv_nsec = LOOK_PERIOD_NS}, NULL, 0);                             \
        }                                                                                                \
    } while (0)

/* ---- life ---- */

ncclResult_t channel_make(struct address *address) {
    memcpy(address->magic, MAGIC, sizeof address->magic);
    address->pid = getpid();
    address->descriptor = memfd_create("fakegpu-channel", MFD_CLOEXEC);
    if (address->descriptor < 0) return ncclSystemError;
    if (getrandom(address->nonce, sizeof address->nonce, 0) != (ssize_t)sizeof address->nonce ||
        ftruncate(address->descriptor, sizeof(struct header)) ||
        pwrite(address->descriptor, address, sizeof *address, 0) != (ssize_t)sizeof *address) {
        close(address->descriptor);
        return ncclSystemError;
    }
    return ncclSuccess;
}

static size_t round_up(size_t size) { return (size + 63) / 64 * 64; }

static ncclResult_t map(const struct address *address, struct channel *channel) {
    size_t n = (size_t)channel->nranks;
    size_t members_at = round_up(sizeof(struct header));
    size_t slots_at = members_at + round_up(n * sizeof(struct member));
    size_t cells_at = slots_at + round_up(SLOTS * sizeof(struct slot));
    size_t pairs_at = cells_at + round_up(SLOTS * n * sizeof(struct cell));
    channel->size = pairs_at + round_up(n * n * sizeof(struct pair));

    int descriptor = address->descriptor;
    if (address->pid != getpid()) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/fd/%d", address->pid, address->descriptor);
        descriptor = open(path, O_RDWR | O_CLOEXEC);
    }
    /* Growing it to the same size twice is harmless; the descriptor may by now be something else entirely. */
    struct address found;
    bool good = descriptor >= 0 && pread(descriptor, &found, sizeof found, 0) == (ssize_t)sizeof found &&
                !memcmp(found.magic, MAGIC, sizeof found.magic) &&
                !memcmp(found.nonce, address->nonce, NONCE_CHECKED) && !ftruncate(descriptor, (off_t)channel->size);
    char *base = MAP_FAILED;
    if (good) base = mmap(NULL, channel->size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (descriptor >= 0 && address->pid != getpid()) close(descriptor);
    if (base == MAP_FAILED) return ncclSystemError;
    channel->header = (struct header *)base;
    channel->members = (struct member *)(base + members_at);
    channel->slots = (struct slot *)(base + slots_at);
    channel->cells = (struct cell *)(base + cells_at);
    channel->pairs = (struct pair *)(base + pairs_at);
    return ncclSuccess;
}

ncclResult_t channel_join(const struct address *address, int nranks, int rank, struct channel **joined) {
    if (memcmp(address->magic, MAGIC, sizeof address->magic)) return ncclInvalidArgument;
    struct channel *channel = calloc(1, sizeof *channel);
    if (!channel) return ncclSystemError;
    channel->nranks = nranks;
    channel->rank = rank;
    ncclResult_t result = map(address, channel);
    if (result) {
        free(channel);
        return result;
    }
    int32_t none = 0;
    uint32_t first = 0;
    struct member *self = &channel->members[rank];
    if (!atomic_compare_exchange_strong(&channel->header->nranks, &none, nranks) && none != nranks)
        result = ncclInvalidArgument;
    else if (!atomic_compare_exchange_strong(&self->joined, &first, 1))
        result = ncclInvalidUsage;
    if (result) {
        munmap(channel->header, channel->size);
        free(channel);
        return result;
    }
    self->pid = getpid();
    atomic_fetch_add(&channel->header->joined, 1);
    ring(&channel->header->change);
    *joined = channel;
    return ncclSuccess;
}

static ncclResult_t await_all(struct channel *channel) {
    AWAIT(channel, channel->header->joined == (uint32_t)channel->nranks, any_dead(channel));
    return ncclSuccess;
}

ncclResult_t channel_await(struct channel *channel) {
    ncclResult_t result = await_all(channel);
    /* All have it mapped: the file needs no descriptor any more. */
    uint32_t open = 0;
    const struct address *address = &channel->header->address;
    if (!result && address->pid == getpid() &&
        atomic_compare_exchange_strong(&channel->header->closed, &open, 1))
        close(address->descriptor);
    return result;
}

void channel_leave(struct channel *channel) {
    channel->members[channel->rank].left = 1;
    munmap(channel->header, channel->size);
    free(channel);
}

uint64_t channel_key(const struct channel *channel) {
    uint64_t key;
    memcpy(&key, channel->header->address.nonce, sizeof key);
    return key;
}

uint32_t *channel_doorbell(struct channel *channel) { return (uint32_t *)&channel->members[channel->rank].doorbell; }

/* ---- operations ---- */

static void write_cell(struct cell *cell, uint64_t sequence, const struct post *post) {
    cell->posted = sequence + 1;
    cell->ready_ns = post->ready_ns;
    cell->bytes = post->bytes;
    cell->factor = post->factor;
}

static void merge(struct post *joint, const struct cell *cell) {
    if (cell->ready_ns > joint->ready_ns) joint->ready_ns = cell->ready_ns;
    if (cell->bytes > joint->bytes) joint->bytes = cell->bytes;
    if (cell->factor > joint->factor) joint->factor = cell->factor;
}

void channel_post(struct channel *channel, uint64_t sequence, const struct post *post) {
    uint64_t slot = sequence % SLOTS, nranks = (uint64_t)channel->nranks;
    write_cell(&channel->cells[slot * nranks + (uint64_t)channel->rank], sequence, post);
    uint64_t posted = atomic_fetch_add(&channel->slots[slot].posted, 1) + 1;
    if (posted != nranks * (sequence / SLOTS + 1)) return;
    for (int i = 0; i < channel->nranks; i++)
        if (i != channel->rank) ring(&channel->members[i].doorbell);
}

bool channel_met(struct channel *channel, uint64_t sequence, struct post *joint) {
    uint64_t slot = sequence % SLOTS, nranks = (uint64_t)channel->nranks;
    if (channel->slots[slot].posted < nranks * (sequence / SLOTS + 1)) return false;
    for (uint64_t i = 0; i < nranks; i++) merge(joint, &channel->cells[slot * nranks + i]);
    return true;
}

int channel_lost(struct channel *channel, uint64_t sequence) {
    const struct cell *cells = &channel->cells[sequence % SLOTS * (uint64_t)channel->nranks];
    for (int i = 0; i < channel->nranks; i++)
        if (member_dead(channel, i) && cells[i].posted != sequence + 1) return i;
    return -1;
}

static struct pair *pair_of(struct channel *channel, int from, int to) {
    return &channel->pairs[(size_t)from * (size_t)channel->nranks + (size_t)to];
}

void channel_post_pair(struct channel *channel, int from, int to, bool sending, uint64_t sequence,
                       const struct post *post) {
    struct pair *pair = pair_of(channel, from, to);
    int side = !sending;
    write_cell(&pair->cells[side][sequence % PAIR_SLOTS], sequence, post);
    pair->posted[side] = sequence + 1;
    if (from != to && pair->posted[!side] > sequence) ring(&channel->members[sending ? to : from].doorbell);
}

bool channel_lost_pair(struct channel *channel, int peer, int from, int to, uint64_t sequence) {
    struct pair *pair = pair_of(channel, from, to);
    return member_dead(channel, peer) && pair->posted[peer == from ? 0 : 1] <= sequence;
}

bool channel_met_pair(struct channel *channel, int from, int to, uint64_t sequence, struct post *joint) {
    struct pair *pair = pair_of(channel, from, to);
    if (pair->posted[0] <= sequence || pair->posted[1] <= sequence) return false;
    merge(joint, &pair->cells[0][sequence % PAIR_SLOTS]);
    merge(joint, &pair->cells[1][sequence % PAIR_SLOTS]);
    return true;
}

/* ---- new communicators out of old ones ---- */

/* The leader makes the new channel; the others take its address. The leader may only go on to its next one when all
 * have it, which the new channel's own start proves. */
static ncclResult_t share(struct channel *channel, int leader, uint32_t generation, struct address *address) {
    struct member *from = &channel->members[leader];
    if (leader == channel->rank) {
        ncclResult_t result = channel_make(&from->address);
        if (result) return result;
        from->published = generation;
        ring(&channel->header->change);
    }
    AWAIT(channel, from->published >= generation, member_dead(channel, leader));
    *address = from->address;
    return ncclSuccess;
}

ncclResult_t channel_split(struct channel *channel, int color, int key, struct address *address, int *nranks,
                           int *rank) {
    uint32_t generation = ++channel->splits;
    struct member *self = &channel->members[channel->rank];
    self->color = color;
    self->key = key;
    self->offered = generation;
    ring(&channel->header->change);
    for (int i = 0; i < channel->nranks; i++) 
        AWAIT(channel, channel->members[i].offered >= generation, any_dead(channel));

    int leader = -1;
    *nranks = *rank = 0;
    for (int i = 0; i < channel->nranks; i++) {
        const struct member *other = &channel->members[i];
        if (other->color != color || color == NCCL_SPLIT_NOCOLOR) continue;
        if (leader < 0) leader = i;
        ++*nranks;
        if (other->key < key || (other->key == key && i < channel->rank)) ++*rank;
    }
    ncclResult_t result = ncclSuccess;
    if (leader >= 0) result = share(channel, leader, channel->splits + channel->shrinks, address);
    /* Nobody may offer again before everybody has read. */
    self->taken = generation;
    ring(&channel->header->change);
    for (int i = 0; i < channel->nranks; i++) 
        AWAIT(channel, channel->members[i].taken >= generation, any_dead(channel));
    return result;
}

ncclResult_t channel_shrink(struct channel *channel, const int *excluded, int count, struct address *address,
                            int *nranks, int *rank) {
    channel->shrinks++;
    int leader = -1;
    *nranks = *rank = 0;
    for (int i = 0; i < channel->nranks; i++) {
        bool out = false;
        for (int e = 0; e < count; e++) out |= excluded[e] == i;
        if (out) continue;
        if (leader < 0) leader = i;
        ++*nranks;
        if (i < channel->rank) ++*rank;
        if (dead(channel->members[i].pid)) return ncclRemoteError;
    }
    return share(channel, leader, channel->splits + channel->shrinks, address);
}
