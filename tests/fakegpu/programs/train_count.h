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

#define COUNTED(name, arguments, explain)                                     \
    do {                                                                      \
        static struct counter counter_ = {.name = #name};                     \
        count_call(&counter_);                                                \
        int result_ = (int)name arguments;                                    \
        if (result_) call_failed(#name, result_, explain);                    \
    } while (0)
#define CUDA(name, arguments) COUNTED(name, arguments, cudaGetErrorString(result_))
#define NCCL(name, arguments) COUNTED(name, arguments, ncclGetErrorString((ncclResult_t)result_))

#endif
