/* A loop that names its steps and their parts to NVTX, and logs when it did: before and after each call, ns.
 *
 *     nvtx_steps LOG chars|wide|attributes|domain|started|points [whole]
 *
 * whole: with a backward pass and an optimiser, too. A line of the log is a call: what, before, after. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <wchar.h>

int nvtxRangePushA(const char *), nvtxRangePushW(const wchar_t *), nvtxRangePushEx(const void *), nvtxRangePop(void);
int nvtxDomainRangePushEx(void *, const void *), nvtxDomainRangePop(void *);
uint64_t nvtxRangeStartA(const char *);
void nvtxRangeEnd(uint64_t), nvtxMarkA(const char *);

/* nvtx3/nvToolsExt.h */
struct attributes {
    uint16_t version, size;
    uint32_t category;
    int32_t colour_type;
    uint32_t colour;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const void *message;
};

#define PAGE 4096
/* A name whose page is taken out of memory: with no tool in the process nobody reads names, and so nobody maps them. */
static const char unread[PAGE] __attribute__((aligned(PAGE))) = "backward";

static const char *style;
static FILE *log_file;

static int64_t now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000LL + at.tv_nsec;
}

static int is(const char *word) { return !strcmp(style, word); }

static void begin(const char *what, const char *name) {
    struct attributes ascii = {.message_type = 1, .message = name};
    wchar_t wide[64];
    if (is("wide")) swprintf(wide, 64, L"%s", name);
    int64_t before = now();
    if (is("wide")) nvtxRangePushW(wide);
    else if (is("attributes")) nvtxRangePushEx(&ascii);
    else if (is("domain")) nvtxDomainRangePushEx(NULL, &ascii);
    else if (is("started")) nvtxRangeStartA(name);
    else if (is("points")) nvtxMarkA(name);
    else nvtxRangePushA(name);
    fprintf(log_file, "%s %ld %ld\n", what, (long)before, (long)now());
}

static void end(const char *what) {
    int64_t before = now();
    if (is("domain")) nvtxDomainRangePop(NULL);
    else if (is("started")) nvtxRangeEnd(0);
    else if (!is("points")) nvtxRangePop();
    fprintf(log_file, "%s %ld %ld\n", what, (long)before, (long)now());
}

static void part(const char *what, const char *name, long us) {
    begin(what, name);
    nanosleep(&(struct timespec){0, us * 1000}, NULL);
    end(what);
}

int main(int count, char **words) {
    log_file = fopen(words[1], "w");
    style = words[2];
    nvtxRangePushA("main loop"); /* never ended */
    for (int step = 0;; step++) {
        char name[64];
        snprintf(name, sizeof name, "step %d", step);
        begin("step", name);
        part("load data", "load data", 1000);
        for (int i = 0; i < 2; i++) {
            part("forward", "forward", 1000);
            part("layer 7 norm", "layer 7 norm", 100);
        }
        if (count > 3) {
            if (madvise((void *)unread, PAGE, MADV_DONTNEED)) return 1;
            part("backward", unread, 1000);
            part("optimizer.step", "optimizer.step", 1000);
        }
        end("end");
        if (step % 5 == 4) part("evaluation step", "evaluation step", 500);
        fflush(log_file);
    }
}
