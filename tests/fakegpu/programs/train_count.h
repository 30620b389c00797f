/* Calls that are counted by name, so that a test can compare a tracer's counts with the truth; and that end the
 * program when they fail. */
#ifndef TRAIN_COUNT_H
#define TRAIN_COUNT_H

#include <stdio.h>

struct counter {
    const char *name;
    unsigned long count;
    struct counter *next;
    int listed;
};

void count_call(struct counter *counter);
/* {"name": count, …} of all counted calls so far. */
void counts_write(FILE *file);
_Noreturn void call_failed(const char *call, int result, const char *text);

#define COUNTED(call, arguments, explain)                                     \
    do {                                                                      \
        static struct counter counter_ = {.name = #call};                     \
        count_call(&counter_);                                                \
        int result_ = (int)call arguments;                                    \
        if (result_) call_failed(#call, result_, explain);                    \
    } while (0)
#define CUDA(call, arguments) COUNTED(call, arguments, cudaGetErrorString(result_))
#define NCCL(call, arguments) COUNTED(call, arguments, ncclGetErrorString((ncclResult_t)result_))

#endif
