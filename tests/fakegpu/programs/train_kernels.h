/* The kernels of fake_train: host stubs like those nvcc generates, with the names that profiles show. */
#ifndef TRAIN_KERNELS_H
#define TRAIN_KERNELS_H

#include "cuda_abi.h"

#define TRAIN_KERNELS(X)                                                                      \
    X(embedding_lookup_bf16)                                                                  \
    X(gemm_bf16_128x128)                                                                      \
    X(gemm_bf16_256x128)                                                                      \
    X(flash_fwd_kernel_hdim128)                                                               \
    X(elementwise_silu_mul)                                                                   \
    X(cross_entropy_forward)                                                                  \
    X(cross_entropy_backward)                                                                 \
    X(gemm_bf16_128x128_nt)                                                                   \
    X(gemm_bf16_128x128_tn)                                                                   \
    X(flash_bwd_kernel_hdim128)                                                               \
    X(elementwise_silu_mul_backward)                                                          \
    X(rmsnorm_backward)                                                                       \
    X(multi_tensor_l2norm)                                                                    \
    X(multi_tensor_scale)                                                                     \
    X(multi_tensor_adamw)

/* Visible, as nvcc's are: tools name kernels by the symbol of the stub. */
#define DECLARE_STUB(name) \
    FAKEGPU_EXPORT void name(dim3 grid, dim3 block, void **args, size_t sharedBytes, cudaStream_t stream);
TRAIN_KERNELS(DECLARE_STUB)
#undef DECLARE_STUB

/* Loaded at run time and launched through the driver, as Triton does. */
#define TRITON_KERNEL "triton_fused_add_rmsnorm_0"

#endif
