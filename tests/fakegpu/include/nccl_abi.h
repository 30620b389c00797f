/* The NCCL ABI that the fake speaks: own declarations of publicly documented C signatures. Every ncclX has a twin
 * pncclX at the same address, as in the real library. */
#ifndef FAKEGPU_NCCL_ABI_H
#define FAKEGPU_NCCL_ABI_H

#include "cuda_abi.h"

typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
typedef struct ncclConfig_v21700 ncclConfig_t; /* never looked into */

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclNumResults = 8
} ncclResult_t;

typedef enum { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4, ncclNumOps = 5 } ncclRedOp_t;

typedef enum {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11,
    ncclNumTypes = 12
} ncclDataType_t;

#define NCCL_SPLIT_NOCOLOR (-1)

#define NCCL_DECLARE(name, args)              \
    FAKEGPU_EXPORT ncclResult_t name args;    \
    FAKEGPU_EXPORT ncclResult_t p##name args

NCCL_DECLARE(ncclGetVersion, (int *version));
NCCL_DECLARE(ncclGetUniqueId, (ncclUniqueId * id));
NCCL_DECLARE(ncclCommInitRank, (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank));
NCCL_DECLARE(ncclCommInitRankConfig,
             (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config));
NCCL_DECLARE(ncclCommInitRankScalable,
             (ncclComm_t * comm, int nranks, int rank, int idCount, ncclUniqueId *ids, ncclConfig_t *config));
NCCL_DECLARE(ncclCommInitAll, (ncclComm_t * comms, int deviceCount, const int *devices));
NCCL_DECLARE(ncclCommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config));
NCCL_DECLARE(ncclCommShrink, (ncclComm_t comm, int *excluded, int excludedCount, ncclComm_t *newcomm,
                              ncclConfig_t *config, int flags));
NCCL_DECLARE(ncclCommDestroy, (ncclComm_t comm));
NCCL_DECLARE(ncclCommAbort, (ncclComm_t comm));
NCCL_DECLARE(ncclCommFinalize, (ncclComm_t comm));
NCCL_DECLARE(ncclCommCount, (const ncclComm_t comm, int *count));
NCCL_DECLARE(ncclCommUserRank, (const ncclComm_t comm, int *rank));
NCCL_DECLARE(ncclCommCuDevice, (const ncclComm_t comm, int *device));
NCCL_DECLARE(ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t *error));
NCCL_DECLARE(ncclCommRegister, (const ncclComm_t comm, void *buffer, size_t bytes, void **handle));
NCCL_DECLARE(ncclCommDeregister, (const ncclComm_t comm, void *handle));
FAKEGPU_EXPORT const char *ncclGetErrorString(ncclResult_t result);
FAKEGPU_EXPORT const char *pncclGetErrorString(ncclResult_t result);
FAKEGPU_EXPORT const char *ncclGetLastError(ncclComm_t comm);
FAKEGPU_EXPORT const char *pncclGetLastError(ncclComm_t comm);

NCCL_DECLARE(ncclAllReduce, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                             ncclComm_t comm, cudaStream_t stream));
NCCL_DECLARE(ncclReduce, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                          ncclComm_t comm, cudaStream_t stream));
NCCL_DECLARE(ncclBroadcast, (const void *send, void *recv, size_t count, ncclDataType_t type, int root,
                             ncclComm_t comm, cudaStream_t stream));
NCCL_DECLARE(ncclBcast, (void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         cudaStream_t stream));
NCCL_DECLARE(ncclReduceScatter, (const void *send, void *recv, size_t recvCount, ncclDataType_t type, ncclRedOp_t op,
                                 ncclComm_t comm, cudaStream_t stream));
NCCL_DECLARE(ncclAllGather, (const void *send, void *recv, size_t sendCount, ncclDataType_t type, ncclComm_t comm,
                             cudaStream_t stream));
NCCL_DECLARE(ncclAlltoAll, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                            cudaStream_t stream));
NCCL_DECLARE(ncclGather, (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                          cudaStream_t stream));
NCCL_DECLARE(ncclScatter, (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream));
NCCL_DECLARE(ncclSend, (const void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                        cudaStream_t stream));
NCCL_DECLARE(ncclRecv, (void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                        cudaStream_t stream));
NCCL_DECLARE(ncclGroupStart, (void));
NCCL_DECLARE(ncclGroupEnd, (void));

#endif
