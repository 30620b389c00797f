/* A loop that loads a batch, passes backward and updates, and logs when each update had ended: pytorch_steps LOG. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

void range(const char *name, size_t length, void (*inside)(void)), pass(void);

static void nap(void) { usleep(3000); }

int main(int argc, char **argv) {
    (void)argc;
    FILE *log = fopen(argv[1], "w");
    setvbuf(log, NULL, _IOLBF, 0);
    const char *data = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", *update = "Optimizer.step#SGD.step";
    for (int64_t step = 0;; step++) {
        range(data, strlen(data), nap);
        pass();
        nap();
        range(update, strlen(update), nap);
        struct timespec at;
        clock_gettime(CLOCK_MONOTONIC, &at);
        fprintf(log, "%ld %ld\n", (long)step, (long)(at.tv_sec * 1000000000L + at.tv_nsec));
    }
}
