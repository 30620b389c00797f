/* The command line and the ranks' environment of fake_train. */
#ifndef TRAIN_OPTIONS_H
#define TRAIN_OPTIONS_H

#include <stdbool.h>

struct options {
    long steps; /* 0: until SIGTERM */
    int layers, buckets, fork_workers;
    double forward_us, backward_us, optimizer_us, data_ms, bucket_mb;
    bool sync_before_reduce;
    long exact_launches, exact_collectives; /* 0: train */
    const char *log, *go, *data;
    double hold_s, grace_s;
    int rank, world, local_rank;
    const char *rendezvous;
};

/* Ends the program with a message when the command line or the environment is wrong. */
struct options parse_options(int argc, char **argv);

#endif
