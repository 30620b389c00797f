/* Kernel launches. */
#include "engine.h"
#include "settings.h"

#define MAX_THREADS 1024
#define MAX_GRID_YZ 65535

static __thread struct fakegpu_remote *next_remote __attribute__((tls_model("initial-exec")));

void fakegpu_next_launch(struct fakegpu_remote *remote) { next_remote = remote; }

struct shape {
    unsigned grid[3], block[3], shared_bytes;
};

static bool shape_good(const struct shape *shape) {
    uint64_t threads = (uint64_t)shape->block[0] * shape->block[1] * shape->block[2];
    return shape->grid[0] && shape->grid[1] && shape->grid[2] && shape->grid[0] <= INT32_MAX &&
           shape->grid[1] <= MAX_GRID_YZ && shape->grid[2] <= MAX_GRID_YZ && threads && threads <= MAX_THREADS &&
           shape->block[0] <= MAX_THREADS && shape->block[1] <= MAX_THREADS && shape->block[2] <= 64;
}

static CUresult launch(CUfunction handle, const struct shape *shape, CUstream stream_handle, bool per_thread,
                       uint64_t correlation, void **params) {
    struct fakegpu_remote *remote = next_remote;
    next_remote = NULL;
    if (!shape_good(shape)) return CUDA_ERROR_INVALID_VALUE;
    engine_lock();
    struct stream *stream;
    CUresult result = stream_find(stream_handle, per_thread, &stream);
    struct function *function = result ? NULL : function_check(handle);
    if (!result && !function) result = CUDA_ERROR_INVALID_HANDLE;
    if (!result && remote && stream->capture) result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (!result) {
        struct op op = {
            .kind = remote ? OP_REMOTE : OP_KERNEL,
            .name = function->name,
            .correlation = correlation,
            .grid = {shape->grid[0], shape->grid[1], shape->grid[2]},
            .block = {shape->block[0], shape->block[1], shape->block[2]},
            .shared_bytes = shape->shared_bytes,
        };
        if (remote) {
            op.remote = remote;
        } else {
            bool slow = fault_active(settings.slow_rank) || stream->device == settings.slow_device;
            double factor = slow ? settings.slow_factor : 1;
            op.duration_ns = (int64_t)((double)function->duration_ns * factor * engine_jitter());
        }
        result = stream_submit(stream, &op);
        if (!result && !stream->capture) product_run(function->name, shape->grid[0], params, stream->device);
    }
    engine_unlock();
    return result;
}

#define KERNEL_PARAMETERS                                                                                      \
    CUfunction function, unsigned gridX, unsigned gridY, unsigned gridZ, unsigned blockX, unsigned blockY,     \
        unsigned blockZ, unsigned sharedBytes, CUstream stream
#define KERNEL_SHAPE (&(struct shape){{gridX, gridY, gridZ}, {blockX, blockY, blockZ}, sharedBytes})
#define CONFIG_SHAPE                                                                \
    (&(struct shape){{config->gridDimX, config->gridDimY, config->gridDimZ},        \
                     {config->blockDimX, config->blockDimY, config->blockDimZ},     \
                     config->sharedMemBytes})

CUresult cuLaunchKernel(KERNEL_PARAMETERS, void **params, void **extra) {
    DRIVER_CALL;
    (void)extra;
    RETURN(launch(function, KERNEL_SHAPE, stream, false, CORRELATION, params));
}

CUresult cuLaunchKernel_ptsz(KERNEL_PARAMETERS, void **params, void **extra) {
    DRIVER_CALL;
    (void)extra;
    RETURN(launch(function, KERNEL_SHAPE, stream, true, CORRELATION, params));
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
    DRIVER_CALL;
    (void)extra;
    if (!config) RETURN(CUDA_ERROR_INVALID_VALUE);
    RETURN(launch(function, CONFIG_SHAPE, config->hStream, false, CORRELATION, params));
}

CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
    DRIVER_CALL;
    (void)extra;
    if (!config) RETURN(CUDA_ERROR_INVALID_VALUE);
    RETURN(launch(function, CONFIG_SHAPE, config->hStream, true, CORRELATION, params));
}

CUresult cuLaunchCooperativeKernel(KERNEL_PARAMETERS, void **params) {
    DRIVER_CALL;
    RETURN(launch(function, KERNEL_SHAPE, stream, false, CORRELATION, params));
}
