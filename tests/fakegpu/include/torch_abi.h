/* The part of PyTorch's C++ ABI that the fake speaks, as C: operators of attention by their mangled names, called as the
 * System V ABI for x86_64 has it. Own declarations; tests/e2e/test_attention.py compares with a real PyTorch. */
#ifndef FAKEGPU_TORCH_ABI_H
#define FAKEGPU_TORCH_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_abi.h"

/* c10::TensorImpl of PyTorch 2.13. */
typedef struct {
    char head[56];
    size_t dimensions;
    int64_t sizes[5], strides[5];
    int64_t offset, elements;
    uint16_t type;
} TensorImpl;
typedef TensorImpl *Tensor;
enum { TORCH_HALF = 5, TORCH_FLOAT = 6, TORCH_BFLOAT16 = 15 };

/* std::optional, of a double by value, of eight bytes by reference. */
typedef struct {
    double value;
    bool there;
} Scale;
typedef struct {
    uint64_t value;
    bool there;
} Maybe;
/* std::array<bool, 4>, and what operators return: through a pointer that is their first argument. */
typedef struct {
    bool of[4];
} Masks;
typedef struct {
    Tensor tensors[9];
} Result;

#define OPERATOR(name, mangled, args) FAKEGPU_EXPORT Result name args __asm__("_ZN2at4_ops" mangled)
#define SEVEN "S4_S4_S4_S4_S4_S4_S4_"
OPERATOR(sdpa_flash, "35_scaled_dot_product_flash_attention4callERKNS_6TensorES4_S4_dbbSt8optionalIdE",
         (const Tensor *query, const Tensor *key, const Tensor *value, double dropout, bool causal, bool debug,
          Scale scale));
OPERATOR(sdpa_flash_backward,
         "44_scaled_dot_product_flash_attention_backward4callERKNS_6TensorE" SEVEN "N3c106SymIntES6_dbS4_S4_St8optionalIdE",
         (const Tensor *grad, const Tensor *query, const Tensor *key, const Tensor *value, const Tensor *out,
          const Tensor *sums, const Tensor *starts_q, const Tensor *starts_k, const int64_t *max_q,
          const int64_t *max_k, double dropout, bool causal, const Tensor *seed, const Tensor *offset, Scale scale));
OPERATOR(flash,
         "24_flash_attention_forward4callERKNS_6TensorES4_S4_RKSt8optionalIS2_ES8_N3c106SymIntESA_dbbS5_IdES5_ISA_ESC_"
         "S8_S8_S8_S5_IlE",
         (const Tensor *query, const Tensor *key, const Tensor *value, const Maybe *starts_q, const Maybe *starts_k,
          const int64_t *max_q, const int64_t *max_k, double dropout, bool causal, bool debug, Scale scale,
          const Maybe *left, const Maybe *right, const Maybe *used, const Maybe *slopes, const Maybe *table,
          Maybe splits));
OPERATOR(flash_backward,
         "25_flash_attention_backward4callERKNS_6TensorE" SEVEN "N3c106SymIntES6_dbS4_S4_St8optionalIdES7_IS6_ES9_",
         (const Tensor *grad, const Tensor *query, const Tensor *key, const Tensor *value, const Tensor *out,
          const Tensor *sums, const Tensor *starts_q, const Tensor *starts_k, const int64_t *max_q,
          const int64_t *max_k, double dropout, bool causal, const Tensor *seed, const Tensor *offset, Scale scale,
          const Maybe *left, const Maybe *right));
OPERATOR(efficient,
         "28_efficient_attention_forward4callERKNS_6TensorES4_S4_RKSt8optionalIS2_ES8_S8_S5_IN3c106SymIntEESB_dlbS5_IdE"
         "S8_S5_IlE",
         (const Tensor *query, const Tensor *key, const Tensor *value, const Maybe *bias, const Maybe *starts_q,
          const Maybe *starts_k, const Maybe *max_q, const Maybe *max_k, double dropout, int64_t mask, bool sums,
          Scale scale, const Maybe *lengths, Maybe window));
OPERATOR(sdpa_efficient_backward,
         "48_scaled_dot_product_efficient_attention_backward4callERKNS_6TensorE" SEVEN "S4_dSt5arrayIbLm4EEbSt8optionalIdE",
         (const Tensor *grad, const Tensor *query, const Tensor *key, const Tensor *value, const Tensor *bias,
          const Tensor *out, const Tensor *sums, const Tensor *seed, const Tensor *offset, double dropout, Masks masks,
          bool causal, Scale scale));
OPERATOR(sdpa_cudnn_backward,
         "44_scaled_dot_product_cudnn_attention_backward4callERKNS_6TensorE" SEVEN "S4_S4_S4_N3c106SymIntES6_dbSt8optionalIdE",
         (const Tensor *grad, const Tensor *query, const Tensor *key, const Tensor *value, const Tensor *out,
          const Tensor *sums, const Tensor *seed, const Tensor *offset, const Tensor *bias, const Tensor *starts_q,
          const Tensor *starts_k, const int64_t *max_q, const int64_t *max_k, double dropout, bool causal,
          Scale scale));

#endif
