/* The memory that the ranks of one communicator share, and what they exchange through it.
 *
 * It is an anonymous file of the process that made the unique id, which carries that process's number and descriptor;
 * the others open it through /proc. So there is no name that could outlive a killed job. */
#ifndef FAKEGPU_CHANNEL_H
#define FAKEGPU_CHANNEL_H

#include <stdbool.h>
#include <stdint.h>

#include "nccl_abi.h"

/* How to find a channel: the content of an ncclUniqueId. */
struct address {
    char magic[8];
    int32_t pid, descriptor;
    uint8_t nonce[112]; /* makes the id unique; its first half must stand in the file too */
};
_Static_assert(sizeof(struct address) == sizeof(ncclUniqueId), "an address is a unique id");

/* What a rank says about its part in an operation. */
struct post {
    int64_t ready_ns;
    uint64_t bytes;
    double factor; /* of its link: 1, or more for a slow one */
};

/* How many collectives can be open at once. A rank starts the next only after this one is known to all to have been
 * reached, so two would do. */
#define SLOTS 4
/* How many operations between two ranks can be open at once in one direction. */
#define PAIR_SLOTS 16

struct channel;

/* Makes the shared file and writes its address. */
ncclResult_t channel_make(struct address *address);
/* Takes part as `rank` of `nranks`; does not wait for the others. */
ncclResult_t channel_join(const struct address *address, int nranks, int rank, struct channel **channel);
/* Waits until all have joined. */
ncclResult_t channel_await(struct channel *channel);
void channel_leave(struct channel *channel);
/* A number that is the same in all ranks and differs between communicators. */
uint64_t channel_key(const struct channel *channel);
uint32_t *channel_doorbell(struct channel *channel);

/* Collective number `sequence` (from 0): says that this rank has reached it. Rings the others when it is the last. */
void channel_post(struct channel *channel, uint64_t sequence, const struct post *post);
/* True when all have: the latest time, the largest size, the worst link. */
bool channel_met(struct channel *channel, uint64_t sequence, struct post *joint);
/* A rank that has not reached it and never will, for its process has ended; else -1. */
int channel_lost(struct channel *channel, uint64_t sequence);

/* Operation number `sequence` from one rank to another, one side of which is this rank. */
void channel_post_pair(struct channel *channel, int from, int to, bool sending, uint64_t sequence,
                       const struct post *post);
bool channel_met_pair(struct channel *channel, int from, int to, uint64_t sequence, struct post *joint);
bool channel_lost_pair(struct channel *channel, int peer, int from, int to, uint64_t sequence);

/* Agreement on a new communicator. Each rank gives its color and key; those of one color get one address and their
 * new rank. Waits for all ranks. */
ncclResult_t channel_split(struct channel *channel, int color, int key, struct address *address, int *nranks,
                           int *rank);
/* The same among all ranks but the `excluded`. */
ncclResult_t channel_shrink(struct channel *channel, const int *excluded, int count, struct address *address,
                            int *nranks, int *rank);

#endif
