/* A data-parallel training loop, as PyTorch's DistributedDataParallel drives the GPU: see README.md. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fakegpu.h"
#include "nccl_abi.h"
#include "train_count.h"
#include "train_job.h"
#include "train_kernels.h"
#include "train_options.h"

/* On a real driver none of these exist, and no fault is planted. */
#pragma weak fakegpu_set_step
#pragma weak fakegpu_set_kernel_ns
#pragma weak fakegpu_jit_stall_due
#pragma weak fakegpu_data_stall_ns
#pragma weak fakegpu_hang_due

#define BATCH_BYTES (4u << 20)
#define HIDDEN 4096
#define TOKENS 4096

static struct options options;
static ncclComm_t comm;
static cudaStream_t compute; /* NULL, the legacy default stream, as in PyTorch */
static cudaStream_t reduce;
static cudaEvent_t *gradients_ready, *reduced;
static void *batch, *host_batch, *gradients, *loss, *host_loss;
static CUmodule triton_module;
static CUfunction triton;
static int device, log_file = -1;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* ---- kernels ---- */

static void set_kernel_us(const char *name, double us) {
    if (fakegpu_set_kernel_ns) fakegpu_set_kernel_ns(name, (int64_t)(us * 1000));
}

/* Splits the phases' times among their kernels, by shares as in a transformer layer. */
static void set_durations(void) {
    double forward = options.forward_us / options.layers, backward = options.backward_us / options.layers;
    set_kernel_us(TRITON_KERNEL, forward * 0.03);              /* 2 a layer */
    set_kernel_us("gemm_bf16_128x128", forward * 0.12);        /* 2 a layer */
    set_kernel_us("gemm_bf16_256x128", forward * 0.22);        /* 2 a layer */
    set_kernel_us("flash_fwd_kernel_hdim128", forward * 0.20); /* the rest 1 a layer */
    set_kernel_us("elementwise_silu_mul", forward * 0.06);
    set_kernel_us("gemm_bf16_128x128_nt", backward * 0.16); /* 3 a layer */
    set_kernel_us("gemm_bf16_128x128_tn", backward * 0.08); /* 3 a layer */
    set_kernel_us("flash_bwd_kernel_hdim128", backward * 0.22);
    set_kernel_us("elementwise_silu_mul_backward", backward * 0.03);
    set_kernel_us("rmsnorm_backward", backward * 0.03);
    set_kernel_us("embedding_lookup_bf16", 15);
    set_kernel_us("cross_entropy_forward", 30);
    set_kernel_us("cross_entropy_backward", 30);
    set_kernel_us("multi_tensor_l2norm", options.optimizer_us * 0.1);
    set_kernel_us("multi_tensor_scale", options.optimizer_us * 0.1);
    set_kernel_us("multi_tensor_adamw", options.optimizer_us * 0.2); /* 4 */
}

static void load_triton(void) {
    static const char image[] = "triton";
    if (triton_module) CUDA(cuModuleUnload, (triton_module));
    CUDA(cuModuleLoadDataEx, (&triton_module, image, 0, NULL, NULL));
    CUDA(cuModuleGetFunction, (&triton, triton_module, TRITON_KERNEL));
}

static void launch_triton(void) {
    void *args[] = {&batch, &loss};
    CUDA(cuLaunchKernel, (triton, TOKENS, 1, 1, 128, 1, 1, 2048, compute, args, NULL));
}

#define GRID(x, y) ((dim3){(x), (y), 1})
#define BLOCK(x) ((dim3){(x), 1, 1})
static void *no_args[] = {NULL};
#define RUN(kernel, grid, block, shared) kernel(grid, block, no_args, shared, compute)

/* ---- phases ---- */

static void set_up(void) {
    int count;
    CUDA(cudaGetDeviceCount, (&count));
    device = options.local_rank % count;
    CUDA(cudaSetDevice, (device));
    load_triton();
    CUDA(cudaMalloc, (&batch, BATCH_BYTES));
    CUDA(cudaMalloc, (&gradients, (size_t)(options.bucket_mb * 1e6) * (size_t)(options.buckets + 1) + 512));
    CUDA(cudaMalloc, (&loss, 512));
    CUDA(cudaMallocHost, (&host_batch, BATCH_BYTES));
    CUDA(cudaMallocHost, (&host_loss, 512));
    CUDA(cudaStreamCreateWithPriority, (&reduce, CU_STREAM_NON_BLOCKING, -1));
    size_t events = (size_t)options.buckets + 1;
    gradients_ready = calloc(events, sizeof *gradients_ready);
    reduced = calloc(events, sizeof *reduced);
    if (!gradients_ready || !reduced) exit(1);
    for (int i = 0; i < options.buckets; i++) {
        CUDA(cudaEventCreateWithFlags, (&gradients_ready[i], CU_EVENT_DISABLE_TIMING));
        CUDA(cudaEventCreateWithFlags, (&reduced[i], CU_EVENT_DISABLE_TIMING));
    }
}

/* The path of this rank: its number in place of {rank}. */
static void path_of_rank(const char *text, char path[4096]) {
    const char *place = strstr(text, "{rank}");
    if (place)
        snprintf(path, 4096, "%.*s%d%s", (int)(place - text), text, options.rank, place + 6);
    else
        snprintf(path, 4096, "%s", text);
}

static void read_file(const char *name) {
    char path[4096], part[4096];
    path_of_rank(name, path);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        perror(path);
        exit(1);
    }
    while (read(file, part, sizeof part) > 0) {}
    close(file);
}

static void load_data(void) {
    if (options.data) read_file(options.data);
    int64_t stall_ns = fakegpu_data_stall_ns ? fakegpu_data_stall_ns() : 0;
    int64_t loaded_ns = now_ns() + (int64_t)(options.data_ms * 1e6) + stall_ns;
    struct timespec until = {loaded_ns / 1000000000, loaded_ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL)) {}
    CUDA(cudaMemcpyAsync, (batch, host_batch, BATCH_BYTES, cudaMemcpyHostToDevice, compute));
}

/* What `.item()` does. */
static void read_back(void) {
    CUDA(cudaMemcpyAsync, (host_loss, loss, 4, cudaMemcpyDeviceToHost, compute));
    CUDA(cudaStreamSynchronize, (compute));
}

static void forward(void) {
    RUN(embedding_lookup_bf16, GRID(TOKENS, 1), BLOCK(256), 0);
    for (int layer = 0; layer < options.layers; layer++) {
        /* A recompilation in the midst of the step: the GPU runs dry while the CPU compiles. */
        if (layer == options.layers / 2 && fakegpu_jit_stall_due && fakegpu_jit_stall_due()) load_triton();
        launch_triton();
        RUN(gemm_bf16_128x128, GRID(3 * HIDDEN / 128, TOKENS / 128), BLOCK(256), 49152);
        RUN(flash_fwd_kernel_hdim128, GRID(TOKENS / 128, 32), BLOCK(128), 98304);
        RUN(gemm_bf16_128x128, GRID(HIDDEN / 128, TOKENS / 128), BLOCK(256), 49152);
        launch_triton();
        RUN(gemm_bf16_256x128, GRID(4 * HIDDEN / 256, TOKENS / 128), BLOCK(256), 98304);
        RUN(elementwise_silu_mul, GRID(4 * HIDDEN, 1), BLOCK(512), 0);
        RUN(gemm_bf16_256x128, GRID(HIDDEN / 256, TOKENS / 128), BLOCK(256), 98304);
    }
    RUN(cross_entropy_forward, GRID(TOKENS, 1), BLOCK(1024), 0);
    read_back();
}

static size_t bucket_count(void) { return (size_t)(options.bucket_mb * 1e6 / 4); }

static void reduce_bucket(int bucket) {
    CUDA(cudaEventRecord, (gradients_ready[bucket], compute));
    CUDA(cudaStreamWaitEvent, (reduce, gradients_ready[bucket], 0));
    float *data = (float *)gradients + (size_t)bucket * bucket_count();
    NCCL(ncclAllReduce, (data, data, bucket_count(), ncclFloat32, ncclSum, comm, reduce));
    CUDA(cudaEventRecord, (reduced[bucket], reduce));
}

static void backward(void) {
    int bucket = 0;
    RUN(cross_entropy_backward, GRID(TOKENS, 1), BLOCK(1024), 0);
    for (int done = 1; done <= options.layers; done++) {
        for (int i = 0; i < 2; i++) {
            RUN(gemm_bf16_128x128_nt, GRID(4 * HIDDEN / 128, HIDDEN / 128), BLOCK(256), 49152);
            RUN(gemm_bf16_128x128_tn, GRID(HIDDEN / 128, HIDDEN / 128), BLOCK(256), 49152);
        }
        RUN(elementwise_silu_mul_backward, GRID(4 * HIDDEN, 1), BLOCK(512), 0);
        RUN(flash_bwd_kernel_hdim128, GRID(TOKENS / 128, 32), BLOCK(256), 131072);
        RUN(gemm_bf16_128x128_nt, GRID(3 * HIDDEN / 128, HIDDEN / 128), BLOCK(256), 49152);
        RUN(gemm_bf16_128x128_tn, GRID(HIDDEN / 128, HIDDEN / 128), BLOCK(256), 49152);
        RUN(rmsnorm_backward, GRID(TOKENS, 1), BLOCK(256), 0);
        /* A bucket goes as soon as its layers' gradients are there. */
        while (!options.sync_before_reduce && (bucket + 1) * options.layers <= done * options.buckets)
            reduce_bucket(bucket++);
    }
    if (options.sync_before_reduce) CUDA(cudaStreamSynchronize, (compute));
    while (bucket < options.buckets) reduce_bucket(bucket++);
}

static void await_gradients(void) {
    for (int bucket = 0; bucket < options.buckets; bucket++)
        CUDA(cudaStreamWaitEvent, (compute, reduced[bucket], 0));
}

static void optimize(void) {
    RUN(multi_tensor_l2norm, GRID(320, 1), BLOCK(512), 0);
    read_back();
    RUN(multi_tensor_scale, GRID(320, 1), BLOCK(512), 0);
    for (int i = 0; i < 4; i++) RUN(multi_tensor_adamw, GRID(320, 1), BLOCK(512), 0);
    CUDA(cudaMemsetAsync, (gradients, 0, bucket_count() * 4 * (size_t)options.buckets + 4, compute));
}

/* ---- the backward thread, as autograd has one a device ---- */

static pthread_mutex_t backward_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t backward_turn = PTHREAD_COND_INITIALIZER;
static enum { IDLE, ASKED, DONE, ENDING } backward_state;

static void *backward_loop(void *unused) {
    (void)unused;
    pthread_setname_np(pthread_self(), "pt_autograd_0");
    CUDA(cudaSetDevice, (device));
    pthread_mutex_lock(&backward_lock);
    for (;;) {
        while (backward_state != ASKED && backward_state != ENDING) pthread_cond_wait(&backward_turn, &backward_lock);
        if (backward_state == ENDING) break;
        pthread_mutex_unlock(&backward_lock);
        backward();
        pthread_mutex_lock(&backward_lock);
        backward_state = DONE;
        pthread_cond_broadcast(&backward_turn);
    }
    pthread_mutex_unlock(&backward_lock);
    return NULL;
}

static void run_backward(void) {
    pthread_mutex_lock(&backward_lock);
    backward_state = ASKED;
    pthread_cond_broadcast(&backward_turn);
    while (backward_state != DONE) pthread_cond_wait(&backward_turn, &backward_lock);
    pthread_mutex_unlock(&backward_lock);
}

static void end_backward(pthread_t thread) {
    pthread_mutex_lock(&backward_lock);
    backward_state = ENDING;
    pthread_cond_broadcast(&backward_turn);
    pthread_mutex_unlock(&backward_lock);
    pthread_join(thread, NULL);
}

/* ---- the log ---- */

static void open_log(void) {
    if (!options.log) return;
    char path[4096];
    path_of_rank(options.log, path);
    log_file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (log_file < 0) {
        perror(path);
        exit(1);
    }
}

/* One write a line: ranks may share a file. */
static void log_line(const char *line, size_t length) {
    if (log_file >= 0 && write(log_file, line, length) != (ssize_t)length) perror("fake_train: log");
}

static void log_step(long step, const int64_t at[6]) {
    char line[512];
    int length = snprintf(line, sizeof line,
                          "{\"rank\": %d, \"step\": %ld, \"start_ns\": %" PRId64 ", \"end_ns\": %" PRId64
                          ", \"data_end_ns\": %" PRId64 ", \"forward_end_ns\": %" PRId64
                          ", \"backward_end_ns\": %" PRId64 ", \"optimizer_end_ns\": %" PRId64 "}\n",
                          options.rank, step, at[0], at[5], at[1], at[2], at[3], at[4]);
    log_line(line, (size_t)length);
}

static void log_counts(void) {
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    if (!file) return;
    fprintf(file, "{\"rank\": %d, \"pid\": %d, \"counts\": ", options.rank, getpid());
    counts_write(file);
    fputs("}\n", file);
    fclose(file);
    log_line(text, size);
    free(text);
}

/* ---- */

static void train(void) {
    pthread_t backward_thread;
    if (pthread_create(&backward_thread, NULL, backward_loop, NULL)) exit(1);
    for (long step = 1; (!options.steps || step <= options.steps) && !job_over(step); step++) {
        if (fakegpu_set_step) fakegpu_set_step(step);
        if (fakegpu_hang_due)
            while (fakegpu_hang_due() && !job_told_to_stop())
                nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
        if (fakegpu_hang_due && fakegpu_hang_due()) break;
        int64_t at[6];
        at[0] = now_ns();
        load_data();
        at[1] = now_ns();
        forward();
        at[2] = now_ns();
        run_backward();
        await_gradients();
        at[3] = now_ns();
        optimize();
        at[4] = at[5] = now_ns();
        log_step(step, at);
    }
    end_backward(backward_thread);
    CUDA(cudaDeviceSynchronize, ());
}

/* Spreads the collectives evenly over the launches. */
static void run_exactly(void) {
    long launches = 0, collectives = 0;
    while (launches < options.exact_launches || collectives < options.exact_collectives) {
        if (launches < options.exact_launches) {
            RUN(gemm_bf16_128x128, GRID(96, 32), BLOCK(256), 49152);
            launches++;
        }
        while (collectives < options.exact_collectives &&
               collectives * options.exact_launches < launches * options.exact_collectives) {
            NCCL(ncclAllReduce, (gradients, gradients, 1024, ncclFloat32, ncclSum, comm, reduce));
            collectives++;
        }
    }
    CUDA(cudaDeviceSynchronize, ());
}

int main(int argc, char **argv) {
    options = parse_options(argc, argv);
    open_log();
    job_catch_signals(options.grace_s);
    if (fakegpu_set_step) fakegpu_set_step(0);
    set_durations();
    set_up();
    ncclUniqueId id;
    job_start(&options, &id);
    NCCL(ncclCommInitRank, (&comm, options.world, id, options.rank));
    workers_start(options.fork_workers);
    if (options.go) wait_for_file(options.go);
    if (job_told_to_stop() && options.go) {
        /* asked to stop while it waited */
    } else if (options.exact_launches) {
        set_kernel_us("gemm_bf16_128x128", 5);
        run_exactly();
    } else {
        train();
    }
    log_counts();
    if (options.hold_s > 0 && !job_told_to_stop())
        nanosleep(&(struct timespec){(time_t)options.hold_s,
                                     (long)((options.hold_s - (double)(time_t)options.hold_s) * 1e9)}, NULL);
    workers_end();
    bool stuck = fakegpu_hang_due && fakegpu_hang_due();
    if (stuck) NCCL(ncclCommAbort, (comm));
    else NCCL(ncclCommDestroy, (comm));
    return 0;
}
