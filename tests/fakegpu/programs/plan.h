/* The plans of fake_plan: what a rank does in a step, and with whom. The language is in README.md. */
#ifndef PLAN_H
#define PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "nccl_abi.h"

enum act {
    ACT_DATA, ACT_HOST, ACT_SYNC, ACT_D2H, ACT_KERNEL, ACT_KERNEL_SIZED,
    ACT_ALLREDUCE, ACT_ALLGATHER, ACT_REDUCESCATTER, ACT_BROADCAST, ACT_ALLTOALL, ACT_SEND, ACT_RECV,
    ACT_GROUP_START, ACT_GROUP_END, ACT_EVERY, ACT_REPEAT, ACT_DONE
};

/* Drawn from [least, most] when `drawn`; by a name of its own when `key` is not -1, else as the step's next number. */
struct amount {
    long least, most, key;
    bool drawn;
};

struct instruction {
    enum act act;
    int group, peer, kernel; /* indices; the peer is a rank of the group */
    struct amount amount;    /* microseconds, bytes, elements, launches, blocks, repetitions, steps */
    ncclDataType_t type;
    int done; /* of every and repeat: the instruction that ends it */
    int line;
};

enum { GROUP_WORLD, GROUP_SPLIT, GROUP_INIT };

struct group {
    char name[32];
    int how, color, key;
    char id[32];
    int size, rank; /* rank -1: in none of the parts */
    int *ranks;     /* global ones, by rank in the group */
    int line;
};

struct plan {
    char path[4096];
    struct group *groups; /* in the order of their making; the first is the world */
    int group_count;
    bool world; /* whether the world communicator is split or used */
    struct instruction *step;
    int length;
};

/* The plans of all ranks, checked against each other: each rank finds the same errors, and ends with status 2. */
struct plan *plans_read(const char *path, int world);

static inline uint64_t size_of(ncclDataType_t type) { return type == ncclBfloat16 ? 2 : 4; }

#endif
