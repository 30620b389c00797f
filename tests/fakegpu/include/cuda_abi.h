/* The part of the CUDA driver and runtime ABI that the fake GPU speaks: own declarations of publicly documented C
 * signatures. Structures are laid out as callers of the real libraries lay them out; handles are opaque. */
#ifndef FAKEGPU_CUDA_ABI_H
#define FAKEGPU_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

#define FAKEGPU_EXPORT __attribute__((visibility("default")))

/* ---- driver types ---- */
typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_INVALID_CONFIGURATION = 9, /* runtime only */
    CUDA_ERROR_INVALID_DEVICE_FUNCTION = 98, /* runtime only */
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_FILE_NOT_FOUND = 301,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
};

enum { CU_STREAM_DEFAULT = 0, CU_STREAM_NON_BLOCKING = 1 };
enum { CU_EVENT_DEFAULT = 0, CU_EVENT_BLOCKING_SYNC = 1, CU_EVENT_DISABLE_TIMING = 2 };
#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)
#define CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM 2

typedef struct {
    unsigned gridDimX, gridDimY, gridDimZ;
    unsigned blockDimX, blockDimY, blockDimZ;
    unsigned sharedMemBytes;
    CUstream hStream;
    void *attrs;
    unsigned numAttrs;
} CUlaunchConfig;
_Static_assert(offsetof(CUlaunchConfig, hStream) == 32, "CUlaunchConfig layout");
_Static_assert(offsetof(CUlaunchConfig, numAttrs) == 48, "CUlaunchConfig layout");

typedef struct {
    size_t srcXInBytes, srcY;
    unsigned srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    void *srcArray;
    size_t srcPitch;
    size_t dstXInBytes, dstY;
    unsigned dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    void *dstArray;
    size_t dstPitch;
    size_t WidthInBytes, Height;
} CUDA_MEMCPY2D;

/* ---- driver functions ---- */
#define DRIVER(name, args) FAKEGPU_EXPORT CUresult name args
/* A function and its per-thread-default-stream twin. */
#define DRIVER_PTSZ(name, args) \
    DRIVER(name, args);         \
    DRIVER(name##_ptsz, args)

DRIVER(cuInit, (unsigned flags));
DRIVER(cuDriverGetVersion, (int *version));
DRIVER(cuDeviceGet, (CUdevice * device, int ordinal));
DRIVER(cuDeviceGetCount, (int *count));
DRIVER(cuDeviceGetName, (char *name, int length, CUdevice device));
DRIVER(cuDeviceGetAttribute, (int *value, int attribute, CUdevice device));
DRIVER(cuCtxCreate_v2, (CUcontext * context, unsigned flags, CUdevice device));
DRIVER(cuCtxGetCurrent, (CUcontext * context));
DRIVER(cuCtxSetCurrent, (CUcontext context));
DRIVER(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device));
DRIVER(cuCtxSynchronize, (void));
DRIVER(cuCtxDestroy_v2, (CUcontext context));
DRIVER(cuGetProcAddress_v2, (const char *symbol, void **function, int version, uint64_t flags, int *status));

DRIVER(cuStreamCreate, (CUstream * stream, unsigned flags));
DRIVER(cuStreamCreateWithPriority, (CUstream * stream, unsigned flags, int priority));
DRIVER(cuStreamDestroy_v2, (CUstream stream));
DRIVER_PTSZ(cuStreamSynchronize, (CUstream stream));
DRIVER_PTSZ(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags));
DRIVER(cuStreamQuery, (CUstream stream));
DRIVER(cuEventCreate, (CUevent * event, unsigned flags));
DRIVER_PTSZ(cuEventRecord, (CUevent event, CUstream stream));
DRIVER(cuEventSynchronize, (CUevent event));
DRIVER(cuEventQuery, (CUevent event));
DRIVER(cuEventElapsedTime, (float *milliseconds, CUevent start, CUevent end));
DRIVER(cuEventDestroy_v2, (CUevent event));

DRIVER_PTSZ(cuLaunchKernel,
            (CUfunction function, unsigned gridX, unsigned gridY, unsigned gridZ, unsigned blockX, unsigned blockY,
             unsigned blockZ, unsigned sharedBytes, CUstream stream, void **params, void **extra));
DRIVER_PTSZ(cuLaunchKernelEx, (const CUlaunchConfig *config, CUfunction function, void **params, void **extra));
DRIVER(cuLaunchCooperativeKernel,
       (CUfunction function, unsigned gridX, unsigned gridY, unsigned gridZ, unsigned blockX, unsigned blockY,
        unsigned blockZ, unsigned sharedBytes, CUstream stream, void **params));
DRIVER_PTSZ(cuGraphLaunch, (CUgraphExec exec, CUstream stream));
DRIVER(cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags));
DRIVER(cuGraphExecDestroy, (CUgraphExec exec));
DRIVER(cuGraphDestroy, (CUgraph graph));
DRIVER(cuStreamBeginCapture_v2, (CUstream stream, int mode));
DRIVER(cuStreamEndCapture, (CUstream stream, CUgraph *graph));

DRIVER_PTSZ(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream));
DRIVER_PTSZ(cuMemcpyHtoDAsync_v2, (CUdeviceptr dst, const void *src, size_t bytes, CUstream stream));
DRIVER_PTSZ(cuMemcpyDtoHAsync_v2, (void *dst, CUdeviceptr src, size_t bytes, CUstream stream));
DRIVER_PTSZ(cuMemcpyDtoDAsync_v2, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream));
DRIVER(cuMemcpyPeerAsync, (CUdeviceptr dst, CUcontext dstContext, CUdeviceptr src, CUcontext srcContext, size_t bytes,
                           CUstream stream));
DRIVER(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *copy, CUstream stream));
DRIVER_PTSZ(cuMemsetD8Async, (CUdeviceptr dst, unsigned char value, size_t count, CUstream stream));
DRIVER_PTSZ(cuMemsetD32Async, (CUdeviceptr dst, unsigned value, size_t count, CUstream stream));
DRIVER(cuMemcpyHtoD_v2, (CUdeviceptr dst, const void *src, size_t bytes));
DRIVER(cuMemcpyDtoH_v2, (void *dst, CUdeviceptr src, size_t bytes));
DRIVER(cuMemcpy, (CUdeviceptr dst, CUdeviceptr src, size_t bytes));

DRIVER(cuMemAlloc_v2, (CUdeviceptr * pointer, size_t bytes));
DRIVER(cuMemAllocManaged, (CUdeviceptr * pointer, size_t bytes, unsigned flags));
DRIVER(cuMemAllocAsync, (CUdeviceptr * pointer, size_t bytes, CUstream stream));
DRIVER(cuMemFree_v2, (CUdeviceptr pointer));
DRIVER(cuMemFreeAsync, (CUdeviceptr pointer, CUstream stream));
DRIVER(cuMemHostAlloc, (void **pointer, size_t bytes, unsigned flags));
DRIVER(cuMemFreeHost, (void *pointer));

DRIVER(cuModuleLoad, (CUmodule * module, const char *path));
DRIVER(cuModuleLoadData, (CUmodule * module, const void *image));
DRIVER(cuModuleLoadDataEx, (CUmodule * module, const void *image, unsigned optionCount, int *options, void **values));
DRIVER(cuModuleUnload, (CUmodule module));
DRIVER(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char *name));
DRIVER(cuLibraryLoadData, (CUlibrary * library, const void *code, int *jitOptions, void **jitValues, unsigned jitCount,
                           int *libraryOptions, void **libraryValues, unsigned libraryCount));
DRIVER(cuLibraryLoadFromFile, (CUlibrary * library, const char *path, int *jitOptions, void **jitValues,
                               unsigned jitCount, int *libraryOptions, void **libraryValues, unsigned libraryCount));
DRIVER(cuLibraryUnload, (CUlibrary library));
DRIVER(cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char *name));
DRIVER(cuKernelGetFunction, (CUfunction * function, CUkernel kernel));
DRIVER(cuKernelGetName, (const char **name, CUkernel kernel));
DRIVER(cuFuncGetName, (const char **name, CUfunction function));

/* ---- runtime types: its handles are the driver's, its error numbers mostly too ---- */
typedef int cudaError_t;
typedef CUstream cudaStream_t;
typedef CUevent cudaEvent_t;
typedef CUgraph cudaGraph_t;
typedef CUgraphExec cudaGraphExec_t;
typedef CUlibrary cudaLibrary_t;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4,
};

typedef struct {
    unsigned x, y, z;
} dim3;

typedef struct {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    void *attrs;
    unsigned numAttrs;
} cudaLaunchConfig_t;
_Static_assert(offsetof(cudaLaunchConfig_t, dynamicSmemBytes) == 24, "cudaLaunchConfig_t layout");
_Static_assert(offsetof(cudaLaunchConfig_t, stream) == 32, "cudaLaunchConfig_t layout");

/* ---- runtime functions ---- */
#define RUNTIME(name, args) FAKEGPU_EXPORT cudaError_t name args
#define RUNTIME_PTSZ(name, args) \
    RUNTIME(name, args);         \
    RUNTIME(name##_ptsz, args)

RUNTIME_PTSZ(cudaLaunchKernel, (const void *stub, dim3 grid, dim3 block, void **args, size_t sharedBytes,
                                cudaStream_t stream));
RUNTIME_PTSZ(cudaLaunchKernelExC, (const cudaLaunchConfig_t *config, const void *stub, void **args));
RUNTIME(cudaLaunchCooperativeKernel, (const void *stub, dim3 grid, dim3 block, void **args, size_t sharedBytes,
                                      cudaStream_t stream));
RUNTIME_PTSZ(cudaGraphLaunch, (cudaGraphExec_t exec, cudaStream_t stream));
RUNTIME(cudaGraphInstantiate, (cudaGraphExec_t * exec, cudaGraph_t graph, unsigned long long flags));
RUNTIME(cudaGraphExecDestroy, (cudaGraphExec_t exec));
RUNTIME(cudaGraphDestroy, (cudaGraph_t graph));
RUNTIME(cudaStreamBeginCapture, (cudaStream_t stream, int mode));
RUNTIME(cudaStreamEndCapture, (cudaStream_t stream, cudaGraph_t *graph));

RUNTIME_PTSZ(cudaMemcpyAsync, (void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                               cudaStream_t stream));
RUNTIME(cudaMemcpy, (void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind));
RUNTIME(cudaMemcpyPeerAsync, (void *dst, int dstDevice, const void *src, int srcDevice, size_t bytes,
                              cudaStream_t stream));
RUNTIME(cudaMemcpy2DAsync, (void *dst, size_t dstPitch, const void *src, size_t srcPitch, size_t width, size_t height,
                            enum cudaMemcpyKind kind, cudaStream_t stream));
RUNTIME_PTSZ(cudaMemsetAsync, (void *dst, int value, size_t bytes, cudaStream_t stream));
RUNTIME(cudaMemset, (void *dst, int value, size_t bytes));

RUNTIME(cudaStreamCreate, (cudaStream_t * stream));
RUNTIME(cudaStreamCreateWithFlags, (cudaStream_t * stream, unsigned flags));
RUNTIME(cudaStreamCreateWithPriority, (cudaStream_t * stream, unsigned flags, int priority));
RUNTIME(cudaStreamDestroy, (cudaStream_t stream));
RUNTIME_PTSZ(cudaStreamSynchronize, (cudaStream_t stream));
RUNTIME_PTSZ(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags));
RUNTIME(cudaStreamQuery, (cudaStream_t stream));
RUNTIME(cudaEventCreate, (cudaEvent_t * event));
RUNTIME(cudaEventCreateWithFlags, (cudaEvent_t * event, unsigned flags));
RUNTIME_PTSZ(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream));
RUNTIME(cudaEventSynchronize, (cudaEvent_t event));
RUNTIME(cudaEventQuery, (cudaEvent_t event));
RUNTIME(cudaEventElapsedTime, (float *milliseconds, cudaEvent_t start, cudaEvent_t end));
RUNTIME(cudaEventDestroy, (cudaEvent_t event));
RUNTIME(cudaDeviceSynchronize, (void));

RUNTIME(cudaMalloc, (void **pointer, size_t bytes));
RUNTIME(cudaMallocManaged, (void **pointer, size_t bytes, unsigned flags));
RUNTIME(cudaMallocAsync, (void **pointer, size_t bytes, cudaStream_t stream));
RUNTIME(cudaMallocHost, (void **pointer, size_t bytes));
RUNTIME(cudaHostAlloc, (void **pointer, size_t bytes, unsigned flags));
RUNTIME(cudaFree, (void *pointer));
RUNTIME(cudaFreeAsync, (void *pointer, cudaStream_t stream));
RUNTIME(cudaFreeHost, (void *pointer));

RUNTIME(cudaSetDevice, (int device));
RUNTIME(cudaGetDevice, (int *device));
RUNTIME(cudaGetDeviceCount, (int *count));
RUNTIME(cudaGetLastError, (void));
RUNTIME(cudaPeekAtLastError, (void));
FAKEGPU_EXPORT const char *cudaGetErrorString(cudaError_t error);
RUNTIME(cudaLibraryLoadData, (cudaLibrary_t * library, const void *code, int *jitOptions, void **jitValues,
                              unsigned jitCount, int *libraryOptions, void **libraryValues, unsigned libraryCount));

/* What nvcc's generated constructors call. */
FAKEGPU_EXPORT void **__cudaRegisterFatBinary(void *image);
FAKEGPU_EXPORT void __cudaRegisterFatBinaryEnd(void **handle);
FAKEGPU_EXPORT void __cudaUnregisterFatBinary(void **handle);
FAKEGPU_EXPORT void __cudaRegisterFunction(void **handle, const char *stub, char *deviceFunction,
                                           const char *deviceName, int threadLimit, void *tid, void *bid,
                                           dim3 *blockDim, dim3 *gridDim, int *warpSize);

#endif
