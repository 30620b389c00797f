/* NCCL's kernels by the names that profiles show, as host stubs registered with the runtime. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"

/* Nobody calls a stub on the host; each refers to itself so that no two can be made one. */
#define STUB(name)                                                      \
    void name(void);                                                    \
    __attribute__((noinline)) void name(void) { __asm__ volatile("" : : "r"(&name)); }

#define EACH_TYPE(X, collective, op)                                                                      \
    X(collective, op, i8) X(collective, op, u8) X(collective, op, i32) X(collective, op, u32)             \
    X(collective, op, i64) X(collective, op, u64) X(collective, op, f16) X(collective, op, f32)           \
    X(collective, op, f64) X(collective, op, bf16) X(collective, op, f8e4m3) X(collective, op, f8e5m2)
#define EACH_OP(X, collective)                                                                            \
    EACH_TYPE(X, collective, Sum) EACH_TYPE(X, collective, Prod) EACH_TYPE(X, collective, MinMax)         \
    EACH_TYPE(X, collective, PreMulSum) EACH_TYPE(X, collective, SumPostDiv)
#define EACH_REDUCING(X) EACH_OP(X, AllReduce) EACH_OP(X, Reduce) EACH_OP(X, ReduceScatter)
#define EACH_PLAIN(X) X(Broadcast, _RING_LL) X(AllGather, _RING_LL) X(SendRecv, ) X(Generic, )

#define REDUCING_STUB(collective, op, type) STUB(ncclDevKernel_##collective##_##op##_##type##_RING_LL)
#define PLAIN_STUB(collective, suffix) STUB(ncclDevKernel_##collective##suffix)
EACH_REDUCING(REDUCING_STUB)
EACH_PLAIN(PLAIN_STUB)

struct kernel {
    const char *name;
    void (*stub)(void);
};
#define REDUCING_ENTRY(collective, op, type)                    \
    {"ncclDevKernel_" #collective "_" #op "_" #type "_RING_LL", \
     ncclDevKernel_##collective##_##op##_##type##_RING_LL},
#define PLAIN_ENTRY(collective, suffix) {"ncclDevKernel_" #collective #suffix, ncclDevKernel_##collective##suffix},
static const struct kernel kernels[] = {EACH_REDUCING(REDUCING_ENTRY) EACH_PLAIN(PLAIN_ENTRY)};
#define KERNELS (sizeof kernels / sizeof kernels[0])
#define REDUCING (KERNELS - 4)
#define OPS 5
/* The order of the lists above. */
enum { SUM, PROD, MINMAX, PREMULSUM, SUMPOSTDIV };

__attribute__((constructor)) static void register_kernels(void) {
    static const char image[] = "nccl";
    void **handle = __cudaRegisterFatBinary((void *)image);
    for (size_t i = 0; i < KERNELS; i++)
        __cudaRegisterFunction(handle, (const char *)kernels[i].stub, (char *)kernels[i].name, kernels[i].name, -1,
                               NULL, NULL, NULL, NULL, NULL);
    __cudaRegisterFatBinaryEnd(handle);
}

const void *kernel_plain(const char *collective) {
    size_t index = REDUCING + (!strcmp(collective, "Broadcast")   ? 0
                               : !strcmp(collective, "AllGather") ? 1
                               : !strcmp(collective, "SendRecv")  ? 2
                                                                  : 3);
    return (const void *)kernels[index].stub;
}

const void *kernel_reducing(const char *collective, ncclDataType_t type, ncclRedOp_t op) {
    size_t which = !strcmp(collective, "AllReduce") ? 0 : !strcmp(collective, "Reduce") ? 1 : 2;
    bool integer = type <= ncclUint64;
    size_t kind = op == ncclSum                    ? SUM
                  : op == ncclProd                 ? PROD
                  : op == ncclMax || op == ncclMin ? MINMAX
                  : integer                        ? SUMPOSTDIV
                                                   : PREMULSUM;
    return (const void *)kernels[(which * OPS + kind) * ncclNumTypes + type].stub;
}
