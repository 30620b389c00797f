/* cuBLASLt: descriptors, and the one function that multiplies. What lies where in a layout descriptor is what the real
 * library's own functions write there (tests/e2e/programs/cublas_layout.py shows it). */
#include <stdlib.h>
#include <string.h>

#include "cublas_abi.h"

/* The real library has a runtime inside: only calls of the driver are seen. Kernels' times go by their names
 * (FAKEGPU_KERNEL_NS). */
static CUfunction product, reduction;

__attribute__((constructor)) static void forget(void) { product = reduction = NULL; }

static int load(void) {
    CUmodule module;
    if (product) return 0;
    return cuModuleLoadData(&module, "cublasLt") || cuModuleGetFunction(&reduction, module, "splitKreduce_kernel") ||
           cuModuleGetFunction(&product, module, "nvjet_hsh_128x256_64x4");
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = malloc(8);
    return load();
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    free(handle);
    return 0;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type, uint64_t rows,
                                          uint64_t cols, int64_t ld) {
    cublasLtMatrixLayout_t made = calloc(1, sizeof *made);
    if (!made) return 3;
    uint64_t words[] = {(uint64_t)type, rows, cols, (uint64_t)ld, 1};
    memcpy(made->data, words, sizeof words);
    *layout = made;
    return 0;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, int attribute, const void *value,
                                                size_t bytes) {
    if (attribute != CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT || bytes != 4) return 7;
    memcpy(&layout->data[4], value, 4);
    return 0;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    free(layout);
    return 0;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *A,
                              cublasLtMatrixLayout_t Adesc, const void *B, cublasLtMatrixLayout_t Bdesc,
                              const void *beta, const void *C, cublasLtMatrixLayout_t Cdesc, void *D,
                              cublasLtMatrixLayout_t Ddesc, const void *algo, void *workspace, size_t workspaceBytes,
                              cudaStream_t stream) {
    (void)handle, (void)desc, (void)alpha, (void)A, (void)B, (void)Bdesc, (void)beta, (void)C, (void)Cdesc, (void)D;
    (void)Ddesc, (void)algo, (void)workspace, (void)workspaceBytes;
    if (load()) return 14;
    void *none[] = {NULL};
    int failed = cuLaunchKernel(product, 64, 1, 1, 384, 1, 1, 0, stream, none, NULL);
    /* A long sum is split, and added up by a second kernel. */
    uint64_t longest = Adesc->data[1] > Adesc->data[2] ? Adesc->data[1] : Adesc->data[2];
    if (!failed && longest >= 8192) failed = cuLaunchKernel(reduction, 64, 1, 1, 128, 1, 1, 0, stream, none, NULL);
    return failed ? 13 : 0;
}
