#include "train_options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: fake_train [options]\n"
    "A data-parallel training loop on the fake GPU. Ranks come from RANK, WORLD_SIZE, LOCAL_RANK; more than one rank\n"
    "needs FAKEGPU_RENDEZVOUS, the path of a file that does not exist yet.\n\n"
    "  --steps N             steps to train; 0 (default): until SIGTERM\n"
    "  --layers L            transformer layers (8)\n"
    "  --buckets B           gradient all-reduces a step (4); 0: none\n"
    "  --bucket-mb MB        size of each (25)\n"
    "  --forward-us US       GPU time of a step's forward pass (12000)\n"
    "  --backward-us US      of its backward pass (20000)\n"
    "  --optimizer-us US     of its optimizer (3000)\n"
    "  --data-ms MS          time to load a batch (3)\n"
    "  --data FILE           read FILE for each batch; {rank} in the name stands for the rank\n"
    "  --sync-before-reduce  synchronise after the backward kernels, then launch the all-reduces: no overlap\n"
    "  --fork-workers N      data loader processes that do nothing (0)\n"
    "  --log FILE            append one JSON line a step; {rank} in the name stands for the rank\n"
    "  --exact N M           no training: N kernel launches and M all-reduces in all, then the end\n"
    "  --go FILE             start (in either mode) only when FILE exists\n"
    "  --hold SECONDS        stay that long before the end\n"
    "  --grace SECONDS       after SIGTERM, die if the step does not end in that time (10)\n";

static void fail(const char *what, const char *value) {
    fprintf(stderr, "fake_train: %s%s%s\n", what, value ? ": " : "", value ? value : "");
    exit(2);
}

static double number(const char *text, const char *name, double least) {
    char *end;
    errno = 0;
    double value = text ? strtod(text, &end) : 0;
    if (!text || errno || end == text || *end || !(value >= least) || value > 1e12) fail("malformed value for", name);
    return value;
}

static int from_environment(const char *name, int otherwise, int least) {
    const char *text = getenv(name);
    return text ? (int)number(text, name, least) : otherwise;
}

struct options parse_options(int argc, char **argv) {
    struct options options = {
        .layers = 8,
        .buckets = 4,
        .bucket_mb = 25,
        .forward_us = 12000,
        .backward_us = 20000,
        .optimizer_us = 3000,
        .data_ms = 3,
        .grace_s = 10,
    };
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        const char *second = i + 2 < argc ? argv[i + 2] : NULL;
        if (!strcmp(name, "--help")) {
            fputs(usage, stdout);
            exit(0);
        } else if (!strcmp(name, "--sync-before-reduce")) {
            options.sync_before_reduce = true;
            continue;
        } else if (!strcmp(name, "--exact")) {
            options.exact_launches = (long)number(value, name, 1);
            options.exact_collectives = (long)number(second, name, 0);
            i++;
        } else if (!strcmp(name, "--steps")) {
            options.steps = (long)number(value, name, 0);
        } else if (!strcmp(name, "--layers")) {
            options.layers = (int)number(value, name, 1);
        } else if (!strcmp(name, "--buckets")) {
            options.buckets = (int)number(value, name, 0);
        } else if (!strcmp(name, "--bucket-mb")) {
            options.bucket_mb = number(value, name, 0);
        } else if (!strcmp(name, "--forward-us")) {
            options.forward_us = number(value, name, 0);
        } else if (!strcmp(name, "--backward-us")) {
            options.backward_us = number(value, name, 0);
        } else if (!strcmp(name, "--optimizer-us")) {
            options.optimizer_us = number(value, name, 0);
        } else if (!strcmp(name, "--data-ms")) {
            options.data_ms = number(value, name, 0);
        } else if (!strcmp(name, "--fork-workers")) {
            options.fork_workers = (int)number(value, name, 0);
        } else if (!strcmp(name, "--hold")) {
            options.hold_s = number(value, name, 0);
        } else if (!strcmp(name, "--grace")) {
            options.grace_s = number(value, name, 0);
        } else if (!strcmp(name, "--log") && value) {
            options.log = value;
        } else if (!strcmp(name, "--data") && value) {
            options.data = value;
        } else if (!strcmp(name, "--go") && value) {
            options.go = value;
        } else {
            fail("unknown option or missing value (try --help)", name);
        }
        i++;
    }
    options.rank = from_environment("RANK", 0, 0);
    options.world = from_environment("WORLD_SIZE", 1, 1);
    options.local_rank = from_environment("LOCAL_RANK", 0, 0);
    options.rendezvous = getenv("FAKEGPU_RENDEZVOUS");
    if (options.rank >= options.world) fail("RANK must be below WORLD_SIZE", NULL);
    if (options.world > 1 && !options.rendezvous) fail("more than one rank needs FAKEGPU_RENDEZVOUS", NULL);
    return options;
}
