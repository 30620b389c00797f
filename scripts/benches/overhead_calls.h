/* What scripts/benches/overhead.py links its job against: functions with the names of CUDA's and NCCL's that do nothing
 * themselves, in one of three kinds by what a probe on their entry is put on. */
#define CALL(name, ...) int name(__VA_ARGS__)
typedef unsigned u;
typedef unsigned long ul;
CALL(cuLaunchKernel, void *f, u gx, u gy, u gz, u bx, u by, u bz, u shared, void *stream, void **params, void **extra);
CALL(cuMemcpyAsync, ul to, ul from, ul bytes, void *stream);
CALL(cuStreamSynchronize, void *stream);
CALL(ncclAllReduce, const void *from, void *to, ul count, int dtype, int op, void *comm, void *stream);
