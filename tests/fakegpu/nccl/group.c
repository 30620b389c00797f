/* Collectives and point-to-point operations, alone and in groups, down to the launch of their kernels. */
#include <stdlib.h>
#include <string.h>

#include "comm.h"

#define BLOCK_THREADS 512
#define CHANNELS 16 /* thread blocks of a collective's kernel */
#define PAIR_LIMIT 8 /* of one peer and direction in one kernel: half the slots, so that two kernels fit */

struct call {
    struct ncclComm *comm;
    cudaStream_t stream;
    const void *kernel;
    bool collective;
    int peer; /* of a send or receive */
    bool sending;
    uint64_t bytes;
};

static __thread int depth;
static __thread ncclResult_t group_error;
static __thread struct call *calls;
static __thread int call_count, call_room;
static __thread struct ncclComm **deferred;
static __thread int deferred_count, deferred_room;

bool group_open(void) { return depth > 0; }

#define PUSH(array, count, room, value)                              \
    do {                                                             \
        if ((count) == (room)) {                                     \
            (room) = (room) ? (room) * 2 : 16;                       \
            (array) = realloc((array), (size_t)(room) * sizeof *(array)); \
            if (!(array)) abort();                                   \
        }                                                            \
        (array)[(count)++] = (value);                                \
    } while (0)

void group_defer(struct ncclComm *comm) { PUSH(deferred, deferred_count, deferred_room, comm); }

/* ---- one operation, as the engine sees it ---- */

static void post_all(struct comm_op *op, int64_t ready_ns) {
    struct post post = {ready_ns, op->bytes, op->factor};
    struct channel *channel = op->comm->channel;
    if (op->collective) channel_post(channel, op->sequence, &post);
    for (int i = 0; i < op->part_count; i++) {
        const struct part *part = &op->parts[i];
        post.bytes = part->bytes;
        channel_post_pair(channel, part->from, part->to, part->sending, part->sequence, &post);
    }
    op->posted = true;
}

static int64_t transfer_ns(const struct fakegpu_link *link, const struct post *joint, double noise) {
    return (int64_t)(((double)link->latency_ns + (double)joint->bytes / link->bytes_per_ns * joint->factor) * noise);
}

/* All ranks compute the same end: from the same posts, the same numbers of the link, the same noise. */
static bool progress(struct fakegpu_remote *remote, int64_t ready_ns, int64_t *begin_ns, int64_t *end_ns) {
    struct comm_op *op = (struct comm_op *)remote;
    struct ncclComm *comm = op->comm;
    *begin_ns = *end_ns = ready_ns;
    if (__atomic_load_n(&comm->aborted, __ATOMIC_ACQUIRE)) {
        comm->finished++;
        return true;
    }
    if (comm->finished != op->number) return false;
    if (comm->last_end_ns > ready_ns) ready_ns = comm->last_end_ns;
    if (!op->posted) post_all(op, ready_ns);

    *begin_ns = *end_ns = 0;
    uint64_t key = channel_key(comm->channel);
    if (op->collective) {
        struct post joint = {0};
        if (!channel_met(comm->channel, op->sequence, &joint)) return false;
        *begin_ns = joint.ready_ns;
        *end_ns = joint.ready_ns + transfer_ns(&comm->link, &joint, fakegpu_noise(key, op->sequence));
    }
    for (int i = 0; i < op->part_count; i++) {
        const struct part *part = &op->parts[i];
        struct post joint = {0};
        if (!channel_met_pair(comm->channel, part->from, part->to, part->sequence, &joint)) return false;
        uint64_t pair = (uint64_t)part->from << 20 | (uint64_t)part->to;
        int64_t end = joint.ready_ns +
                      transfer_ns(&comm->link, &joint, fakegpu_noise(key ^ (pair + 1) << 20, part->sequence));
        if (joint.ready_ns > *begin_ns) *begin_ns = joint.ready_ns;
        if (end > *end_ns) *end_ns = end;
    }
    comm->last_end_ns = *end_ns;
    comm->finished++;
    return true;
}

static void check(struct fakegpu_remote *remote) {
    struct comm_op *op = (struct comm_op *)remote;
    struct ncclComm *comm = op->comm;
    if (!op->posted || comm->error) return;
    bool lost = op->collective && channel_lost(comm->channel, op->sequence) >= 0;
    for (int i = 0; i < op->part_count && !lost; i++) {
        const struct part *part = &op->parts[i];
        lost = channel_lost_pair(comm->channel, part->sending ? part->to : part->from, part->from, part->to,
                                 part->sequence);
    }
    if (lost) comm_fail(comm, ncclRemoteError, "a rank of this communicator has ended");
}

void comm_op_prepare(struct comm_op *op) {
    op->remote.progress = progress;
    op->remote.check = check;
}

/* ---- launching ---- */

static bool has_room(void *argument) {
    const struct ncclComm *comm = argument;
    return __atomic_load_n(&comm->launched, __ATOMIC_RELAXED) - comm->finished < OP_ROOM;
}

static int pairs_with(const struct comm_op *op, int from, int to, bool sending) {
    int count = 0;
    for (int i = 0; i < op->part_count; i++)
        count += op->parts[i].from == from && op->parts[i].to == to && op->parts[i].sending == sending;
    return count;
}

/* One kernel for as many of the calls from `first` on as belong to the same communicator and fit. Marks them done. */
static ncclResult_t launch(struct call *list, int count, int first) {
    struct ncclComm *comm = list[first].comm;
    cudaStream_t stream = list[first].stream;
    const void *kernel = NULL;
    pthread_mutex_lock(&comm->order);
    fakegpu_wait(has_room, comm);
    struct comm_op *op = &comm->ops[comm->launched % OP_ROOM];
    op->posted = op->collective = false;
    op->bytes = 0;
    op->part_count = 0;
    bool cut = false;
    for (int i = first; i < count && !cut; i++) {
        struct call *call = &list[i];
        if (call->comm != comm) continue;
        if (call->collective) {
            op->collective = true;
            op->bytes += call->bytes;
        } else {
            struct part part = {.from = call->sending ? comm->rank : call->peer,
                                .to = call->sending ? call->peer : comm->rank,
                                .sending = call->sending,
                                .bytes = call->bytes};
            cut = op->part_count == comm->part_room || pairs_with(op, part.from, part.to, part.sending) == PAIR_LIMIT;
            if (cut) break;
            part.sequence = call->sending ? comm->sent[call->peer]++ : comm->received[call->peer]++;
            op->parts[op->part_count++] = part;
        }
        kernel = !kernel || kernel == call->kernel ? call->kernel : kernel_plain("Generic");
        call->comm = NULL;
    }
    op->factor = fakegpu_link().factor;
    op->number = comm->launched;
    if (op->collective) op->sequence = comm->collectives++;
    __atomic_fetch_add(&comm->launched, 1, __ATOMIC_RELAXED);

    void *args[] = {&op};
    cudaLaunchConfig_t config = {
        .gridDim = {op->collective ? CHANNELS : (unsigned)op->part_count, 1, 1},
        .blockDim = {BLOCK_THREADS, 1, 1},
        .stream = stream,
    };
    int device = comm->device;
    cudaGetDevice(&device);
    if (device != comm->device) cudaSetDevice(comm->device);
    fakegpu_next_launch(&op->remote);
    cudaError_t error = cudaLaunchKernelExC(&config, kernel, args);
    if (device != comm->device) cudaSetDevice(device);
    if (error) {
        fakegpu_next_launch(NULL);
        __atomic_fetch_sub(&comm->launched, 1, __ATOMIC_RELAXED); /* it never reached the engine */
        comm_fail(comm, ncclUnhandledCudaError, cudaGetErrorString(error));
    }
    pthread_mutex_unlock(&comm->order);
    return error ? ncclUnhandledCudaError : ncclSuccess;
}

static ncclResult_t submit(const struct call *call) {
    if (depth) {
        PUSH(calls, call_count, call_room, *call);
        return ncclSuccess;
    }
    struct call alone = *call;
    return launch(&alone, 1, 0);
}

NCCL_API(ncclGroupStart, (void)) {
    depth++;
    return ncclSuccess;
}

NCCL_API(ncclGroupEnd, (void)) {
    if (!depth) return ncclInvalidUsage;
    if (--depth) return ncclSuccess;
    ncclResult_t result = group_error;
    group_error = ncclSuccess;
    for (int i = 0; i < deferred_count; i++) {
        ncclResult_t started = comm_await(deferred[i]);
        if (!result) result = started;
    }
    deferred_count = 0;
    for (int i = 0; i < call_count && !result; i++)
        while (calls[i].comm && !result) result = launch(calls, call_count, i);
    call_count = 0;
    return result;
}

/* ---- the API ---- */

static uint64_t size_of(ncclDataType_t type) {
    static const uint8_t sizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

/* An error inside a group spoils the whole of it. */
static ncclResult_t refuse(ncclResult_t result) {
    if (depth && !group_error) group_error = result;
    return result;
}

#define CHECK(rank)                                                                                         \
    do {                                                                                                    \
        ncclResult_t state_ = comm_check(comm);                                                             \
        if (state_) return refuse(state_);                                                                  \
        if (comm->waiting) return refuse(ncclInvalidUsage);                                                 \
        if ((unsigned)type >= ncclNumTypes || (rank) < 0 || (rank) >= comm->nranks) return refuse(ncclInvalidArgument); \
    } while (0)

#define COLLECTIVE(kernel_, total) \
    submit(&(struct call){.comm = comm, .stream = stream, .kernel = (kernel_), .collective = true, \
                          .bytes = (uint64_t)(total)*size_of(type)})

#define NRANKS ((uint64_t)comm->nranks)

NCCL_API(ncclAllReduce, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                         ncclComm_t comm, cudaStream_t stream)) {
    (void)send, (void)recv;
    CHECK(0);
    if ((unsigned)op >= ncclNumOps) return refuse(ncclInvalidArgument);
    return COLLECTIVE(kernel_reducing("AllReduce", type, op), count);
}

NCCL_API(ncclReduce, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                      ncclComm_t comm, cudaStream_t stream)) {
    (void)send, (void)recv;
    CHECK(root);
    if ((unsigned)op >= ncclNumOps) return refuse(ncclInvalidArgument);
    return COLLECTIVE(kernel_reducing("Reduce", type, op), count);
}

NCCL_API(ncclReduceScatter, (const void *send, void *recv, size_t recvCount, ncclDataType_t type, ncclRedOp_t op,
                             ncclComm_t comm, cudaStream_t stream)) {
    (void)send, (void)recv;
    CHECK(0);
    if ((unsigned)op >= ncclNumOps) return refuse(ncclInvalidArgument);
    return COLLECTIVE(kernel_reducing("ReduceScatter", type, op), recvCount * NRANKS);
}

NCCL_API(ncclBroadcast, (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         cudaStream_t stream)) {
    (void)send, (void)recv;
    CHECK(root);
    return COLLECTIVE(kernel_plain("Broadcast"), count);
}

NCCL_API(ncclBcast, (void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                     cudaStream_t stream)) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

NCCL_API(ncclAllGather, (const void *send, void *recv, size_t sendCount, ncclDataType_t type, ncclComm_t comm,
                         cudaStream_t stream)) {
    (void)send, (void)recv;
    CHECK(0);
    return COLLECTIVE(kernel_plain("AllGather"), sendCount * NRANKS);
}

NCCL_API(ncclAlltoAll, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                        cudaStream_t stream)) {
    (void)send, (void)recv;
    CHECK(0);
    return COLLECTIVE(kernel_plain("SendRecv"), count * NRANKS);
}

NCCL_API(ncclGather, (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                      cudaStream_t stream)) {
    (void)send, (void)recv;
    CHECK(root);
    return COLLECTIVE(kernel_plain("SendRecv"), count * NRANKS);
}

NCCL_API(ncclScatter, (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream)) {
    (void)send, (void)recv;
    CHECK(root);
    return COLLECTIVE(kernel_plain("SendRecv"), count * NRANKS);
}

static ncclResult_t pairwise(size_t count, ncclDataType_t type, int peer, bool sending, ncclComm_t comm,
                             cudaStream_t stream) {
    CHECK(peer);
    return submit(&(struct call){.comm = comm, .stream = stream, .kernel = kernel_plain("SendRecv"), .peer = peer,
                                 .sending = sending, .bytes = (uint64_t)count * size_of(type)});
}

NCCL_API(ncclSend, (const void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                    cudaStream_t stream)) {
    (void)buffer;
    return pairwise(count, type, peer, true, comm, stream);
}

NCCL_API(ncclRecv, (void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                    cudaStream_t stream)) {
    (void)buffer;
    return pairwise(count, type, peer, false, comm, stream);
}
