/* The environment, read once when the library is loaded, and the control file that overrules it while a job runs. */
#ifndef FAKEGPU_SETTINGS_H
#define FAKEGPU_SETTINGS_H

#include <stdbool.h>
#include <stdint.h>

#define MAX_KERNEL_PATTERNS 64

struct kernel_pattern {
    char text[128]; /* matches any name that contains it; "*" matches all */
    int64_t duration_ns;
};

struct settings {
    /* this process */
    int64_t rank, devices, seed, memory_gb, capability, compute;
    double jitter;
    double copy_gbps, link_gbps;
    int64_t link_latency_ns;
    struct kernel_pattern patterns[MAX_KERNEL_PATTERNS];
    int pattern_count;
    char control[256], ops_log[256];
    /* faults; a rank of -1 is none */
    int64_t slow_rank, slow_link_rank, jit_rank, data_rank, hang_rank;
    double slow_factor, slow_link_factor, jit_ms, data_ms;
    int64_t jit_every, hang_step, from_step;
    int64_t slow_device, wrong_device, broken_device; /* -1: none */
};

/* The settings in force. Read with the engine's lock held. */
extern struct settings settings;

/* Whether a fault planted for `rank` applies to this process at its present step; engine's lock held. */
bool fault_active(int64_t rank);
/* The duration FAKEGPU_KERNEL_NS, then fakegpu_set_kernel_ns, then the default give a kernel; engine's lock held. */
int64_t kernel_duration_ns(const char *name);

#endif
