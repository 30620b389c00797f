/* Carries out a plan: a training step of any parallel shape, again and again. See README.md. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fakegpu.h"
#include "nccl_abi.h"
#include "plan.h"
#include "plan_kernels.h"
#include "train_count.h"
#include "train_job.h"

/* On a real driver none of these exist, and no fault is planted. */
#pragma weak fakegpu_set_step
#pragma weak fakegpu_data_stall_ns
#pragma weak fakegpu_hang_due

#define BATCH_BYTES (4u << 20)
#define PATIENCE_NS 120000000000

static const char usage[] =
    "usage: fake_plan PLAN [options]\n"
    "Carries out a plan on the fake GPU; {rank} in the name stands for the rank. Ranks come from RANK, WORLD_SIZE,\n"
    "LOCAL_RANK; more than one rank needs FAKEGPU_RENDEZVOUS, the path of a file that does not exist yet.\n\n"
    "  --steps N        steps to do; 0 (default): until SIGTERM\n"
    "  --log PREFIX     the truth goes to PREFIX.<rank>: a line of the groups, then one JSON line a step\n"
    "  --seed N         other drawn numbers (0); the same in all ranks\n"
    "  --grace SECONDS  after SIGTERM, die if the step does not end in that time (10)\n";

static struct options options; /* those of fake_train that the ranks' meeting needs, and --steps, --log, --grace */
static unsigned long seed;
static const struct plan *plan;
static ncclComm_t *comms;    /* one for each of the plan's groups, NULL where this rank is in none */
static cudaStream_t compute; /* NULL, the legacy default stream, as in PyTorch */
static cudaStream_t transfer;
static cudaEvent_t computed, transferred;
static char *buffer, *host_buffer;
static int log_file = -1;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void sleep_ns(int64_t ns) {
    int64_t end_ns = now_ns() + ns;
    struct timespec until = {end_ns / 1000000000, end_ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL)) {}
}

static _Noreturn void fail(const char *what) {
    perror(what);
    exit(1);
}

/* ---- communicators ---- */

/* The first rank of a group makes its id and leaves it in a file beside the one through which all ranks meet. */
static ncclUniqueId unique_id(const struct group *group) {
    ncclUniqueId id;
    char path[4096], temporary[4096 + 8];
    snprintf(path, sizeof path, "%s.%s", options.rendezvous ? options.rendezvous : "", group->id);
    if (group->rank == 0) {
        NCCL(ncclGetUniqueId, (&id));
        if (group->size == 1) return id;
        snprintf(temporary, sizeof temporary, "%s.new", path);
        int file = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        if (file < 0 || write(file, &id, sizeof id) != (ssize_t)sizeof id || rename(temporary, path)) fail(path);
        close(file);
        return id;
    }
    int file;
    int64_t end_ns = now_ns() + PATIENCE_NS;
    while ((file = open(path, O_RDONLY | O_CLOEXEC)) < 0 && now_ns() < end_ns) sleep_ns(2000000);
    if (file < 0 || read(file, &id, sizeof id) != (ssize_t)sizeof id) fail(path);
    close(file);
    return id;
}

static void make_communicators(void) {
    comms = calloc((size_t)plan->group_count, sizeof *comms);
    if (!comms) fail("communicators");
    for (int i = 0; i < plan->group_count; i++) {
        const struct group *group = &plan->groups[i];
        if (group->how == GROUP_SPLIT)
            NCCL(ncclCommSplit, (comms[0], group->color, group->key, &comms[i], NULL));
        else if (group->how == GROUP_INIT || plan->world)
            NCCL(ncclCommInitRank, (&comms[i], group->size, unique_id(group), group->rank));
    }
}

static void end_communicators(bool stuck) {
    for (int i = plan->group_count - 1; i >= 0; i--) {
        if (!comms[i]) continue;
        if (stuck) NCCL(ncclCommAbort, (comms[i]));
        else NCCL(ncclCommDestroy, (comms[i]));
    }
}

/* ---- the truth ---- */

static void log_line(const char *line, size_t length) {
    if (log_file >= 0 && write(log_file, line, length) != (ssize_t)length) perror("fake_plan: log");
}

static void log_groups(void) {
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    if (!file) fail("log");
    fprintf(file, "{\"rank\": %d, \"pid\": %d, \"groups\": {", options.rank, getpid());
    const char *separator = "";
    for (int i = 0; i < plan->group_count; i++) {
        const struct group *group = &plan->groups[i];
        if (!comms[i]) continue;
        int count, rank;
        NCCL(ncclCommCount, (comms[i], &count));
        NCCL(ncclCommUserRank, (comms[i], &rank));
        if (count != group->size || rank != group->rank) {
            fprintf(stderr, "fake_plan: NCCL says %d of %d in %s, the plans %d of %d\n", rank, count, group->name,
                    group->rank, group->size);
            exit(1);
        }
        fprintf(file, "%s\"%s\": {\"ranks\": [", separator, group->name);
        for (int member = 0; member < count; member++) fprintf(file, "%s%d", member ? ", " : "", group->ranks[member]);
        fprintf(file, "], \"size\": %d, \"rank\": %d}", count, rank);
        separator = ", ";
    }
    fputs("}}\n", file);
    fclose(file);
    log_line(text, size);
    free(text);
}

static void open_log(void) {
    if (!options.log) return;
    char path[4096];
    snprintf(path, sizeof path, "%s.%d", options.log, options.rank);
    log_file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (log_file < 0) fail(path);
}

static void log_step(long step, int64_t start_ns, int64_t end_ns) {
    char line[128];
    int length = snprintf(line, sizeof line, "{\"step\": %ld, \"start_ns\": %" PRId64 ", \"end_ns\": %" PRId64 "}\n",
                          step, start_ns, end_ns);
    log_line(line, (size_t)length);
}

/* ---- drawn numbers ---- */

#define KEYED (1ull << 32) /* the numbers of keys lie apart from those drawn in turn */

static uint64_t drawn_so_far, turn; /* turn: 0 outside of repetitions */

/* splitmix64 */
static uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* The same on all ranks whose plans draw in the same order, or in the same turn under the same key. Under one key, the
 * numbers lie equally far between their bounds. */
static long value_of(const struct amount *amount, long step) {
    if (!amount->drawn) return amount->least;
    uint64_t which = amount->key >= 0 ? mixed(turn) ^ (KEYED + (uint64_t)amount->key) : drawn_so_far++;
    uint64_t random = mixed(mixed(mixed(seed) ^ (uint64_t)step) ^ which) >> 11;
    return amount->least + (long)((double)random * 0x1p-53 * (double)(amount->most - amount->least + 1));
}

/* ---- a step ---- */

static bool in_group;

/* Communication has a stream of its own; it comes after what was computed, and what is computed next after it. */
static void before_transfer(void) {
    if (in_group) return;
    CUDA(cudaEventRecord, (computed, compute));
    CUDA(cudaStreamWaitEvent, (transfer, computed, 0));
}

static void after_transfer(void) {
    if (in_group) return;
    CUDA(cudaEventRecord, (transferred, transfer));
    CUDA(cudaStreamWaitEvent, (compute, transferred, 0));
}

static void communicate(const struct instruction *one, size_t count) {
    ncclComm_t comm = comms[one->group];
    before_transfer();
    switch (one->act) {
    case ACT_ALLREDUCE:
        NCCL(ncclAllReduce, (buffer, buffer, count, one->type, ncclSum, comm, transfer));
        break;
    case ACT_ALLGATHER:
        NCCL(ncclAllGather, (buffer, buffer, count, one->type, comm, transfer));
        break;
    case ACT_REDUCESCATTER:
        NCCL(ncclReduceScatter, (buffer, buffer, count, one->type, ncclSum, comm, transfer));
        break;
    case ACT_BROADCAST:
        NCCL(ncclBroadcast, (buffer, buffer, count, one->type, 0, comm, transfer));
        break;
    case ACT_ALLTOALL:
        NCCL(ncclAlltoAll, (buffer, buffer, count, one->type, comm, transfer));
        break;
    case ACT_SEND:
        NCCL(ncclSend, (buffer, count, one->type, one->peer, comm, transfer));
        break;
    default:
        NCCL(ncclRecv, (buffer, count, one->type, one->peer, comm, transfer));
        break;
    }
    after_transfer();
}

static void carry_out(int from, int to, long step) {
    for (int i = from; i < to; i++) {
        const struct instruction *one = &plan->step[i];
        long amount = value_of(&one->amount, step);
        switch (one->act) {
        case ACT_DATA:
            sleep_ns(amount * 1000 + (fakegpu_data_stall_ns ? fakegpu_data_stall_ns() : 0));
            CUDA(cudaMemcpyAsync, (buffer, host_buffer, BATCH_BYTES, cudaMemcpyHostToDevice, compute));
            break;
        case ACT_HOST:
            sleep_ns(amount * 1000);
            break;
        case ACT_SYNC:
            CUDA(cudaStreamSynchronize, (compute));
            break;
        case ACT_D2H:
            CUDA(cudaMemcpyAsync, (host_buffer, buffer, (size_t)amount, cudaMemcpyDeviceToHost, compute));
            break;
        case ACT_KERNEL:
            for (long n = 0; n < amount; n++) plan_launch(one->kernel, 0, compute);
            break;
        case ACT_KERNEL_SIZED:
            plan_launch(one->kernel, (unsigned)amount, compute);
            break;
        case ACT_GROUP_START:
            before_transfer();
            NCCL(ncclGroupStart, ());
            in_group = true;
            break;
        case ACT_GROUP_END:
            NCCL(ncclGroupEnd, ());
            in_group = false;
            after_transfer();
            break;
        case ACT_EVERY:
            if (step % amount) i = one->done;
            break;
        case ACT_REPEAT:
            for (uint64_t n = 0, outer = turn; n < (uint64_t)amount; n++, turn = outer) {
                turn = mixed(outer) + n + 1;
                carry_out(i + 1, one->done, step);
            }
            i = one->done;
            break;
        case ACT_DONE:
            break;
        default:
            communicate(one, (size_t)amount);
        }
    }
}

static void run(void) {
    for (long step = 1; (!options.steps || step <= options.steps) && !job_over(step); step++) {
        if (fakegpu_set_step) fakegpu_set_step(step);
        if (fakegpu_hang_due)
            while (fakegpu_hang_due() && !job_told_to_stop()) sleep_ns(50000000);
        if (fakegpu_hang_due && fakegpu_hang_due()) return;
        drawn_so_far = 0;
        int64_t start_ns = now_ns();
        carry_out(0, plan->length, step);
        log_step(step, start_ns, now_ns());
    }
    CUDA(cudaDeviceSynchronize, ());
}

/* ---- */

static void set_up(void) {
    int count;
    CUDA(cudaGetDeviceCount, (&count));
    CUDA(cudaSetDevice, (options.local_rank % count));
    /* Enough for every operation: the memory of the fake is only a number. */
    uint64_t bytes = BATCH_BYTES, host_bytes = BATCH_BYTES;
    for (int i = 0; i < plan->length; i++) {
        const struct instruction *one = &plan->step[i];
        uint64_t most = (uint64_t)one->amount.most;
        if (one->act >= ACT_ALLREDUCE && one->act <= ACT_RECV) {
            most *= size_of(one->type) * (uint64_t)plan->groups[one->group].size;
            if (most > bytes) bytes = most;
        } else if (one->act == ACT_D2H) {
            if (most > bytes) bytes = most;
            if (most > host_bytes) host_bytes = most;
        }
    }
    CUDA(cudaMalloc, ((void **)&buffer, bytes));
    CUDA(cudaMallocHost, ((void **)&host_buffer, host_bytes));
    CUDA(cudaStreamCreateWithPriority, (&transfer, CU_STREAM_NON_BLOCKING, -1));
    CUDA(cudaEventCreateWithFlags, (&computed, CU_EVENT_DISABLE_TIMING));
    CUDA(cudaEventCreateWithFlags, (&transferred, CU_EVENT_DISABLE_TIMING));
}

static _Noreturn void refuse(const char *what, const char *value) {
    fprintf(stderr, "fake_plan: %s%s%s\n", what, value ? ": " : "", value ? value : "");
    exit(2);
}

static double number(const char *text, const char *name) {
    char *end;
    errno = 0;
    double value = text ? strtod(text, &end) : 0;
    if (!text || errno || end == text || *end || !(value >= 0) || value > 1e12) refuse("malformed value for", name);
    return value;
}

static int from_environment(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? (int)number(text, name) : otherwise;
}

static const char *read_options(int argc, char **argv) {
    const char *path = NULL;
    options.grace_s = 10;
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(name, "--help")) {
            fputs(usage, stdout);
            exit(0);
        } else if (*name != '-' && !path) {
            path = name;
            continue;
        } else if (!strcmp(name, "--steps")) {
            options.steps = (long)number(value, name);
        } else if (!strcmp(name, "--seed")) {
            seed = (unsigned long)number(value, name);
        } else if (!strcmp(name, "--grace")) {
            options.grace_s = number(value, name);
        } else if (!strcmp(name, "--log") && value) {
            options.log = value;
        } else {
            refuse("unknown option or missing value (try --help)", name);
        }
        i++;
    }
    if (!path) refuse("no plan (try --help)", NULL);
    options.rank = from_environment("RANK", 0);
    options.world = from_environment("WORLD_SIZE", 1);
    options.local_rank = from_environment("LOCAL_RANK", 0);
    options.rendezvous = getenv("FAKEGPU_RENDEZVOUS");
    if (options.rank >= options.world) refuse("RANK must be below WORLD_SIZE", NULL);
    if (options.world > 1 && !options.rendezvous) refuse("more than one rank needs FAKEGPU_RENDEZVOUS", NULL);
    return path;
}

int main(int argc, char **argv) {
    const char *path = read_options(argc, argv);
    plan = &plans_read(path, options.world)[options.rank];
    open_log();
    job_catch_signals(options.grace_s);
    if (fakegpu_set_step) fakegpu_set_step(0);
    set_up();
    job_start(&options, NULL);
    make_communicators();
    log_groups();
    run();
    end_communicators(fakegpu_hang_due && fakegpu_hang_due());
    return 0;
}
