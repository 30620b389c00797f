/* Calls every exported function that a tracer may watch once, with telling arguments, and says for each on stdout what
 * a tracer must have read: one JSON line a call. See README.md.
 *
 * It is rank 1 of 3 in its communicators, so that no number is trivially right; two forked helpers are the others. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "nccl_abi.h"

#define NRANKS 3
#define RANK 1
#define BIG 0x100000000ull /* does not fit 32 bits */

/* ---- what is expected ---- */

struct field {
    const char *key;
    enum { NUMBER, TRIPLE, TEXT, BYTES } kind;
    int64_t number[3];
    const void *data;
};
#define N(key_, value) {key_, NUMBER, {(int64_t)(value)}, NULL}
#define POINTER(key_, value) N(key_, (uintptr_t)(value))
#define HANDLE(value) POINTER("handle", value)
#define STREAM(value) POINTER("stream", value)
#define COMM(value) POINTER("comm", value)
#define SIZE(value) N("bytes", value)
#define SHAPE(g0, g1, g2, b0, b1, b2, shared) \
    {"grid", TRIPLE, {g0, g1, g2}, NULL}, {"block", TRIPLE, {b0, b1, b2}, NULL}, N("shared_bytes", shared)
#define NAME(value) {"name", TEXT, {0}, value}
#define UID(value) {"uid_hex", BYTES, {128}, value}

static int rank = RANK; /* the helpers make the same NCCL calls, and are silent */
static bool failed;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void report(const char *call, int64_t start_ns, int64_t end_ns, int result, int wanted,
                   const struct field *fields, size_t count) {
    if (result != wanted) {
        fprintf(stderr, "abi_calls: rank %d: %s gave %d, not %d\n", rank, call, result, wanted);
        failed = true;
    }
    if (rank != RANK) return;
    printf("{\"call\": \"%s\", \"start_ns\": %" PRId64 ", \"end_ns\": %" PRId64 ", \"result\": %d, \"expect\": {", call,
           start_ns, end_ns, result);
    for (size_t i = 0; i < count; i++) {
        const struct field *field = &fields[i];
        printf("%s\"%s\": ", i ? ", " : "", field->key);
        if (field->kind == NUMBER) {
            printf("%" PRId64, field->number[0]);
        } else if (field->kind == TRIPLE) {
            printf("[%" PRId64 ", %" PRId64 ", %" PRId64 "]", field->number[0], field->number[1], field->number[2]);
        } else if (field->kind == TEXT) {
            printf("\"%s\"", (const char *)field->data);
        } else {
            putchar('"');
            for (int64_t b = 0; b < field->number[0]; b++) printf("%02x", ((const unsigned char *)field->data)[b]);
            putchar('"');
        }
    }
    printf("}}\n");
    fflush(stdout);
}

#define CALL_WANTING(wanted, call, arguments, ...)                                                          \
    do {                                                                                                    \
        int64_t start_ = now_ns();                                                                          \
        int result_ = (int)call arguments;                                                                  \
        int64_t end_ = now_ns();                                                                            \
        const struct field fields_[] = {__VA_ARGS__};                                                       \
        report(#call, start_, end_, result_, wanted, fields_, sizeof fields_ / sizeof fields_[0]);          \
    } while (0)
#define CALL(call, arguments, ...) CALL_WANTING(0, call, arguments, __VA_ARGS__)

/* ---- two kernels with host stubs ---- */

#define KERNEL(name)                                                                                  \
    FAKEGPU_EXPORT void name(void);                                                                   \
    __attribute__((noinline)) void name(void) { __asm__ volatile("" : : "r"(&name)); }
KERNEL(abi_kernel_runtime)
KERNEL(abi_kernel_config)

__attribute__((constructor)) static void register_kernels(void) {
    static char image[] = "abi";
    void **handle = __cudaRegisterFatBinary(image);
    __cudaRegisterFunction(handle, (const char *)abi_kernel_runtime, "abi_kernel_runtime", "abi_kernel_runtime", -1,
                           NULL, NULL, NULL, NULL, NULL);
    __cudaRegisterFunction(handle, (const char *)abi_kernel_config, "abi_kernel_config", "abi_kernel_config", -1, NULL,
                           NULL, NULL, NULL, NULL);
    __cudaRegisterFatBinaryEnd(handle);
}
#define STUB_RUNTIME ((const void *)abi_kernel_runtime)
#define STUB_CONFIG ((const void *)abi_kernel_config)

/* ---- CUDA ---- */

static CUstream s_plain, s_priority, s_runtime, s_flags, s_rt_priority;

static void *no_args[1];

static void contexts(void) {
    int value;
    char name[64];
    CUdevice device;
    CUcontext context, own;
    void *function;
    CALL(cuInit, (0), );
    CALL(cuDriverGetVersion, (&value), );
    CALL(cuDeviceGetCount, (&value), );
    CALL(cuDeviceGet, (&device, 2), );
    CALL(cuDeviceGetName, (name, sizeof name, device), );
    CALL(cuDeviceGetAttribute, (&value, 16, device), );
    CALL(cuCtxCreate_v2, (&own, 0, device), HANDLE(own));
    CALL(cuCtxDestroy_v2, (own), HANDLE(own));
    CALL(cuDevicePrimaryCtxRetain, (&context, device), HANDLE(context));
    CALL(cuCtxSetCurrent, (context), HANDLE(context));
    CALL(cuCtxGetCurrent, (&context), HANDLE(context));
    CALL(cuGetProcAddress_v2, ("cuMemAlloc", &function, 12000, 0, &value), HANDLE(function), NAME("cuMemAlloc"));
    if (function != (void *)cuMemAlloc_v2) failed = true;
    CALL(cudaGetDeviceCount, (&value), );
    CALL(cudaSetDevice, (2), );
    CALL(cudaGetDevice, (&value), );
    CALL(cudaGetLastError, (), );
    CALL(cudaPeekAtLastError, (), );
}

static void streams(void) {
    CALL(cuStreamCreate, (&s_plain, CU_STREAM_NON_BLOCKING), HANDLE(s_plain));
    CALL(cuStreamCreateWithPriority, (&s_priority, CU_STREAM_NON_BLOCKING, -3), HANDLE(s_priority));
    CALL(cudaStreamCreate, (&s_runtime), HANDLE(s_runtime));
    CALL(cudaStreamCreateWithFlags, (&s_flags, CU_STREAM_NON_BLOCKING), HANDLE(s_flags));
    CALL(cudaStreamCreateWithPriority, (&s_rt_priority, CU_STREAM_NON_BLOCKING, -5), HANDLE(s_rt_priority));
}

static void kernels(void) {
    static const char image[] = "image";
    char path[] = "/proc/self/exe";
    CUmodule from_file, from_data, from_data_ex;
    CUlibrary library, library_file, library_runtime;
    CUfunction function, of_kernel;
    CUkernel kernel;
    const char *name;
    CALL(cuModuleLoad, (&from_file, path), HANDLE(from_file));
    CALL(cuModuleLoadData, (&from_data, image), HANDLE(from_data));
    CALL(cuModuleLoadDataEx, (&from_data_ex, image, 0, NULL, NULL), HANDLE(from_data_ex));
    CALL(cuLibraryLoadData, (&library, image, NULL, NULL, 0, NULL, NULL, 0), HANDLE(library));
    CALL(cuLibraryLoadFromFile, (&library_file, path, NULL, NULL, 0, NULL, NULL, 0), HANDLE(library_file));
    CALL(cudaLibraryLoadData, (&library_runtime, image, NULL, NULL, 0, NULL, NULL, 0), HANDLE(library_runtime));
    CALL(cuModuleGetFunction, (&function, from_data_ex, "abi_module_function"), HANDLE(function),
         POINTER("parent", from_data_ex), NAME("abi_module_function"));
    CALL(cuLibraryGetKernel, (&kernel, library, "abi_library_kernel"), HANDLE(kernel), POINTER("parent", library),
         NAME("abi_library_kernel"));
    CALL(cuKernelGetFunction, (&of_kernel, kernel), HANDLE(of_kernel), POINTER("parent", kernel));
    CALL(cuKernelGetName, (&name, kernel), HANDLE(kernel), NAME(name));
    CALL(cuFuncGetName, (&name, function), HANDLE(function), NAME(name));

    CALL(cuLaunchKernel, (function, 1234567, 54321, 23, 29, 3, 2, 4097, s_plain, no_args, NULL), HANDLE(function),
         SHAPE(1234567, 54321, 23, 29, 3, 2, 4097), STREAM(s_plain));
    CALL(cuLaunchKernel_ptsz, (of_kernel, 2234567, 44321, 24, 30, 4, 3, 5097, s_priority, no_args, NULL),
         HANDLE(of_kernel), SHAPE(2234567, 44321, 24, 30, 4, 3, 5097), STREAM(s_priority));
    CUlaunchConfig config = {3234567, 34321, 25, 31, 5, 4, 6097, s_runtime, NULL, 0};
    CALL(cuLaunchKernelEx, (&config, (CUfunction)kernel, no_args, NULL), HANDLE(kernel),
         SHAPE(3234567, 34321, 25, 31, 5, 4, 6097), STREAM(s_runtime));
    CUlaunchConfig config_ptsz = {4234567, 24321, 26, 32, 6, 5, 7097, s_flags, NULL, 0};
    CALL(cuLaunchKernelEx_ptsz, (&config_ptsz, function, no_args, NULL), HANDLE(function),
         SHAPE(4234567, 24321, 26, 32, 6, 5, 7097), STREAM(s_flags));
    CALL(cuLaunchCooperativeKernel, (of_kernel, 5234567, 14321, 27, 33, 7, 1, 8097, s_rt_priority, no_args),
         HANDLE(of_kernel), SHAPE(5234567, 14321, 27, 33, 7, 1, 8097), STREAM(s_rt_priority));

    CALL(cudaLaunchKernel, (STUB_RUNTIME, (dim3){7654321, 60001, 33}, (dim3){17, 19, 3}, no_args, 9097, s_plain),
         HANDLE(STUB_RUNTIME), SHAPE(7654321, 60001, 33, 17, 19, 3, 9097), STREAM(s_plain));
    CALL(cudaLaunchKernel_ptsz,
         (STUB_CONFIG, (dim3){6654321, 50001, 34}, (dim3){18, 11, 5}, no_args, 10097, s_priority),
         HANDLE(STUB_CONFIG), SHAPE(6654321, 50001, 34, 18, 11, 5, 10097), STREAM(s_priority));
    cudaLaunchConfig_t runtime = {{5654321, 40001, 35}, {13, 11, 7}, 11097, s_runtime, NULL, 0};
    CALL(cudaLaunchKernelExC, (&runtime, STUB_RUNTIME, no_args), HANDLE(STUB_RUNTIME),
         SHAPE(5654321, 40001, 35, 13, 11, 7, 11097), STREAM(s_runtime));
    cudaLaunchConfig_t runtime_ptsz = {{4654321, 30001, 36}, {14, 9, 8}, 12097, s_flags, NULL, 0};
    CALL(cudaLaunchKernelExC_ptsz, (&runtime_ptsz, STUB_CONFIG, no_args), HANDLE(STUB_CONFIG),
         SHAPE(4654321, 30001, 36, 14, 9, 8, 12097), STREAM(s_flags));
    CALL(cudaLaunchCooperativeKernel,
         (STUB_RUNTIME, (dim3){3654321, 20001, 37}, (dim3){15, 8, 6}, no_args, 13097, s_rt_priority),
         HANDLE(STUB_RUNTIME), SHAPE(3654321, 20001, 37, 15, 8, 6, 13097), STREAM(s_rt_priority));

    CALL(cuModuleUnload, (from_file), HANDLE(from_file));
    CALL(cuLibraryUnload, (library_file), HANDLE(library_file));
}

static void graphs(void) {
    CUgraph graph, runtime_graph;
    CUgraphExec exec, runtime_exec;
    CALL(cuStreamBeginCapture_v2, (s_plain, 0), STREAM(s_plain), N("mode", 0));
    CALL(cuStreamEndCapture, (s_plain, &graph), STREAM(s_plain), HANDLE(graph));
    CALL(cuGraphInstantiateWithFlags, (&exec, graph, 0), HANDLE(exec), POINTER("parent", graph));
    CALL(cudaStreamBeginCapture, (s_priority, 2), STREAM(s_priority), N("mode", 2));
    CALL(cudaStreamEndCapture, (s_priority, &runtime_graph), STREAM(s_priority), HANDLE(runtime_graph));
    CALL(cudaGraphInstantiate, (&runtime_exec, runtime_graph, 0), HANDLE(runtime_exec),
         POINTER("parent", runtime_graph));
    CALL(cuGraphLaunch, (exec, s_flags), HANDLE(exec), STREAM(s_flags));
    CALL(cuGraphLaunch_ptsz, (exec, s_runtime), HANDLE(exec), STREAM(s_runtime));
    CALL(cudaGraphLaunch, (runtime_exec, s_priority), HANDLE(runtime_exec), STREAM(s_priority));
    CALL(cudaGraphLaunch_ptsz, (runtime_exec, s_plain), HANDLE(runtime_exec), STREAM(s_plain));
    CALL(cuGraphExecDestroy, (exec), HANDLE(exec));
    CALL(cuGraphDestroy, (graph), HANDLE(graph));
    CALL(cudaGraphExecDestroy, (runtime_exec), HANDLE(runtime_exec));
    CALL(cudaGraphDestroy, (runtime_graph), HANDLE(runtime_graph));
}

static void copies(CUdeviceptr device, CUdeviceptr other, char *host) {
    CUcontext context;
    cuCtxGetCurrent(&context);
    void *to = (void *)(uintptr_t)device;
    const void *from = (const void *)(uintptr_t)other;
    CALL(cuMemcpyAsync, (device, other, BIG + 101, s_plain), HANDLE(device), SIZE(BIG + 101), STREAM(s_plain));
    CALL(cuMemcpyAsync_ptsz, (device + 1, other, BIG + 102, s_priority), HANDLE(device + 1), SIZE(BIG + 102),
         STREAM(s_priority));
    CALL(cuMemcpyHtoDAsync_v2, (device + 2, host, BIG + 103, s_runtime), HANDLE(device + 2), SIZE(BIG + 103),
         STREAM(s_runtime));
    CALL(cuMemcpyHtoDAsync_v2_ptsz, (device + 3, host, BIG + 104, s_flags), HANDLE(device + 3), SIZE(BIG + 104),
         STREAM(s_flags));
    CALL(cuMemcpyDtoHAsync_v2, (host + 4, other, BIG + 105, s_rt_priority), HANDLE(host + 4), SIZE(BIG + 105),
         STREAM(s_rt_priority));
    CALL(cuMemcpyDtoHAsync_v2_ptsz, (host + 5, other, BIG + 106, s_plain), HANDLE(host + 5), SIZE(BIG + 106),
         STREAM(s_plain));
    CALL(cuMemcpyDtoDAsync_v2, (device + 6, other, BIG + 107, s_priority), HANDLE(device + 6), SIZE(BIG + 107),
         STREAM(s_priority));
    CALL(cuMemcpyDtoDAsync_v2_ptsz, (device + 7, other, BIG + 108, s_runtime), HANDLE(device + 7), SIZE(BIG + 108),
         STREAM(s_runtime));
    CALL(cuMemcpyPeerAsync, (device + 8, context, other, context, BIG + 109, s_flags), HANDLE(device + 8),
         SIZE(BIG + 109), STREAM(s_flags));
    CUDA_MEMCPY2D plane = {.srcMemoryType = 2, .srcDevice = other, .srcPitch = 8192, .dstMemoryType = 2,
                           .dstDevice = device + 9, .dstPitch = 16384, .WidthInBytes = 4099, .Height = 1048583};
    CALL(cuMemcpy2DAsync_v2, (&plane, s_rt_priority), HANDLE(device + 9), SIZE(4099ull * 1048583),
         N("width", 4099), N("height", 1048583), STREAM(s_rt_priority));
    CALL(cuMemsetD8Async, (device + 10, 0x5a, BIG + 110, s_plain), HANDLE(device + 10), N("count", BIG + 110),
         SIZE(BIG + 110), N("value", 0x5a), STREAM(s_plain));
    CALL(cuMemsetD8Async_ptsz, (device + 11, 0x6b, BIG + 111, s_priority), HANDLE(device + 11),
         N("count", BIG + 111), SIZE(BIG + 111), N("value", 0x6b), STREAM(s_priority));
    CALL(cuMemsetD32Async, (device + 12, 0x7c7c7c7c, BIG + 112, s_runtime), HANDLE(device + 12),
         N("count", BIG + 112), SIZE(4 * (BIG + 112)), N("value", 0x7c7c7c7c), STREAM(s_runtime));
    CALL(cuMemsetD32Async_ptsz, (device + 16, 0x1d1d1d1d, BIG + 113, s_flags), HANDLE(device + 16),
         N("count", BIG + 113), SIZE(4 * (BIG + 113)), N("value", 0x1d1d1d1d), STREAM(s_flags));
    CALL(cuMemcpyHtoD_v2, (device + 17, host, BIG + 114), HANDLE(device + 17), SIZE(BIG + 114));
    CALL(cuMemcpyDtoH_v2, (host + 18, other, BIG + 115), HANDLE(host + 18), SIZE(BIG + 115));
    CALL(cuMemcpy, (device + 19, other, BIG + 116), HANDLE(device + 19), SIZE(BIG + 116));

    CALL(cudaMemcpyAsync, ((char *)to + 20, host, BIG + 117, cudaMemcpyHostToDevice, s_plain),
         HANDLE(device + 20), SIZE(BIG + 117), N("kind", 1), STREAM(s_plain));
    CALL(cudaMemcpyAsync_ptsz, (host + 21, from, BIG + 118, cudaMemcpyDeviceToHost, s_priority),
         HANDLE(host + 21), SIZE(BIG + 118), N("kind", 2), STREAM(s_priority));
    CALL(cudaMemcpy, ((char *)to + 22, from, BIG + 119, cudaMemcpyDeviceToDevice), HANDLE(device + 22),
         SIZE(BIG + 119), N("kind", 3));
    CALL(cudaMemcpyPeerAsync, ((char *)to + 23, 3, from, 2, BIG + 120, s_runtime), HANDLE(device + 23),
         SIZE(BIG + 120), STREAM(s_runtime));
    CALL(cudaMemcpy2DAsync, ((char *)to + 24, 16384, from, 8192, 5003, 1048589, cudaMemcpyDeviceToDevice, s_flags),
         HANDLE(device + 24), SIZE(5003ull * 1048589), N("width", 5003), N("height", 1048589), N("kind", 3),
         STREAM(s_flags));
    CALL(cudaMemsetAsync, ((char *)to + 25, 0x11, BIG + 121, s_rt_priority), HANDLE(device + 25), SIZE(BIG + 121),
         N("value", 0x11), STREAM(s_rt_priority));
    CALL(cudaMemsetAsync_ptsz, ((char *)to + 26, 0x12, BIG + 122, s_plain), HANDLE(device + 26), SIZE(BIG + 122),
         N("value", 0x12), STREAM(s_plain));
    CALL(cudaMemset, ((char *)to + 27, 0x13, BIG + 123), HANDLE(device + 27), SIZE(BIG + 123), N("value", 0x13));
}

static void memory(void) {
    CUdeviceptr plain, managed, asynchronous;
    void *pinned, *r_plain, *r_managed, *r_asynchronous, *r_pinned, *r_host;
    CALL(cuMemAlloc_v2, (&plain, BIG + 201), HANDLE(plain), SIZE(BIG + 201));
    CALL(cuMemAllocManaged, (&managed, BIG + 202, 1), HANDLE(managed), SIZE(BIG + 202));
    CALL(cuMemAllocAsync, (&asynchronous, BIG + 203, s_plain), HANDLE(asynchronous), SIZE(BIG + 203),
         STREAM(s_plain));
    CALL(cuMemHostAlloc, (&pinned, BIG + 204, 0), HANDLE(pinned), SIZE(BIG + 204));
    CALL(cudaMalloc, (&r_plain, BIG + 205), HANDLE(r_plain), SIZE(BIG + 205));
    CALL(cudaMallocManaged, (&r_managed, BIG + 206, 1), HANDLE(r_managed), SIZE(BIG + 206));
    CALL(cudaMallocAsync, (&r_asynchronous, BIG + 207, s_priority), HANDLE(r_asynchronous), SIZE(BIG + 207),
         STREAM(s_priority));
    CALL(cudaMallocHost, (&r_pinned, BIG + 208), HANDLE(r_pinned), SIZE(BIG + 208));
    CALL(cudaHostAlloc, (&r_host, BIG + 209, 0), HANDLE(r_host), SIZE(BIG + 209));
    copies(plain, (CUdeviceptr)(uintptr_t)r_plain, pinned);
    CALL(cuMemFree_v2, (plain), HANDLE(plain));
    CALL(cuMemFreeAsync, (asynchronous, s_plain), HANDLE(asynchronous), STREAM(s_plain));
    CALL(cuMemFreeHost, (pinned), HANDLE(pinned));
    CALL(cudaFree, (r_plain), HANDLE(r_plain));
    CALL(cudaFreeAsync, (r_asynchronous, s_priority), HANDLE(r_asynchronous), STREAM(s_priority));
    CALL(cudaFreeHost, (r_host), HANDLE(r_host));
}

static void events_and_waiting(void) {
    CUevent event, runtime, flags;
    float milliseconds;
    CALL(cuEventCreate, (&event, CU_EVENT_DEFAULT), HANDLE(event));
    CALL(cudaEventCreate, (&runtime), HANDLE(runtime));
    CALL(cudaEventCreateWithFlags, (&flags, CU_EVENT_DISABLE_TIMING), HANDLE(flags));
    CALL(cuEventRecord, (event, s_plain), HANDLE(event), STREAM(s_plain));
    CALL(cudaEventRecord, (runtime, s_priority), HANDLE(runtime), STREAM(s_priority));
    CALL(cuStreamWaitEvent, (s_runtime, event, 0), HANDLE(event), STREAM(s_runtime));
    CALL(cuStreamWaitEvent_ptsz, (s_flags, runtime, 0), HANDLE(runtime), STREAM(s_flags));
    CALL(cudaStreamWaitEvent, (s_rt_priority, event, 0), HANDLE(event), STREAM(s_rt_priority));
    CALL(cudaStreamWaitEvent_ptsz, (s_plain, runtime, 0), HANDLE(runtime), STREAM(s_plain));
    CALL(cuEventSynchronize, (event), HANDLE(event));
    CALL(cudaEventSynchronize, (runtime), HANDLE(runtime));
    CALL(cuEventQuery, (event), HANDLE(event));
    CALL(cudaEventQuery, (runtime), HANDLE(runtime));
    CALL(cuEventElapsedTime, (&milliseconds, event, runtime), HANDLE(event));
    CALL(cudaEventElapsedTime, (&milliseconds, runtime, event), HANDLE(runtime));
    CALL(cuEventRecord_ptsz, (flags, s_runtime), HANDLE(flags), STREAM(s_runtime));
    CALL(cudaEventRecord_ptsz, (flags, s_flags), HANDLE(flags), STREAM(s_flags));
    CALL(cuStreamSynchronize, (s_plain), STREAM(s_plain));
    CALL(cuStreamSynchronize_ptsz, (s_priority), STREAM(s_priority));
    CALL(cudaStreamSynchronize, (s_runtime), STREAM(s_runtime));
    CALL(cudaStreamSynchronize_ptsz, (s_flags), STREAM(s_flags));
    CALL(cudaDeviceSynchronize, (), );
    CALL(cuStreamQuery, (s_plain), STREAM(s_plain));
    CALL(cudaStreamQuery, (s_priority), STREAM(s_priority));
    CALL(cuCtxSynchronize, (), );
    CALL(cuEventDestroy_v2, (event), HANDLE(event));
    CALL(cudaEventDestroy, (runtime), HANDLE(runtime));
}

/* ---- NCCL: all ranks run this ---- */

struct meeting { /* shared with the helpers */
    _Atomic bool written;
    ncclUniqueId plain, config, scalable;
};

#define COLLECTIVE(count, type, stream_) N("count", count), N("dtype", type), COMM(comm), STREAM(stream_)

static void nccl(struct meeting *meeting) {
    int value;
    ncclResult_t state;
    ncclComm_t comm, configured, scalable, half, shrunk, all[2];
    char *send = (char *)0x7f1234560000, *recv = (char *)0x7f6543210000; /* never read */
    CALL(ncclGetVersion, (&value), );
    if (rank == RANK) {
        CALL(ncclGetUniqueId, (&meeting->plain), UID(&meeting->plain));
        CALL(ncclGetUniqueId, (&meeting->config), UID(&meeting->config));
        CALL(ncclGetUniqueId, (&meeting->scalable), UID(&meeting->scalable));
        meeting->written = true;
    }
    while (!meeting->written) nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    CALL(ncclCommInitRank, (&comm, NRANKS, meeting->plain, rank), COMM(comm), N("nranks", NRANKS), N("rank", rank),
         UID(&meeting->plain));
    CALL(ncclCommInitRankConfig, (&configured, NRANKS, meeting->config, rank, NULL), COMM(configured),
         N("nranks", NRANKS), N("rank", rank), UID(&meeting->config));
    CALL(ncclCommInitRankScalable, (&scalable, NRANKS, rank, 1, &meeting->scalable, NULL), COMM(scalable),
         N("nranks", NRANKS), N("rank", rank), UID(&meeting->scalable));
    CALL(ncclCommInitAll, (all, 2, (const int[]){3, 5}), COMM(all[0]), N("nranks", 2));
    int key = 77 - rank;
    CALL(ncclCommSplit, (comm, 5, key, &half, NULL), POINTER("parent", comm), COMM(half), N("color", 5),
         N("key", key));

    CALL(ncclAllReduce, (send, recv, 2 * BIG + 301, ncclUint8, ncclMax, comm, s_plain),
         COLLECTIVE(2 * BIG + 301, ncclUint8, s_plain), N("redop", ncclMax));
    CALL(ncclReduce, (send, recv, 302, ncclInt32, ncclProd, 2, comm, s_priority),
         COLLECTIVE(302, ncclInt32, s_priority), N("redop", ncclProd), N("peer", 2));
    CALL(ncclBroadcast, (send, recv, 303, ncclFloat64, 1, comm, s_runtime),
         COLLECTIVE(303, ncclFloat64, s_runtime), N("peer", 1));
    CALL(ncclBcast, (send, 304, ncclBfloat16, 2, comm, s_flags), COLLECTIVE(304, ncclBfloat16, s_flags),
         N("peer", 2));
    CALL(ncclReduceScatter, (send, recv, 305, ncclFloat16, ncclAvg, comm, s_rt_priority),
         COLLECTIVE(305, ncclFloat16, s_rt_priority), N("redop", ncclAvg));
    CALL(ncclAllGather, (send, recv, 306, ncclInt64, comm, s_plain), COLLECTIVE(306, ncclInt64, s_plain));
    CALL(ncclAlltoAll, (send, recv, 307, ncclUint64, comm, s_priority), COLLECTIVE(307, ncclUint64, s_priority));
    CALL(ncclGather, (send, recv, 308, ncclFloat8e4m3, 2, comm, s_runtime),
         COLLECTIVE(308, ncclFloat8e4m3, s_runtime), N("peer", 2));
    CALL(ncclScatter, (send, recv, 309, ncclFloat8e5m2, 1, comm, s_flags),
         COLLECTIVE(309, ncclFloat8e5m2, s_flags), N("peer", 1));
    if (rank != 0) {
        int peer = 3 - rank;
        CALL(ncclGroupStart, (), );
        CALL(ncclSend, (send, rank == RANK ? 310 : 311, ncclUint32, peer, comm, s_rt_priority),
             COLLECTIVE(310, ncclUint32, s_rt_priority), N("peer", peer));
        CALL(ncclRecv, (recv, rank == RANK ? 311 : 310, ncclInt8, peer, comm, s_rt_priority),
             COLLECTIVE(311, ncclInt8, s_rt_priority), N("peer", peer));
        CALL(ncclGroupEnd, (), );
        CALL(ncclCommShrink, (comm, (int[]){0}, 1, &shrunk, NULL, 0), POINTER("parent", comm), COMM(shrunk));
    }
    void *registration;
    CALL(ncclCommRegister, (comm, send, BIG + 312, &registration), COMM(comm), SIZE(BIG + 312),
         HANDLE(registration));
    CALL(ncclCommDeregister, (comm, registration), COMM(comm), HANDLE(registration));
    CALL(ncclCommCount, (comm, &value), COMM(comm));
    CALL(ncclCommUserRank, (comm, &value), COMM(comm));
    CALL(ncclCommCuDevice, (comm, &value), COMM(comm));
    CALL(ncclCommGetAsyncError, (comm, &state), COMM(comm));
    CALL(ncclCommFinalize, (comm), COMM(comm));
    CALL(ncclCommDestroy, (comm), COMM(comm));
    CALL(ncclCommAbort, (configured), COMM(configured));
}

static pid_t start_helper(int as, struct meeting *meeting) {
    pid_t parent = getpid(), pid = fork();
    if (pid) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    rank = as;
    while (!meeting->written) nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    cudaSetDevice(as);
    cudaStream_t *made[] = {&s_plain, &s_priority, &s_runtime, &s_flags, &s_rt_priority};
    for (size_t i = 0; i < sizeof made / sizeof made[0]; i++) cudaStreamCreateWithFlags(made[i], CU_STREAM_NON_BLOCKING);
    nccl(meeting);
    _exit(failed);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fputs("usage: abi_calls FILE  (prints \"ready\", and begins when FILE exists)\n", stderr);
        return 2;
    }
    struct meeting *meeting =
        mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (meeting == MAP_FAILED) return 1;
    puts("ready");
    fflush(stdout);
    struct stat status;
    while (stat(argv[1], &status)) nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);

    /* Forked before any CUDA call, which would not survive it. */
    pid_t helpers[] = {start_helper(0, meeting), start_helper(2, meeting)};
    contexts();
    streams();
    kernels();
    graphs();
    memory();
    events_and_waiting();
    nccl(meeting);
    for (size_t i = 0; i < sizeof helpers / sizeof helpers[0]; i++) {
        int ended = 1;
        if (waitpid(helpers[i], &ended, 0) != helpers[i] || ended) failed = true;
    }
    CALL(cuStreamDestroy_v2, (s_plain), HANDLE(s_plain));
    CALL(cudaStreamDestroy, (s_priority), HANDLE(s_priority));
    return failed;
}
