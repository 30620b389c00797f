#include "settings.h"

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "engine.h"
#include "fakegpu.h"

#define DEFAULT_KERNEL_NS 20000
#define CONTROL_PERIOD_NS 100000000
#define MAX_PROGRAM_KERNELS 256

enum type { INTEGER, REAL, TEXT, PATTERNS, ELSEWHERE };

struct setting {
    const char *name;
    enum type type;
    size_t offset;
    double least;
    bool live; /* may stand in the control file */
};

#define AT(field) offsetof(struct settings, field)
static const struct setting table[] = {
    {"RANK", INTEGER, AT(rank), 0, false},
    {"FAKEGPU_DEVICES", INTEGER, AT(devices), 1, false},
    {"FAKEGPU_SEED", INTEGER, AT(seed), 0, false},
    {"FAKEGPU_JITTER", REAL, AT(jitter), 0, false},
    {"FAKEGPU_MEMORY_GB", INTEGER, AT(memory_gb), 1, false},
    {"FAKEGPU_CAPABILITY", INTEGER, AT(capability), 10, false},
    {"FAKEGPU_COMPUTE", INTEGER, AT(compute), 0, false},
    {"FAKEGPU_COPY_GBPS", REAL, AT(copy_gbps), 1e-3, false},
    {"FAKEGPU_LINK_GBPS", REAL, AT(link_gbps), 1e-3, false},
    {"FAKEGPU_LINK_LATENCY_NS", INTEGER, AT(link_latency_ns), 0, false},
    {"FAKEGPU_KERNEL_NS", PATTERNS, 0, 0, false},
    {"FAKEGPU_CONTROL", TEXT, AT(control), 0, false},
    {"FAKEGPU_OPS_LOG", TEXT, AT(ops_log), 0, false},
    {"FAKEGPU_SLOW_RANK", INTEGER, AT(slow_rank), -1, true},
    {"FAKEGPU_SLOW_FACTOR", REAL, AT(slow_factor), 1e-3, true},
    {"FAKEGPU_SLOW_LINK_RANK", INTEGER, AT(slow_link_rank), -1, true},
    {"FAKEGPU_SLOW_LINK_FACTOR", REAL, AT(slow_link_factor), 1e-3, true},
    {"FAKEGPU_JIT_STALL_RANK", INTEGER, AT(jit_rank), -1, true},
    {"FAKEGPU_JIT_STALL_MS", REAL, AT(jit_ms), 0, true},
    {"FAKEGPU_JIT_STALL_EVERY", INTEGER, AT(jit_every), 1, true},
    {"FAKEGPU_DATA_STALL_RANK", INTEGER, AT(data_rank), -1, true},
    {"FAKEGPU_DATA_STALL_MS", REAL, AT(data_ms), 0, true},
    {"FAKEGPU_HANG_RANK", INTEGER, AT(hang_rank), -1, true},
    {"FAKEGPU_HANG_STEP", INTEGER, AT(hang_step), 0, true},
    {"FAKEGPU_FAULT_FROM_STEP", INTEGER, AT(from_step), 0, true},
    {"FAKEGPU_SLOW_DEVICE", INTEGER, AT(slow_device), -1, true},
    {"FAKEGPU_WRONG_DEVICE", INTEGER, AT(wrong_device), -1, true},
    {"FAKEGPU_BROKEN_DEVICE", INTEGER, AT(broken_device), -1, true},
    {"FAKEGPU_RENDEZVOUS", ELSEWHERE, 0, 0, false},
    {"FAKEGPU_INIT_TIMEOUT_S", ELSEWHERE, 0, 0, false},
    {"FAKEGPU_BUILD", ELSEWHERE, 0, 0, false},
};
#define TABLE_SIZE (sizeof table / sizeof table[0])

struct settings settings = {
    .devices = 8,
    .memory_gb = 141,
    .capability = 90,
    .slow_device = -1,
    .wrong_device = -1,
    .broken_device = -1,
    .jitter = 0.01,
    .copy_gbps = 50,
    .link_gbps = 50,
    .link_latency_ns = 20000,
    .slow_rank = -1,
    .slow_link_rank = -1,
    .jit_rank = -1,
    .data_rank = -1,
    .hang_rank = -1,
    .slow_factor = 2,
    .slow_link_factor = 4,
    .jit_ms = 50,
    .jit_every = 10,
    .data_ms = 50,
};

static struct settings from_environment;
static int64_t current_step = -1; /* the program has not set it; guarded by the engine's lock */
static struct {
    const char *name;
    int64_t duration_ns;
} program_kernels[MAX_PROGRAM_KERNELS];
static int program_kernel_count;

static const struct setting *find(const char *name, size_t length) {
    for (size_t i = 0; i < TABLE_SIZE; i++)
        if (strlen(table[i].name) == length && !memcmp(table[i].name, name, length)) return &table[i];
    return NULL;
}

static bool parse_integer(const char *text, double least, int64_t *value) {
    char *end;
    errno = 0;
    long long parsed = strtoll(text, &end, 10);
    if (errno || end == text || *end || (double)parsed < least) return false;
    *value = parsed;
    return true;
}

static bool parse_real(const char *text, double least, double *value) {
    char *end;
    errno = 0;
    double parsed = strtod(text, &end);
    if (errno || end == text || *end || !(parsed >= least) || !(parsed <= 1e12)) return false;
    *value = parsed;
    return true;
}

static bool parse_patterns(const char *text, struct settings *into) {
    into->pattern_count = 0;
    while (*text) {
        size_t length = strcspn(text, ",");
        char part[192];
        if (length >= sizeof part || into->pattern_count == MAX_KERNEL_PATTERNS) return false;
        memcpy(part, text, length);
        part[length] = 0;
        char *equals = strrchr(part, '=');
        if (!equals || equals == part || (size_t)(equals - part) >= sizeof into->patterns[0].text) return false;
        struct kernel_pattern *pattern = &into->patterns[into->pattern_count];
        if (!parse_integer(equals + 1, 0, &pattern->duration_ns)) return false;
        *equals = 0;
        strcpy(pattern->text, part);
        into->pattern_count++;
        text += length;
        if (*text == ',') text++;
    }
    return true;
}

static bool apply(const struct setting *setting, const char *text, struct settings *into) {
    void *field = (char *)into + setting->offset;
    switch (setting->type) {
    case INTEGER: return parse_integer(text, setting->least, field);
    case REAL: return parse_real(text, setting->least, field);
    case PATTERNS: return parse_patterns(text, into);
    case TEXT:
        if (strlen(text) >= sizeof into->control) return false;
        strcpy(field, text);
        return true;
    case ELSEWHERE: return true;
    }
    return false;
}

/* A misspelt fault would quietly test nothing, so unknown names end the program just as bad values do. */
static void read_environment(void) {
    extern char **environ;
    bool good = true;
    for (char **entry = environ; *entry; entry++) {
        size_t length = strcspn(*entry, "=");
        bool cupti = !strncmp(*entry, "FAKEGPU_CUPTI_", 14); /* libcupti's, which looks at them itself */
        bool ours = !strncmp(*entry, "FAKEGPU_", 8) && !cupti;
        const struct setting *setting = find(*entry, length);
        if (!setting && !ours) continue;
        if (!setting) {
            fprintf(stderr, "fakegpu: unknown variable %.*s\n", (int)length, *entry);
            good = false;
        } else if (!apply(setting, *entry + length + 1, &settings)) {
            fprintf(stderr, "fakegpu: malformed %s\n", *entry);
            good = false;
        }
    }
    if (!good) _exit(2);
    from_environment = settings;
}

/* A file that is being rewritten may be read half-way: it is taken only when every line of it is good. */
static bool read_control(struct settings *into) {
    FILE *file = fopen(from_environment.control, "re");
    if (!file) return errno == ENOENT; /* no file, no override */
    char line[512];
    bool good = true;
    while (good && fgets(line, sizeof line, file)) {
        char *text = line + strspn(line, " \t");
        text[strcspn(text, "\r\n")] = 0;
        if (!*text || *text == '#') continue;
        size_t length = strcspn(text, "=");
        const struct setting *setting = find(text, length);
        good = setting && setting->live && text[length] == '=' && apply(setting, text + length + 1, into);
        if (!good) fprintf(stderr, "fakegpu: %s: ignored for this line: %s\n", from_environment.control, text);
    }
    fclose(file);
    return good;
}

static void *follow_control(void *unused) {
    (void)unused;
    struct stat last = {0};
    bool first = true;
    for (;;) {
        struct stat now;
        if (stat(from_environment.control, &now)) memset(&now, 0, sizeof now);
        if (first || now.st_ino != last.st_ino || now.st_size != last.st_size ||
            now.st_mtim.tv_sec != last.st_mtim.tv_sec || now.st_mtim.tv_nsec != last.st_mtim.tv_nsec) {
            struct settings fresh = from_environment;
            if (read_control(&fresh)) {
                engine_lock();
                settings = fresh;
                engine_unlock();
            }
            last = now;
            first = false;
        }
        nanosleep(&(struct timespec){.tv_nsec = CONTROL_PERIOD_NS}, NULL);
    }
    return NULL;
}

__attribute__((constructor)) static void start(void) {
    read_environment();
    if (settings.control[0]) engine_thread("fakegpu-control", follow_control);
}

bool fault_active(int64_t rank) {
    if (rank < 0 || rank != settings.rank) return false;
    return current_step < 0 ? settings.from_step == 0 : current_step > settings.from_step;
}

int64_t kernel_duration_ns(const char *name) {
    for (int i = 0; i < settings.pattern_count; i++) {
        const struct kernel_pattern *pattern = &settings.patterns[i];
        if (!strcmp(pattern->text, "*") || strstr(name, pattern->text)) return pattern->duration_ns;
    }
    for (int i = 0; i < program_kernel_count; i++)
        if (!strcmp(program_kernels[i].name, name)) return program_kernels[i].duration_ns;
    return DEFAULT_KERNEL_NS;
}

void fakegpu_set_kernel_ns(const char *name, int64_t duration_ns) {
    engine_lock();
    int i = 0;
    while (i < program_kernel_count && strcmp(program_kernels[i].name, name)) i++;
    if (i < MAX_PROGRAM_KERNELS && duration_ns >= 0) {
        if (i == program_kernel_count) {
            program_kernels[i].name = engine_intern(name);
            program_kernel_count++;
        }
        program_kernels[i].duration_ns = duration_ns;
        functions_retime();
    }
    engine_unlock();
}

void fakegpu_set_step(int64_t step) {
    engine_lock();
    current_step = step;
    engine_unlock();
}

bool fakegpu_jit_stall_due(void) {
    engine_lock();
    bool due = fault_active(settings.jit_rank) && current_step >= 0 && current_step % settings.jit_every == 0;
    engine_unlock();
    return due;
}

int64_t fakegpu_data_stall_ns(void) {
    engine_lock();
    int64_t stall = fault_active(settings.data_rank) ? (int64_t)(settings.data_ms * 1e6) : 0;
    engine_unlock();
    return stall;
}

bool fakegpu_hang_due(void) {
    engine_lock();
    bool due = fault_active(settings.hang_rank) && current_step >= settings.hang_step;
    engine_unlock();
    return due;
}

struct fakegpu_link fakegpu_link(void) {
    engine_lock();
    struct fakegpu_link link = {
        .latency_ns = settings.link_latency_ns,
        .bytes_per_ns = settings.link_gbps,
        .factor = fault_active(settings.slow_link_rank) ? settings.slow_link_factor : 1,
        .jitter = settings.jitter,
        .seed = (uint64_t)settings.seed,
        .rank = (int)settings.rank,
    };
    engine_unlock();
    return link;
}

static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* The sum of four 16-bit uniforms is near enough to normal, and needs no libm. */
double fakegpu_noise(uint64_t key, uint64_t index) {
    uint64_t bits = mix(mix(key ^ ((uint64_t)from_environment.seed << 32)) ^ index);
    double sum = (double)(bits & 0xffff) + (double)(bits >> 16 & 0xffff) + (double)(bits >> 32 & 0xffff) +
                 (double)(bits >> 48);
    double normal = (sum / 65536 - 2) * 1.7320508;
    double factor = 1 + from_environment.jitter * normal;
    return factor > 0.1 ? factor : 0.1;
}
