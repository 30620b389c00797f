/* The kernels of fake_plan: host stubs like those nvcc generates. Plans name them by number. */
#ifndef PLAN_KERNELS_H
#define PLAN_KERNELS_H

#include "cuda_abi.h"

/* Name, microseconds, blocks (x, y), threads. */
#define PLAN_KERNELS(X)                               \
    X(embedding_lookup_bf16, 100, 4096, 1, 256)       \
    X(gemm_bf16_128x128, 400, 96, 32, 256)            \
    X(gemm_bf16_256x128, 600, 64, 32, 256)            \
    X(attention_fwd_hdim128, 500, 32, 32, 128)        \
    X(layer_norm_fwd, 100, 4096, 1, 256)              \
    X(elementwise_gelu, 100, 16384, 1, 512)           \
    X(cross_entropy_forward, 200, 4096, 1, 1024)      \
    X(cross_entropy_backward, 200, 4096, 1, 1024)     \
    X(gemm_bf16_128x128_nt, 600, 128, 32, 256)        \
    X(gemm_bf16_128x128_tn, 600, 32, 32, 256)         \
    X(attention_bwd_hdim128, 1000, 32, 32, 256)       \
    X(layer_norm_bwd, 150, 4096, 1, 256)              \
    X(elementwise_gelu_backward, 150, 16384, 1, 512)  \
    X(multi_tensor_l2norm, 150, 320, 1, 512)          \
    X(multi_tensor_adamw, 500, 320, 1, 512)           \
    X(moe_topk_router, 100, 1024, 1, 256)

#define PLAN_KERNEL_COUNT 16

/* `grid_x` 0: its own grid. The duration goes with the grid. */
void plan_launch(int kernel, unsigned grid_x, cudaStream_t stream);

/* Visible, as nvcc's are: tools name kernels by the symbol of the stub. */
#define DECLARE_STUB(name, us, x, y, threads) \
    FAKEGPU_EXPORT void name(dim3 grid, dim3 block, void **args, size_t sharedBytes, cudaStream_t stream);
PLAN_KERNELS(DECLARE_STUB)
#undef DECLARE_STUB

#endif
