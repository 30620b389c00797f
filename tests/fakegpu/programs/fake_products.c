/* A job on one GPU whose steps multiply matrices in every way that cuBLAS has, attend in the ways that PyTorch has, and
 * launch other kernels in between. See README.md. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cublas_abi.h"
#include "torch_abi.h"

#define CHECK(call)                                                    \
    do {                                                               \
        int failed = (call);                                           \
        if (failed) {                                                  \
            fprintf(stderr, "fake_products: %s: %d\n", #call, failed); \
            exit(1);                                                   \
        }                                                              \
    } while (0)

static CUfunction elementwise, by_hand, attention;
static cublasHandle_t handle;
static cublasLtHandle_t lt;

static void run(CUfunction function) {
    void *none[] = {NULL};
    CHECK(cuLaunchKernel(function, 64, 1, 1, 128, 1, 1, 0, NULL, none, NULL));
}

static void matmul(int transposed, uint64_t m, uint64_t n, uint64_t k, int batch) {
    cublasLtMatrixLayout_t a, b, d;
    float one = 1, zero = 0;
    CHECK(cublasLtMatrixLayoutCreate(&a, CUDA_R_16BF, transposed ? k : m, transposed ? m : k, 8));
    CHECK(cublasLtMatrixLayoutCreate(&b, CUDA_R_16BF, k, n, 8));
    CHECK(cublasLtMatrixLayoutCreate(&d, CUDA_R_16BF, m, n, 8));
    cublasLtMatrixLayout_t all[] = {a, b, d};
    for (int i = 0; i < 3; i++)
        CHECK(cublasLtMatrixLayoutSetAttribute(all[i], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch));
    CHECK(cublasLtMatmul(lt, NULL, &one, NULL, a, NULL, b, &zero, NULL, d, NULL, d, NULL, NULL, 0, NULL));
    for (int i = 0; i < 3; i++) CHECK(cublasLtMatrixLayoutDestroy(all[i]));
}

static TensorImpl tensor(uint16_t type, int64_t a, int64_t b, int64_t c, int64_t d) {
    return (TensorImpl){.dimensions = 4, .sizes = {a, b, c, d}, .elements = a * b * c * d, .type = type};
}

/* Each way that PyTorch has to attend: after each a kernel that is none of it. */
static void attend(void) {
    static const Maybe empty, some = {.there = 1};
    static const int64_t longest;
    const Scale scale = {0, 0};
    const Masks masks = {{1, 1, 1, 0}};
    TensorImpl long_q = tensor(TORCH_BFLOAT16, 2, 8, 128, 64), short_q = tensor(TORCH_HALF, 3, 4, 96, 32),
               short_k = tensor(TORCH_HALF, 3, 2, 160, 32), wide_v = tensor(TORCH_HALF, 3, 2, 160, 48),
               by_length = tensor(TORCH_BFLOAT16, 2, 128, 8, 64), odd = long_q, packed = long_q;
    const Tensor q = &long_q, sq = &short_q, sk = &short_k, sv = &wide_v, bl = &by_length, o = &odd, p = &packed;
    odd.elements++;
    packed.dimensions = 3;
    sdpa_flash(&q, &q, &q, 0.5, 1, 0, scale);
    run(elementwise);
    sdpa_flash_backward(&q, &q, &q, &q, &q, &q, &q, &q, &longest, &longest, 0.5, 1, &q, &q, scale);
    run(elementwise);
    flash(&bl, &bl, &bl, &empty, &empty, &longest, &longest, 0, 0, 0, scale, &empty, &empty, &empty, &empty, &empty,
          empty);
    run(elementwise);
    efficient(&bl, &bl, &bl, &empty, &empty, &empty, &empty, &empty, 0, 2, 1, scale, &empty, empty);
    run(elementwise);
    sdpa_efficient_backward(&sq, &sq, &sk, &sv, &sq, &sq, &sq, &sq, &sq, 0, masks, 0, scale);
    sdpa_cudnn_backward(&q, &q, &q, &q, &q, &q, &q, &q, &q, &q, &q, &longest, &longest, 0, 1, scale);
    run(elementwise);
    /* A window, packed sequences, lengths, and tensors of another layout: their work is not known. */
    flash(&bl, &bl, &bl, &empty, &empty, &longest, &longest, 0, 0, 0, scale, &some, &empty, &empty, &empty, &empty,
          empty);
    flash(&p, &p, &p, &some, &some, &longest, &longest, 0, 0, 0, scale, &empty, &empty, &empty, &empty, &empty, empty);
    efficient(&bl, &bl, &bl, &empty, &some, &some, &empty, &empty, 0, 0, 1, scale, &empty, empty);
    sdpa_flash(&q, &o, &q, 0, 0, 0, scale);
    run(elementwise);
}

/* After each product a kernel that is none, from the same function and so from the same stack. */
static void step(void) {
    float one = 1, zero = 0;
    CHECK(cublasGemmEx(handle, 0, 0, 512, 384, 256, &one, NULL, CUDA_R_16BF, 512, NULL, CUDA_R_16BF, 256, &zero, NULL,
                       CUDA_R_16BF, 512, 68, -1));
    run(elementwise);
    CHECK(cublasGemmEx_64(handle, 0, 0, 768, 384, 256, &one, NULL, CUDA_R_16F, 512, NULL, CUDA_R_16F, 256, &zero, NULL,
                          CUDA_R_16F, 512, 68, -1));
    run(elementwise);
    CHECK(cublasSgemm_v2(handle, 0, 1, 128, 96, 64, &one, NULL, 128, NULL, 96, &zero, NULL, 128));
    run(elementwise);
    CHECK(cublasGemmStridedBatchedEx(handle, 0, 0, 64, 48, 32, &one, NULL, CUDA_R_16BF, 64, 2048, NULL, CUDA_R_16BF, 32,
                                     1536, &zero, NULL, CUDA_R_16BF, 64, 3072, 24, 68, -1));
    run(elementwise);
    CHECK(cublasHgemmBatched(handle, 0, 0, 80, 48, 32, &one, NULL, 64, NULL, 32, &zero, NULL, 64, 12));
    run(elementwise);
    matmul(1, 1024, 640, 512, 1);
    run(elementwise);
    matmul(0, 256, 640, 512, 6);
    run(elementwise);
    matmul(0, 256, 640, 8192, 1); /* two kernels */
    run(elementwise);
    run(by_hand);
    attend();
    run(attention); /* by a library of its own */
    CHECK(cuStreamSynchronize(NULL));
}

int main(int argc, char **argv) {
    if (argc != 2 && argc != 3) {
        fprintf(stderr, "usage: fake_products STEPS [PAUSE_US]: so many steps, with a pause after each\n");
        return 2;
    }
    long steps = atol(argv[1]), pause_us = argc == 3 ? atol(argv[2]) : 2000;
    CUmodule module;
    CHECK(cudaSetDevice(0));
    CHECK(cuModuleLoadData(&module, "products"));
    CHECK(cuModuleGetFunction(&elementwise, module, "elementwise_kernel"));
    CHECK(cuModuleGetFunction(&by_hand, module, "triton_tem_fused_mm_0"));
    CHECK(cuModuleGetFunction(&attention, module, "flash_fwd_kernel"));
    CHECK(cublasCreate_v2(&handle));
    CHECK(cublasLtCreate(&lt));
    for (long i = 0; i < steps; i++) {
        step();
        usleep((unsigned)pause_us);
    }
    CHECK(cublasLtDestroy(lt));
    CHECK(cublasDestroy_v2(handle));
    return 0;
}
