/* libtorch_cpu: attention. Those that real PyTorch implements by another operator call that; the others launch kernels. */
#include "torch_abi.h"

/* By this function, which every version has, the library is known for PyTorch's. */
FAKEGPU_EXPORT void execute(void) __asm__(
    "_ZN5torch8autograd6Engine7executeERKSt6vectorINS0_4EdgeESaIS3_EERKS2_IN2at6TensorESaIS9_EEbbbS7_");
void execute(void) {}

static Result launch(const char *name) {
    static CUmodule module;
    CUfunction function;
    void *none[] = {NULL};
    if ((module || !cuModuleLoadData(&module, "torch")) && !cuModuleGetFunction(&function, module, name))
        cuLaunchKernel(function, 64, 1, 1, 128, 1, 1, 0, NULL, none, NULL);
    return (Result){{NULL}};
}

static const Maybe empty;
#define UNUSED_SCALE (void)dropout, (void)scale
#define UNUSED_FLASH (void)starts_q, (void)starts_k, (void)max_q, (void)max_k
#define UNUSED_BACKWARD (void)grad, (void)out, (void)sums, (void)seed, (void)offset
#define UNUSED_TENSORS (void)query, (void)key, (void)value, (void)causal

/* Its tensors have the lengths before the heads. */
static TensorImpl transposed(const Tensor *tensor) {
    TensorImpl copy = **tensor;
    copy.sizes[1] = (*tensor)->sizes[2];
    copy.sizes[2] = (*tensor)->sizes[1];
    return copy;
}

Result sdpa_flash(const Tensor *query, const Tensor *key, const Tensor *value, double dropout, bool causal, bool debug,
                  Scale scale) {
    TensorImpl all[] = {transposed(query), transposed(key), transposed(value)};
    const Tensor q = all, k = all + 1, v = all + 2;
    int64_t longest = q->sizes[1];
    return flash(&q, &k, &v, &empty, &empty, &longest, &longest, dropout, causal, debug, scale, &empty, &empty, &empty,
                 &empty, &empty, empty);
}

Result flash(const Tensor *query, const Tensor *key, const Tensor *value, const Maybe *starts_q, const Maybe *starts_k,
             const int64_t *max_q, const int64_t *max_k, double dropout, bool causal, bool debug, Scale scale,
             const Maybe *left, const Maybe *right, const Maybe *used, const Maybe *slopes, const Maybe *table,
             Maybe splits) {
    UNUSED_SCALE, UNUSED_FLASH, UNUSED_TENSORS, (void)debug, (void)left, (void)right;
    (void)used, (void)slopes, (void)table, (void)splits;
    return launch("flash_fwd_kernel");
}

Result sdpa_flash_backward(const Tensor *grad, const Tensor *query, const Tensor *key, const Tensor *value,
                           const Tensor *out, const Tensor *sums, const Tensor *starts_q, const Tensor *starts_k,
                           const int64_t *max_q, const int64_t *max_k, double dropout, bool causal, const Tensor *seed,
                           const Tensor *offset, Scale scale) {
    TensorImpl all[] = {transposed(query), transposed(key), transposed(value)};
    const Tensor q = all, k = all + 1, v = all + 2;
    Result result = flash_backward(grad, &q, &k, &v, out, sums, starts_q, starts_k, max_q, max_k, dropout, causal, seed,
                                   offset, scale, &empty, &empty);
    launch("elementwise_kernel");
    return result;
}

Result flash_backward(const Tensor *grad, const Tensor *query, const Tensor *key, const Tensor *value,
                      const Tensor *out, const Tensor *sums, const Tensor *starts_q, const Tensor *starts_k,
                      const int64_t *max_q, const int64_t *max_k, double dropout, bool causal, const Tensor *seed,
                      const Tensor *offset, Scale scale, const Maybe *left, const Maybe *right) {
    UNUSED_SCALE, UNUSED_FLASH, UNUSED_BACKWARD, UNUSED_TENSORS, (void)left, (void)right;
    return launch("flash_bwd_kernel");
}

Result efficient(const Tensor *query, const Tensor *key, const Tensor *value, const Maybe *bias, const Maybe *starts_q,
                 const Maybe *starts_k, const Maybe *max_q, const Maybe *max_k, double dropout, int64_t mask, bool sums,
                 Scale scale, const Maybe *lengths, Maybe window) {
    bool causal = mask;
    UNUSED_SCALE, UNUSED_FLASH, UNUSED_TENSORS, (void)bias, (void)sums, (void)lengths, (void)window;
    return launch("fmha_cutlassF");
}

Result sdpa_efficient_backward(const Tensor *grad, const Tensor *query, const Tensor *key, const Tensor *value,
                               const Tensor *bias, const Tensor *out, const Tensor *sums, const Tensor *seed,
                               const Tensor *offset, double dropout, Masks masks, bool causal, Scale scale) {
    UNUSED_SCALE, UNUSED_BACKWARD, UNUSED_TENSORS, (void)bias, (void)masks;
    return launch("fmha_cutlassB");
}

Result sdpa_cudnn_backward(const Tensor *grad, const Tensor *query, const Tensor *key, const Tensor *value,
                           const Tensor *out, const Tensor *sums, const Tensor *seed, const Tensor *offset,
                           const Tensor *bias, const Tensor *starts_q, const Tensor *starts_k, const int64_t *max_q,
                           const int64_t *max_k, double dropout, bool causal, Scale scale) {
    UNUSED_SCALE, UNUSED_FLASH, UNUSED_BACKWARD, UNUSED_TENSORS, (void)bias;
    return launch("cudnn_sdpa_bprop");
}
