/* FAKEGPU_CUPTI_*: read when the library is loaded, as strictly as the driver reads its own. */
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cupti.h"

struct cupti_settings cupti_settings = {.version = 130001};

static const struct setting {
    const char *name;
    size_t offset;
    int64_t least, most;
} table[] = {
    {"VERSION", offsetof(struct cupti_settings, version), 1, 1000000},
    {"BUSY", offsetof(struct cupti_settings, busy), 0, 1000000},
    {"CORRUPT", offsetof(struct cupti_settings, corrupt), 0, 1000000000},
    {"FLUSH_DELAY_MS", offsetof(struct cupti_settings, flush_delay_ms), 0, 3600000},
    {"PER_THREAD", offsetof(struct cupti_settings, per_thread), 0, 1},
    {"RESERVE", offsetof(struct cupti_settings, reserve), 0, 1},
    {"REUSE_NAMES", offsetof(struct cupti_settings, reuse_names), 0, 1},
    {"OVERHEAD", offsetof(struct cupti_settings, overhead), 0, 1},
    {"STRICT", offsetof(struct cupti_settings, strict), 0, 1},
};

static bool parse(const char *text, const struct setting *setting) {
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno || end == text || *end || value < setting->least || value > setting->most) return false;
    *(int64_t *)((char *)&cupti_settings + setting->offset) = value;
    return true;
}

/* function:code,… */
static CUptiResult failure_in(const char *list, const char *function, bool *malformed) {
    CUptiResult found = 0;
    while (*list) {
        size_t name = strcspn(list, ":,");
        char *end;
        long code = list[name] == ':' ? strtol(list + name + 1, &end, 10) : 0;
        if (strncmp(list, "cupti", 5) || code <= 0 || (*end && *end != ',')) {
            *malformed = true;
            return 0;
        }
        if (strlen(function) == name && !memcmp(list, function, name)) found = (CUptiResult)code;
        list = *end ? end + 1 : end;
    }
    return found;
}

CUptiResult planted_failure(const char *function) {
    bool malformed;
    return cupti_settings.fail[0] ? failure_in(cupti_settings.fail, function, &malformed) : 0;
}

void misuse(const char *what) {
    if (!cupti_settings.strict) return;
    fprintf(stderr, "fakegpu: FAKEGPU_CUPTI_STRICT: %s\n", what);
    abort();
}

static bool apply(const char *name, size_t length, const char *text, bool *known) {
    *known = true;
    if (length == 4 && !memcmp(name, "FAIL", 4)) {
        bool malformed = strlen(text) >= sizeof cupti_settings.fail;
        if (malformed) return false;
        strcpy(cupti_settings.fail, text);
        failure_in(text, "", &malformed);
        return !malformed;
    }
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (strlen(table[i].name) == length && !memcmp(table[i].name, name, length)) return parse(text, &table[i]);
    return *known = false;
}

__attribute__((constructor)) static void start(void) {
    extern char **environ;
    static const char prefix[] = "FAKEGPU_CUPTI_";
    bool all_good = true;
    for (char **entry = environ; *entry; entry++) {
        if (strncmp(*entry, prefix, sizeof prefix - 1)) continue;
        const char *name = *entry + sizeof prefix - 1;
        size_t length = strcspn(name, "=");
        bool known, good = apply(name, length, name + length + (name[length] == '='), &known);
        if (!known) fprintf(stderr, "fakegpu: unknown variable %s%.*s\n", prefix, (int)length, name);
        if (known && !good) fprintf(stderr, "fakegpu: malformed %s\n", *entry);
        all_good &= good;
    }
    if (!all_good) _exit(2);
}
