/* Communicators: made, split, shrunk, ended. */
#include "comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 22809
#define MAX_RANKS 4096
#define PART_ROOM_LEAST 32

NCCL_API(ncclGetVersion, (int *version)) {
    if (!version) return ncclInvalidArgument;
    *version = VERSION;
    return ncclSuccess;
}

NCCL_API(ncclGetUniqueId, (ncclUniqueId * id)) {
    if (!id) return ncclInvalidArgument;
    struct address address;
    ncclResult_t result = channel_make(&address);
    if (!result) memcpy(id, &address, sizeof *id);
    return result;
}

FAKEGPU_EXPORT const char *pncclGetErrorString(ncclResult_t result) __attribute__((alias("ncclGetErrorString")));
FAKEGPU_EXPORT __attribute__((weak)) const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[ncclNumResults] = {
        "no error",         "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "internal error - please report this issue to the NCCL developers",
        "invalid argument", "invalid usage (run with NCCL_DEBUG=WARN for details)",
        "remote process exited or there was a network error",
        "NCCL operation in progress"};
    return (unsigned)result < ncclNumResults ? texts[result] : "unknown result code";
}

FAKEGPU_EXPORT const char *pncclGetLastError(ncclComm_t comm) __attribute__((alias("ncclGetLastError")));
FAKEGPU_EXPORT __attribute__((weak)) const char *ncclGetLastError(ncclComm_t comm) {
    return comm && comm->magic == COMM_MAGIC ? comm->last_error : "";
}

ncclResult_t comm_check(const struct ncclComm *comm) {
    if (!comm || comm->magic != COMM_MAGIC) return ncclInvalidArgument;
    return __atomic_load_n(&comm->error, __ATOMIC_ACQUIRE);
}

void comm_fail(struct ncclComm *comm, ncclResult_t result, const char *text) {
    if (comm->error) return;
    snprintf(comm->last_error, sizeof comm->last_error, "%s", text);
    __atomic_store_n(&comm->error, (int)result, __ATOMIC_RELEASE);
}

static void release(struct ncclComm *comm) {
    comm->magic = 0;
    if (comm->channel) {
        fakegpu_unwatch(channel_doorbell(comm->channel));
        channel_leave(comm->channel);
    }
    pthread_mutex_destroy(&comm->order);
    free(comm->sent);
    free(comm->received);
    free(comm->ops);
    free(comm->parts);
    free(comm);
}

ncclResult_t comm_await(struct ncclComm *comm) {
    ncclResult_t result = channel_await(comm->channel);
    if (result) comm_fail(comm, result, "the other ranks did not come");
    comm->waiting = false;
    return result;
}

static ncclResult_t make(ncclComm_t *made, int nranks, const void *id, int rank) {
    if (!made) return ncclInvalidArgument;
    *made = NULL;
    if (!id || nranks < 1 || nranks > MAX_RANKS || rank < 0 || rank >= nranks) return ncclInvalidArgument;
    struct address address; /* an id may lie anywhere */
    memcpy(&address, id, sizeof address);
    struct ncclComm *comm = calloc(1, sizeof *comm);
    if (!comm) return ncclSystemError;
    pthread_mutex_init(&comm->order, NULL);
    comm->magic = COMM_MAGIC;
    comm->rank = rank;
    comm->nranks = nranks;
    comm->link = fakegpu_link();
    comm->part_room = 4 * nranks > PART_ROOM_LEAST ? 4 * nranks : PART_ROOM_LEAST;
    comm->sent = calloc((size_t)nranks, sizeof *comm->sent);
    comm->received = calloc((size_t)nranks, sizeof *comm->received);
    comm->ops = calloc(OP_ROOM, sizeof *comm->ops);
    comm->parts = calloc((size_t)OP_ROOM * (size_t)comm->part_room, sizeof *comm->parts);
    ncclResult_t result = ncclSystemError;
    if (comm->sent && comm->received && comm->ops && comm->parts)
        result = cudaGetDevice(&comm->device) ? ncclUnhandledCudaError : ncclSuccess;
    if (!result) result = channel_join(&address, nranks, rank, &comm->channel);
    if (!result) comm->key = channel_key(comm->channel);
    if (result) {
        release(comm);
        return result;
    }
    for (int i = 0; i < OP_ROOM; i++) {
        comm->ops[i].comm = comm;
        comm->ops[i].parts = comm->parts + (size_t)i * (size_t)comm->part_room;
        comm_op_prepare(&comm->ops[i]);
    }
    fakegpu_watch(channel_doorbell(comm->channel));
    *made = comm;
    if (group_open()) {
        comm->waiting = true;
        group_defer(comm);
        return ncclSuccess;
    }
    result = comm_await(comm);
    if (result) {
        release(comm);
        *made = NULL;
    }
    return result;
}

NCCL_API(ncclCommInitRank, (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank)) {
    return make(comm, nranks, &id, rank);
}

NCCL_API(ncclCommInitRankConfig,
         (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config)) {
    (void)config;
    return make(comm, nranks, &id, rank);
}

NCCL_API(ncclCommInitRankScalable,
         (ncclComm_t * comm, int nranks, int rank, int idCount, ncclUniqueId *ids, ncclConfig_t *config)) {
    (void)config;
    if (idCount < 1 || idCount > nranks) return ncclInvalidArgument;
    return make(comm, nranks, ids, rank);
}

NCCL_API(ncclCommInitAll, (ncclComm_t * comms, int deviceCount, const int *devices)) {
    int count, before;
    if (cudaGetDeviceCount(&count) || cudaGetDevice(&before)) return ncclUnhandledCudaError;
    if (!comms || deviceCount < 1 || deviceCount > count) return ncclInvalidArgument;
    ncclUniqueId id;
    ncclResult_t result = ncclGetUniqueId(&id);
    if (!result) result = ncclGroupStart();
    for (int i = 0; i < deviceCount && !result; i++) {
        if (cudaSetDevice(devices ? devices[i] : i))
            result = ncclUnhandledCudaError;
        else
            result = make(&comms[i], deviceCount, &id, i);
    }
    ncclResult_t ended = ncclGroupEnd();
    cudaSetDevice(before);
    return result ? result : ended;
}

NCCL_API(ncclCommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config)) {
    (void)config;
    ncclResult_t result = comm_check(comm);
    if (result) return result;
    if (!newcomm || color < NCCL_SPLIT_NOCOLOR) return ncclInvalidArgument;
    *newcomm = NULL;
    struct address address;
    int nranks, rank;
    result = channel_split(comm->channel, color, key, &address, &nranks, &rank);
    if (result || color == NCCL_SPLIT_NOCOLOR) return result;
    return make(newcomm, nranks, &address, rank);
}

NCCL_API(ncclCommShrink, (ncclComm_t comm, int *excluded, int excludedCount, ncclComm_t *newcomm,
                          ncclConfig_t *config, int flags)) {
    (void)config, (void)flags;
    if (!comm || comm->magic != COMM_MAGIC || !newcomm || !excluded || excludedCount < 1)
        return ncclInvalidArgument;
    *newcomm = NULL;
    for (int i = 0; i < excludedCount; i++)
        if (excluded[i] < 0 || excluded[i] >= comm->nranks || excluded[i] == comm->rank) return ncclInvalidArgument;
    struct address address;
    int nranks, rank;
    ncclResult_t result = channel_shrink(comm->channel, excluded, excludedCount, &address, &nranks, &rank);
    return result ? result : make(newcomm, nranks, &address, rank);
}

static bool all_finished(void *argument) {
    const struct ncclComm *comm = argument;
    return comm->finished == __atomic_load_n(&comm->launched, __ATOMIC_RELAXED);
}

NCCL_API(ncclCommFinalize, (ncclComm_t comm)) {
    if (!comm || comm->magic != COMM_MAGIC) return ncclInvalidArgument;
    if (comm_check(comm)) return comm_check(comm);
    fakegpu_wait(all_finished, comm);
    return ncclSuccess;
}

/* After an error the rest will never finish, and is let go. */
static ncclResult_t end(ncclComm_t comm, bool abort) {
    if (!comm) return ncclSuccess;
    if (comm->magic != COMM_MAGIC) return ncclInvalidArgument;
    if (abort || comm->error) __atomic_store_n(&comm->aborted, true, __ATOMIC_RELEASE);
    fakegpu_wait(all_finished, comm);
    release(comm);
    return ncclSuccess;
}

NCCL_API(ncclCommDestroy, (ncclComm_t comm)) { return end(comm, false); }
NCCL_API(ncclCommAbort, (ncclComm_t comm)) { return end(comm, true); }

#define GETTER(value, into)                                                     \
    if (!comm || comm->magic != COMM_MAGIC || !(into)) return ncclInvalidArgument; \
    *(into) = (value);                                                          \
    return ncclSuccess

NCCL_API(ncclCommCount, (const ncclComm_t comm, int *count)) { GETTER(comm->nranks, count); }
NCCL_API(ncclCommUserRank, (const ncclComm_t comm, int *rank)) { GETTER(comm->rank, rank); }
NCCL_API(ncclCommCuDevice, (const ncclComm_t comm, int *device)) { GETTER(comm->device, device); }
NCCL_API(ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t *error)) {
    GETTER((ncclResult_t)__atomic_load_n(&comm->error, __ATOMIC_ACQUIRE), error);
}

NCCL_API(ncclCommRegister, (const ncclComm_t comm, void *buffer, size_t bytes, void **handle)) {
    if (!comm || comm->magic != COMM_MAGIC || !buffer || !bytes || !handle) return ncclInvalidArgument;
    *handle = malloc(1);
    return *handle ? ncclSuccess : ncclSystemError;
}

NCCL_API(ncclCommDeregister, (const ncclComm_t comm, void *handle)) {
    if (!comm || comm->magic != COMM_MAGIC) return ncclInvalidArgument;
    free(handle);
    return ncclSuccess;
}
