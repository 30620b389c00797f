/* Launches of kernels and graphs. */
#include "runtime.h"

/* The driver says "invalid value" for what the runtime calls an invalid configuration. */
static cudaError_t launch_error(CUresult result) {
    return runtime_error(result == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_INVALID_CONFIGURATION : result);
}

cudaError_t cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **args, size_t sharedBytes,
                             cudaStream_t stream) {
    RUNTIME_CALL;
    CUfunction function;
    cudaError_t error = runtime_function(stub, &function);
    if (error) RETURN(runtime_error(error));
    RETURN(launch_error(cuLaunchKernel(function, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                       (unsigned)sharedBytes, stream, args, NULL)));
}

cudaError_t cudaLaunchKernel_ptsz(const void *stub, dim3 grid, dim3 block, void **args, size_t sharedBytes,
                                  cudaStream_t stream) {
    RUNTIME_CALL;
    CUfunction function;
    cudaError_t error = runtime_function(stub, &function);
    if (error) RETURN(runtime_error(error));
    RETURN(launch_error(cuLaunchKernel_ptsz(function, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                            (unsigned)sharedBytes, stream, args, NULL)));
}

static CUlaunchConfig driver_config(const cudaLaunchConfig_t *config) {
    return (CUlaunchConfig){
        config->gridDim.x,  config->gridDim.y,  config->gridDim.z,
        config->blockDim.x, config->blockDim.y, config->blockDim.z,
        (unsigned)config->dynamicSmemBytes, config->stream, config->attrs, config->numAttrs,
    };
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *stub, void **args) {
    RUNTIME_CALL;
    CUfunction function;
    cudaError_t error = config ? runtime_function(stub, &function) : cudaErrorInvalidValue;
    if (error) RETURN(runtime_error(error));
    CUlaunchConfig converted = driver_config(config);
    RETURN(launch_error(cuLaunchKernelEx(&converted, function, args, NULL)));
}

cudaError_t cudaLaunchKernelExC_ptsz(const cudaLaunchConfig_t *config, const void *stub, void **args) {
    RUNTIME_CALL;
    CUfunction function;
    cudaError_t error = config ? runtime_function(stub, &function) : cudaErrorInvalidValue;
    if (error) RETURN(runtime_error(error));
    CUlaunchConfig converted = driver_config(config);
    RETURN(launch_error(cuLaunchKernelEx_ptsz(&converted, function, args, NULL)));
}

cudaError_t cudaLaunchCooperativeKernel(const void *stub, dim3 grid, dim3 block, void **args, size_t sharedBytes,
                                        cudaStream_t stream) {
    RUNTIME_CALL;
    CUfunction function;
    cudaError_t error = runtime_function(stub, &function);
    if (error) RETURN(runtime_error(error));
    RETURN(launch_error(cuLaunchCooperativeKernel(function, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                                  (unsigned)sharedBytes, stream, args)));
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuGraphLaunch(exec, stream));
}

cudaError_t cudaGraphLaunch_ptsz(cudaGraphExec_t exec, cudaStream_t stream) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuGraphLaunch_ptsz(exec, stream));
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuGraphInstantiateWithFlags(exec, graph, flags));
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuGraphExecDestroy(exec));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuGraphDestroy(graph));
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuStreamBeginCapture_v2(stream, mode));
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuStreamEndCapture(stream, graph));
}
