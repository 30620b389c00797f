/* A communicator: one rank's end of a channel, and the operations it has launched, which run one after the other. */
#ifndef FAKEGPU_COMM_H
#define FAKEGPU_COMM_H

#include <pthread.h>

#include "channel.h"
#include "fakegpu.h"

#define COMM_MAGIC 0x6d6d6f6347504655u
#define OP_ROOM 512 /* operations that can be open on a communicator; then a launch waits */

struct part { /* a send or a receive */
    int from, to;
    bool sending;
    uint64_t sequence, bytes;
};

struct comm_op {
    struct fakegpu_remote remote; /* first: the engine hands this back */
    struct ncclComm *comm;
    uint64_t number; /* among the communicator's operations */
    bool posted, collective;
    uint64_t sequence, bytes; /* of the collective */
    double factor;
    int part_count;
    struct part *parts; /* room for comm->part_room */
};

struct ncclComm {
    uint64_t magic;
    uint64_t key; /* then rank, nranks and device: the order that NCCL's own communicators have */
    int rank, nranks, device;
    struct channel *channel;
    struct fakegpu_link link;
    bool waiting;          /* its start was put off to the end of a group */
    pthread_mutex_t order; /* operations get numbers in the order in which they are launched */
    uint64_t launched; /* atomic */
    uint64_t collectives;
    uint64_t *sent, *received; /* [peer] */
    int part_room;
    struct comm_op *ops; /* a ring of OP_ROOM */
    struct part *parts;
    /* under the engine's lock */
    uint64_t finished;
    int64_t last_end_ns;
    /* read anywhere */
    int error; /* an ncclResult_t; atomic */
    bool aborted;
    char last_error[128];
};

/* ncclInvalidArgument for what is no communicator, else the error it is in. */
ncclResult_t comm_check(const struct ncclComm *comm);
void comm_fail(struct ncclComm *comm, ncclResult_t result, const char *text);
void comm_op_prepare(struct comm_op *op);

/* ---- group.c ---- */
bool group_open(void);
/* In a group, a communicator's start must not wait for others that the same thread has yet to start. */
void group_defer(struct ncclComm *comm);

/* ---- comm.c ---- */
ncclResult_t comm_await(struct ncclComm *comm);

/* ---- kernels.c ---- */
/* The host stub of the kernel for an operation; NULL op: the one that runs several different ones. */
const void *kernel_plain(const char *collective);
const void *kernel_reducing(const char *collective, ncclDataType_t type, ncclRedOp_t op);

#define NCCL_API(name, parameters)                                                            \
    FAKEGPU_EXPORT ncclResult_t p##name parameters __attribute__((alias(#name)));             \
    FAKEGPU_EXPORT __attribute__((weak)) ncclResult_t name parameters

#endif
