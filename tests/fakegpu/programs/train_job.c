#define _GNU_SOURCE
#include "train_job.h"

#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "train_count.h"

#define PATIENCE_MS 120000

struct shared {
    ncclUniqueId id;
    _Atomic long furthest; /* the last step that any rank has begun; its complement once that is the job's last */
};

static struct shared *shared;
static volatile sig_atomic_t told_to_stop;
static double grace_seconds;
static pid_t *workers;
static int worker_count;

static void sleep_ms(long ms) { nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL); }

static _Noreturn void fail(const char *what) {
    perror(what);
    exit(1);
}

void job_start(const struct options *options, ncclUniqueId *id) {
    static struct shared alone;
    shared = &alone;
    if (options->world == 1) {
        if (id) NCCL(ncclGetUniqueId, (id));
        return;
    }
    int file = -1;
    if (options->rank == 0) {
        struct shared fresh = {0};
        if (id) NCCL(ncclGetUniqueId, (&fresh.id));
        char temporary[4096];
        snprintf(temporary, sizeof temporary, "%s.new", options->rendezvous);
        file = open(temporary, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        if (file < 0 || write(file, &fresh, sizeof fresh) != (ssize_t)sizeof fresh ||
            rename(temporary, options->rendezvous))
            fail(options->rendezvous);
    } else {
        for (int waited = 0; file < 0 && waited < PATIENCE_MS; waited += 5) {
            file = open(options->rendezvous, O_RDWR | O_CLOEXEC);
            if (file < 0) sleep_ms(5);
        }
        if (file < 0) fail(options->rendezvous);
    }
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) fail(options->rendezvous);
    close(file);
    if (id) *id = shared->id;
}

/* The rank may be stuck in a call that never returns; then the alarm ends it. */
static void on_signal(int number) {
    (void)number;
    told_to_stop = 1;
    struct itimerval grace = {.it_value = {(time_t)grace_seconds,
                                           (suseconds_t)((grace_seconds - floor(grace_seconds)) * 1e6) + 1}};
    setitimer(ITIMER_REAL, &grace, NULL);
}

void job_catch_signals(double grace_s) {
    grace_seconds = grace_s;
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
}

bool job_told_to_stop(void) { return told_to_stop; }

/* A rank may be steps ahead of another, where they need not meet in each step. So the last step is the furthest that
 * any had begun when one was asked to stop. */
bool job_over(long step) {
    long furthest = shared->furthest, next;
    do {
        if (furthest < 0) return step > ~furthest;
        next = told_to_stop ? ~furthest : step > furthest ? step : furthest;
    } while (!atomic_compare_exchange_weak(&shared->furthest, &furthest, next));
    return next < 0 && step > furthest;
}

void wait_for_file(const char *path) {
    struct stat status;
    while (!told_to_stop && stat(path, &status)) sleep_ms(5);
}

void workers_start(int count) {
    if (!count) return;
    workers = calloc((size_t)count, sizeof *workers);
    if (!workers) fail("fork");
    pid_t parent = getpid();
    for (int i = 0; i < count; i++) {
        pid_t pid = fork();
        if (pid < 0) fail("fork");
        if (!pid) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            prctl(PR_SET_NAME, "pt_data_worker");
            signal(SIGTERM, SIG_DFL);
            if (getppid() != parent) _exit(0);
            for (;;) pause();
        }
        workers[worker_count++] = pid;
    }
}

void workers_end(void) {
    for (int i = 0; i < worker_count; i++) kill(workers[i], SIGKILL);
    for (int i = 0; i < worker_count; i++) waitpid(workers[i], NULL, 0);
    worker_count = 0;
}
