/* The part of the cuBLAS ABI that the fake speaks: own declarations of publicly documented C signatures. */
#ifndef FAKEGPU_CUBLAS_ABI_H
#define FAKEGPU_CUBLAS_ABI_H

#include "cuda_abi.h"

typedef int cublasStatus_t;
typedef struct cublasContext *cublasHandle_t;
typedef struct cublasLtContext *cublasLtHandle_t;
typedef int cublasOperation_t, cudaDataType_t, cublasComputeType_t, cublasGemmAlgo_t;
typedef struct {
    uint64_t data[8];
} *cublasLtMatrixLayout_t;
typedef struct cublasLtMatmulDesc *cublasLtMatmulDesc_t;
enum { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14, CUDA_R_8F_E4M3 = 28 };
enum { CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5 };

#define CUBLAS(name, args) FAKEGPU_EXPORT cublasStatus_t name args
CUBLAS(cublasCreate_v2, (cublasHandle_t * handle));
CUBLAS(cublasDestroy_v2, (cublasHandle_t handle));
CUBLAS(cublasSetStream_v2, (cublasHandle_t handle, cudaStream_t stream));
CUBLAS(cublasSgemm_v2, (cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
                        const float *alpha, const float *A, int lda, const float *B, int ldb, const float *beta,
                        float *C, int ldc));
CUBLAS(cublasGemmEx, (cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
                      const void *alpha, const void *A, cudaDataType_t Atype, int lda, const void *B,
                      cudaDataType_t Btype, int ldb, const void *beta, void *C, cudaDataType_t Ctype, int ldc,
                      cublasComputeType_t computeType, cublasGemmAlgo_t algo));
CUBLAS(cublasGemmEx_64, (cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int64_t m,
                         int64_t n, int64_t k, const void *alpha, const void *A, cudaDataType_t Atype, int64_t lda,
                         const void *B, cudaDataType_t Btype, int64_t ldb, const void *beta, void *C,
                         cudaDataType_t Ctype, int64_t ldc, cublasComputeType_t computeType, cublasGemmAlgo_t algo));
CUBLAS(cublasGemmStridedBatchedEx,
       (cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
        const void *alpha, const void *A, cudaDataType_t Atype, int lda, long long strideA, const void *B,
        cudaDataType_t Btype, int ldb, long long strideB, const void *beta, void *C, cudaDataType_t Ctype, int ldc,
        long long strideC, int batchCount, cublasComputeType_t computeType, cublasGemmAlgo_t algo));
CUBLAS(cublasHgemmBatched,
       (cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
        const void *alpha, const void *const *A, int lda, const void *const *B, int ldb, const void *beta,
        void *const *C, int ldc, int batchCount));

CUBLAS(cublasLtCreate, (cublasLtHandle_t * handle));
CUBLAS(cublasLtDestroy, (cublasLtHandle_t handle));
CUBLAS(cublasLtMatrixLayoutCreate,
       (cublasLtMatrixLayout_t * layout, cudaDataType_t type, uint64_t rows, uint64_t cols, int64_t ld));
CUBLAS(cublasLtMatrixLayoutSetAttribute,
       (cublasLtMatrixLayout_t layout, int attribute, const void *value, size_t bytes));
CUBLAS(cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t layout));
CUBLAS(cublasLtMatmul,
       (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *A,
        cublasLtMatrixLayout_t Adesc, const void *B, cublasLtMatrixLayout_t Bdesc, const void *beta, const void *C,
        cublasLtMatrixLayout_t Cdesc, void *D, cublasLtMatrixLayout_t Ddesc, const void *algo, void *workspace,
        size_t workspaceBytes, cudaStream_t stream));

#endif
