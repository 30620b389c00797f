/* Launches known kernels as fast as it can, or at a given rate, and says how many of each: for counting and for load.
 * Kernel k of K is called burst_kernel_<k> and takes (k + 1) × --kernel-ns, exactly so with FAKEGPU_JITTER=0. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "fakegpu.h"

#define MAX_THREADS 64
#define MAX_STREAMS 64
#define MAX_KERNELS 256 /* as many durations as the fake takes from a program */

static const char usage[] =
    "usage: fake_burst [options]\n"
    "  --launches N     kernel launches in all (100000)\n"
    "  --threads T      that launch (1); each has streams of its own\n"
    "  --streams S      of each thread (4), taken in turn\n"
    "  --kernels K      how many different ones (8), taken in turn\n"
    "  --kernel-ns NS   the shortest takes that long, the next twice as long, … (1000)\n"
    "  --graph NODES    launch graphs of that many kernels instead; N still counts kernels\n"
    "  --rate R         launches per second of all threads (0: as fast as possible)\n"
    "  --go FILE        start only when FILE exists\n"
    "  --log FILE       where the JSON line goes (standard output)\n"
    "  --hold SECONDS   stay that long before the end\n";

static struct {
    long launches, threads, streams, kernels, kernel_ns, graph, rate, hold;
} options = {100000, 1, 4, 8, 1000, 0, 0, 0};

static char stubs[MAX_KERNELS]; /* their addresses stand for the kernels */
static char names[MAX_KERNELS][64];
static pthread_barrier_t ready;

static void check(int result, const char *what) {
    if (!result) return;
    fprintf(stderr, "fake_burst: %s: error %d\n", what, result);
    exit(1);
}
#define CHECK(call) check(call, #call)

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void sleep_until(int64_t ns) {
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &(struct timespec){ns / 1000000000, ns % 1000000000}, NULL);
}

static void launch(long number, cudaStream_t stream) {
    dim3 grid = {(unsigned)(number % 1000) + 1, 1, 1}, block = {128, 1, 1};
    CHECK(cudaLaunchKernel(&stubs[number % options.kernels], grid, block, NULL, 0, stream));
}

static cudaGraphExec_t capture(long first, cudaStream_t stream) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, 0));
    for (long i = 0; i < options.graph; i++) launch(first + i, stream);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    return exec;
}

static void *work(void *argument) {
    long me = (long)(intptr_t)argument, width = options.graph ? options.graph : 1;
    cudaStream_t streams[MAX_STREAMS];
    cudaGraphExec_t exec = NULL;
    for (long s = 0; s < options.streams; s++) CHECK(cudaStreamCreateWithFlags(&streams[s], CU_STREAM_NON_BLOCKING));
    if (options.graph) exec = capture(0, streams[0]);
    pthread_barrier_wait(&ready);
    int64_t begin_ns = now_ns();
    /* Thread t launches number t, t + T, …: every kernel's count follows from N and K alone. */
    for (long i = me, mine = 0; i < options.launches / width; i += options.threads, mine++) {
        cudaStream_t stream = streams[mine % options.streams];
        if (options.rate && mine % 64 == 0) sleep_until(begin_ns + i * width * 1000000000 / options.rate);
        if (exec)
            CHECK(cudaGraphLaunch(exec, stream));
        else
            launch(i, stream);
    }
    for (long s = 0; s < options.streams; s++) CHECK(cudaStreamSynchronize(streams[s]));
    return NULL;
}

static void fail(const char *what) {
    fprintf(stderr, "fake_burst: bad option or value: %s (try --help)\n", what);
    exit(2);
}

static long number(const char *text, const char *name, long least, long most) {
    char *end;
    errno = 0;
    long value = text ? strtol(text, &end, 10) : 0;
    if (!text || errno || end == text || *end || value < least || value > most) fail(name);
    return value;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        long *value, least, most;
    } known[] = {
        {"--launches", &options.launches, 1, 1000000000}, {"--threads", &options.threads, 1, MAX_THREADS},
        {"--streams", &options.streams, 1, MAX_STREAMS},  {"--kernels", &options.kernels, 1, MAX_KERNELS},
        {"--kernel-ns", &options.kernel_ns, 0, 1000000000}, {"--graph", &options.graph, 0, 100000},
        {"--rate", &options.rate, 0, 100000000},          {"--hold", &options.hold, 0, 3600},
    };
    const char *go = NULL, *log = NULL;
    for (int i = 1; i < argc; i += 2) {
        if (!strcmp(argv[i], "--help")) return fputs(usage, stdout) < 0;
        if (i + 1 == argc) fail(argv[i]);
        bool found = true;
        if (!strcmp(argv[i], "--go"))
            go = argv[i + 1];
        else if (!strcmp(argv[i], "--log"))
            log = argv[i + 1];
        else
            found = false;
        for (size_t k = 0; k < sizeof known / sizeof *known && !found; k++)
            if ((found = !strcmp(argv[i], known[k].name)))
                *known[k].value = number(argv[i + 1], argv[i], known[k].least, known[k].most);
        if (!found) fail(argv[i]);
    }
    FILE *out = log ? fopen(log, "we") : stdout;
    if (!out) fail(log);

    void **image = __cudaRegisterFatBinary(stubs);
    for (long k = 0; k < options.kernels; k++) {
        snprintf(names[k], sizeof names[k], "burst_kernel_%ld", k);
        __cudaRegisterFunction(image, &stubs[k], names[k], names[k], -1, NULL, NULL, NULL, NULL, NULL);
        fakegpu_set_kernel_ns(names[k], (k + 1) * options.kernel_ns);
    }
    __cudaRegisterFatBinaryEnd(image);
    CHECK(cudaSetDevice(0));
    while (go && access(go, F_OK)) sleep_until(now_ns() + 1000000);

    pthread_barrier_init(&ready, NULL, (unsigned)options.threads + 1);
    pthread_t threads[MAX_THREADS];
    for (long t = 0; t < options.threads; t++) pthread_create(&threads[t], NULL, work, (void *)(intptr_t)t);
    pthread_barrier_wait(&ready);
    int64_t start_ns = now_ns();
    for (long t = 0; t < options.threads; t++) pthread_join(threads[t], NULL);
    int64_t end_ns = now_ns();

    long width = options.graph ? options.graph : 1, rounds = options.launches / width;
    fprintf(out, "{\"pid\": %d, \"launches\": %ld, \"start_ns\": %lld, \"end_ns\": %lld, \"kernels\": {", getpid(),
            rounds * width, (long long)start_ns, (long long)end_ns);
    for (long k = 0; k < options.kernels; k++) {
        /* Launches k, k + K, … of each round of a graph, or of all. */
        long of = options.graph ? options.graph : options.launches;
        long count = (of > k ? (of - k - 1) / options.kernels + 1 : 0) * (options.graph ? rounds : 1);
        fprintf(out, "%s\"%s\": {\"count\": %ld, \"ns\": %ld}", k ? ", " : "", names[k], count,
                count * (k + 1) * options.kernel_ns);
    }
    fprintf(out, "}}\n");
    if (fflush(out)) fail(log);
    sleep_until(now_ns() + options.hold * 1000000000);
    return 0;
}
