#define _GNU_SOURCE
#include "train_count.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static struct counter *counters;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* One counter a place in the code: the same call may have several. */
void count_call(struct counter *counter) {
    pthread_mutex_lock(&lock);
    counter->count++;
    if (!counter->listed) {
        counter->listed = 1;
        counter->next = counters;
        counters = counter;
    }
    pthread_mutex_unlock(&lock);
}

void counts_write(FILE *file) {
    pthread_mutex_lock(&lock);
    const char *separator = "{";
    for (struct counter *counter = counters; counter; counter = counter->next) {
        int earlier = 0;
        unsigned long sum = 0;
        for (struct counter *other = counters; other != counter; other = other->next)
            earlier |= !strcmp(other->name, counter->name);
        for (struct counter *other = counter; other; other = other->next)
            if (!strcmp(other->name, counter->name)) sum += other->count;
        if (earlier) continue;
        fprintf(file, "%s\"%s\": %lu", separator, counter->name, sum);
        separator = ", ";
    }
    fputs(*separator == '{' ? "{}" : "}", file);
    pthread_mutex_unlock(&lock);
}

void call_failed(const char *call, int result, const char *text) {
    fprintf(stderr, "%s: %s failed: %d (%s)\n", program_invocation_short_name, call, result, text);
    exit(1);
}
