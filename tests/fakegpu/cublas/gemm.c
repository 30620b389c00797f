/* cuBLAS: products whose sizes are arguments. One kernel each; some end in cublasLtMatmul, as in the real library. */
#include <stdlib.h>

#include "cublas_abi.h"

struct cublasContext {
    cudaStream_t stream;
    cublasLtHandle_t lt;
};

static CUfunction kernel;

static int launch(cublasHandle_t handle) {
    CUmodule module;
    if (!kernel &&
        (cuModuleLoadData(&module, "cublas") || cuModuleGetFunction(&kernel, module, "ampere_bf16_s16816gemm_128x128")))
        return 14;
    void *none[] = {NULL};
    return cuLaunchKernel(kernel, 96, 32, 1, 256, 1, 1, 0, handle->stream, none, NULL) ? 13 : 0;
}

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    *handle = calloc(1, sizeof **handle);
    return *handle ? cublasLtCreate(&(*handle)->lt) : 3;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    cublasLtDestroy(handle->lt);
    free(handle);
    return 0;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    handle->stream = stream;
    return 0;
}

#define UNUSED (void)transa, (void)transb, (void)m, (void)n, (void)k, (void)alpha, (void)A, (void)lda, (void)B, (void)ldb
#define UNUSED_TOO (void)beta, (void)C, (void)ldc
#define UNUSED_EX (void)Atype, (void)Btype, (void)Ctype, (void)computeType, (void)algo

cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n,
                              int k, const float *alpha, const float *A, int lda, const float *B, int ldb,
                              const float *beta, float *C, int ldc) {
    UNUSED, UNUSED_TOO;
    return launch(handle);
}

/* By cuBLASLt: two calls, one product. */
cublasStatus_t cublasGemmEx_64(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int64_t m,
                               int64_t n, int64_t k, const void *alpha, const void *A, cudaDataType_t Atype,
                               int64_t lda, const void *B, cudaDataType_t Btype, int64_t ldb, const void *beta, void *C,
                               cudaDataType_t Ctype, int64_t ldc, cublasComputeType_t computeType,
                               cublasGemmAlgo_t algo) {
    (void)computeType, (void)algo, (void)transa, (void)transb;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatrixLayoutCreate(&a, Atype, (uint64_t)m, (uint64_t)k, lda);
    cublasLtMatrixLayoutCreate(&b, Btype, (uint64_t)k, (uint64_t)n, ldb);
    cublasLtMatrixLayoutCreate(&c, Ctype, (uint64_t)m, (uint64_t)n, ldc);
    int failed = cublasLtMatmul(handle->lt, NULL, alpha, A, a, B, b, beta, C, c, C, c, NULL, NULL, 0, handle->stream);
    free(a);
    free(b);
    free(c);
    return failed;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n,
                            int k, const void *alpha, const void *A, cudaDataType_t Atype, int lda, const void *B,
                            cudaDataType_t Btype, int ldb, const void *beta, void *C, cudaDataType_t Ctype, int ldc,
                            cublasComputeType_t computeType, cublasGemmAlgo_t algo) {
    UNUSED, UNUSED_TOO, UNUSED_EX;
    return launch(handle);
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb,
                                          int m, int n, int k, const void *alpha, const void *A, cudaDataType_t Atype,
                                          int lda, long long strideA, const void *B, cudaDataType_t Btype, int ldb,
                                          long long strideB, const void *beta, void *C, cudaDataType_t Ctype, int ldc,
                                          long long strideC, int batchCount, cublasComputeType_t computeType,
                                          cublasGemmAlgo_t algo) {
    UNUSED, UNUSED_TOO, UNUSED_EX, (void)strideA, (void)strideB, (void)strideC, (void)batchCount;
    return launch(handle);
}

cublasStatus_t cublasHgemmBatched(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m,
                                  int n, int k, const void *alpha, const void *const *A, int lda, const void *const *B,
                                  int ldb, const void *beta, void *const *C, int ldc, int batchCount) {
    UNUSED, UNUSED_TOO, (void)batchCount;
    return launch(handle);
}
