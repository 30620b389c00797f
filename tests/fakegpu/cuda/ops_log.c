/* FAKEGPU_OPS_LOG: a file with every operation that ran, whoever watched or did not. */
#include "ops_log.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "settings.h"

struct entry {
    int64_t called_ns, start_ns, transfer_ns, end_ns;
    uint64_t correlation, bytes;
    uint32_t kind, copy, device, stream, name, graph, graph_node, unused;
};

static pid_t process; /* 0: no log */
static int file = -1, names_file = -1;
static struct entry entries[1024];
static size_t count;

static int create(const char *suffix) {
    char path[sizeof settings.ops_log + 32];
    snprintf(path, sizeof path, "%s.%d%s", settings.ops_log, (int)process, suffix);
    int made = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0666);
    if (made < 0) {
        perror(path);
        _exit(2);
    }
    return made;
}

static void write_all(int to, const void *data, size_t size) {
    while (size) {
        ssize_t done = write(to, data, size);
        if (done < 0) {
            perror("FAKEGPU_OPS_LOG");
            _exit(2);
        }
        data = (const char *)data + done;
        size -= (size_t)done;
    }
}

bool ops_log_on(void) { return process; }

/* Made when a process first names a kernel or queues work: one that only passes through leaves no files. */
void ops_log_open(void) {
    if (process || !settings.ops_log[0]) return;
    process = getpid();
    file = create("");
    names_file = create(".names");
}

void ops_log_name(const char *name) {
    if (!process) return;
    write_all(names_file, name, strlen(name));
    write_all(names_file, "\n", 1);
}

static void write_out(void) {
    write_all(file, entries, count * sizeof *entries);
    count = 0;
}

void ops_log_add(const struct fakegpu_record *op, uint32_t name) {
    entries[count++] = (struct entry){
        op->called_ns, op->start_ns, op->transfer_ns, op->end_ns, op->correlation, op->bytes, (uint32_t)op->kind, (uint32_t)op->copy,
        op->device, op->stream, name, op->graph, op->graph_node, 0,
    };
    if (count == sizeof entries / sizeof *entries) write_out();
}

/* A forked child has neither the thread that delivers nor a right to its parent's file. */
__attribute__((destructor)) static void end(void) {
    if (!process || process != getpid()) return;
    fakegpu_deliver();
    engine_lock();
    write_out();
    engine_unlock();
}
