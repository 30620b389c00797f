// Where a PyTorch's tensors keep what argus.capture.pytorch.Layout says, from its headers alone: a wheel need not be
// installed, nor be for this machine.
//
//     unzip -q torch-*.whl 'torch/include/*' -d wheel
//     g++ -std=c++20 -fno-access-control -w -I wheel/torch/include tensor_layout.cc -o layout \
//         -Wl,--unresolved-symbols=ignore-all && ./layout
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdio>

int main() {
    using c10::TensorImpl;
    using Sizes = c10::impl::SizesAndStrides;
    static_assert(offsetof(Sizes, size_) == 0 && offsetof(Sizes, inlineStorage_) == 8);
    static_assert(C10_SIZES_AND_STRIDES_MAX_INLINE_SIZE == 5);
    static_assert(offsetof(TensorImpl, data_type_) == offsetof(TensorImpl, numel_) + 8);
    std::printf("sizes %zu, numel %zu\n", offsetof(TensorImpl, sizes_and_strides_), offsetof(TensorImpl, numel_));
}
