#define _GNU_SOURCE
#include "plan.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan_kernels.h"

#define MAX_WORDS 8
#define MAX_DEPTH 16
#define MOST 1000000000000

/* The words after an instruction's name: n a number, c one from 1, r the same or A-B, d two that are drawn between,
 * k a kernel, g a group, p a rank in it, t a type. After r and d there may be a key. */
static const struct form {
    const char *name, *words;
    enum act act;
} forms[] = {
    {"data", "n", ACT_DATA},
    {"host", "n", ACT_HOST},
    {"sync", "", ACT_SYNC},
    {"d2h", "c", ACT_D2H},
    {"kernel", "kc", ACT_KERNEL},
    {"kernelv", "kd", ACT_KERNEL_SIZED},
    {"allreduce", "gct", ACT_ALLREDUCE},
    {"allreducev", "gdt", ACT_ALLREDUCE},
    {"allgather", "gct", ACT_ALLGATHER},
    {"reducescatter", "gct", ACT_REDUCESCATTER},
    {"broadcast", "gct", ACT_BROADCAST},
    {"alltoall", "gct", ACT_ALLTOALL},
    {"send", "gpct", ACT_SEND},
    {"sendv", "gpdt", ACT_SEND},
    {"recv", "gpct", ACT_RECV},
    {"recvv", "gpdt", ACT_RECV},
    {"groupstart", "", ACT_GROUP_START},
    {"groupend", "", ACT_GROUP_END},
    {"every", "c", ACT_EVERY},
    {"repeat", "r", ACT_REPEAT},
    {"done", "", ACT_DONE},
};

static _Noreturn __attribute__((format(printf, 3, 4))) void refuse(const struct plan *plan, int line,
                                                                     const char *format, ...) {
    fprintf(stderr, "fake_plan: %s", plan->path);
    if (line) fprintf(stderr, ":%d", line);
    fputs(": ", stderr);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(2);
}

static void *more(void *array, int count, size_t each) {
    array = reallocarray(array, (size_t)count + 1, each);
    if (!array) abort();
    memset((char *)array + (size_t)count * each, 0, each);
    return array;
}

static bool parse(const char *text, long least, long *value) {
    char *end;
    errno = 0;
    *value = strtol(text, &end, 10);
    return !errno && end != text && !*end && *value >= least && *value <= MOST;
}

static long number(const struct plan *plan, int line, const char *text, long least) {
    long value;
    if (!parse(text, least, &value)) refuse(plan, line, "not a number from %ld: %s", least, text);
    return value;
}

static void name(const struct plan *plan, int line, const char *text, char into[32]) {
    size_t length = strlen(text);
    bool good = length < 32;
    for (const char *c = text; *c; c++) good &= isalnum((unsigned char)*c) || *c == '_' || *c == '-';
    if (!good) refuse(plan, line, "not a name: %s", text);
    memcpy(into, text, length + 1);
}

/* ---- one plan ---- */

static int find_group(const struct plan *plan, const char *text) {
    for (int i = 0; i < plan->group_count; i++)
        if (!strcmp(plan->groups[i].name, text)) return i;
    return -1;
}

static void read_group(struct plan *plan, int line, char **words, int count) {
    bool split = count == 5 && !strcmp(words[2], "split"), init = count == 6 && !strcmp(words[2], "init");
    if (!split && !init) refuse(plan, line, "want: group NAME split COLOR KEY, or group NAME init SIZE RANK ID");
    if (find_group(plan, words[1]) >= 0) refuse(plan, line, "there is a group %s already", words[1]);
    plan->groups = more(plan->groups, plan->group_count, sizeof *plan->groups);
    struct group *group = &plan->groups[plan->group_count++];
    group->line = line;
    name(plan, line, words[1], group->name);
    if (split) {
        group->how = GROUP_SPLIT;
        group->color = (int)number(plan, line, words[3], NCCL_SPLIT_NOCOLOR);
        group->key = (int)number(plan, line, words[4], 0);
        plan->world = true;
        return;
    }
    group->how = GROUP_INIT;
    group->size = (int)number(plan, line, words[3], 1);
    group->rank = (int)number(plan, line, words[4], 0);
    name(plan, line, words[5], group->id);
    if (group->rank >= group->size) refuse(plan, line, "rank %d of %d", group->rank, group->size);
    for (struct group *other = plan->groups; other < group; other++)
        if (other->how == GROUP_INIT && !strcmp(other->id, group->id))
            refuse(plan, line, "%s has the id %s already", other->name, group->id);
}

static struct amount drawn(const struct plan *plan, int line, const char *least, const char *most) {
    struct amount amount = {.least = number(plan, line, least, 1), .most = number(plan, line, most, 1), .key = -1,
                            .drawn = true};
    if (amount.most < amount.least) refuse(plan, line, "nothing lies between %s and %s", least, most);
    return amount;
}

static void read_instruction(struct plan *plan, int line, char **words, int count) {
    const struct form *form = NULL;
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (!strcmp(forms[i].name, words[0])) form = &forms[i];
    if (!form) refuse(plan, line, "no such instruction: %s", words[0]);
    plan->step = more(plan->step, plan->length, sizeof *plan->step);
    struct instruction *one = &plan->step[plan->length++];
    *one = (struct instruction){.act = form->act, .line = line};
    long key = -1;
    if (strpbrk(form->words, "rd") && *words[count - 1] == '@') key = number(plan, line, words[--count] + 1, 0);
    int want = (int)strlen(form->words) + !!strchr(form->words, 'd') + 1;
    if (count != want) refuse(plan, line, "%s wants %d words after it", words[0], want - 1);
    char **word = words + 1;
    for (const char *kind = form->words; *kind; kind++, word++) {
        char *dash;
        switch (*kind) {
        case 'r':
            if ((dash = strchr(*word, '-'))) {
                *dash = '\0';
                one->amount = drawn(plan, line, *word, dash + 1);
                break;
            } /* fall through */
        case 'c':
        case 'n':
            one->amount.least = one->amount.most = number(plan, line, *word, *kind != 'n');
            break;
        case 'd':
            one->amount = drawn(plan, line, word[0], word[1]);
            word++;
            break;
        case 'k':
            one->kernel = (int)number(plan, line, *word, 0);
            if (one->kernel >= PLAN_KERNEL_COUNT) refuse(plan, line, "kernels are 0 to %d", PLAN_KERNEL_COUNT - 1);
            break;
        case 'g':
            one->group = find_group(plan, *word);
            if (one->group < 0) refuse(plan, line, "no such group: %s", *word);
            if (!one->group) plan->world = true;
            break;
        case 'p':
            one->peer = (int)number(plan, line, *word, 0);
            break;
        case 't':
            if (strcmp(*word, "f32") && strcmp(*word, "bf16")) refuse(plan, line, "types are f32 and bf16");
            one->type = **word == 'f' ? ncclFloat32 : ncclBfloat16;
            break;
        }
    }
    if (key >= 0 && !one->amount.drawn) refuse(plan, line, "nothing is drawn here, a key says nothing");
    one->amount.key = key;
}

/* Where each block ends; groups of operations begin and end in the same block. */
static void match(struct plan *plan) {
    int open[MAX_DEPTH], depth = 0;
    const struct instruction *group = NULL;
    int group_depth = 0;
    for (int i = 0; i < plan->length; i++) {
        struct instruction *one = &plan->step[i];
        if (one->act == ACT_EVERY || one->act == ACT_REPEAT) {
            if (depth == MAX_DEPTH) refuse(plan, one->line, "nested too deep");
            open[depth++] = i;
        } else if (one->act == ACT_DONE) {
            if (!depth) refuse(plan, one->line, "done without every or repeat");
            if (group && group_depth == depth) refuse(plan, group->line, "groupstart without groupend");
            plan->step[open[--depth]].done = i;
        } else if (one->act == ACT_GROUP_START) {
            if (group) refuse(plan, one->line, "groupstart inside a group");
            group = one;
            group_depth = depth;
        } else if (one->act == ACT_GROUP_END) {
            if (!group || group_depth != depth) refuse(plan, one->line, "groupend without groupstart");
            group = NULL;
        }
    }
    if (depth) refuse(plan, plan->step[open[depth - 1]].line, "no done to this");
    if (group) refuse(plan, group->line, "groupstart without groupend");
}

static void read_plan(struct plan *plan, const char *path, int rank, int world) {
    const char *place = strstr(path, "{rank}");
    if (place)
        snprintf(plan->path, sizeof plan->path, "%.*s%d%s", (int)(place - path), path, rank, place + 6);
    else
        snprintf(plan->path, sizeof plan->path, "%s", path);
    FILE *file = fopen(plan->path, "re");
    if (!file) refuse(plan, 0, "%s", strerror(errno));
    plan->groups = more(NULL, plan->group_count++, sizeof *plan->groups);
    plan->groups[0] = (struct group){.name = "world", .how = GROUP_WORLD, .size = world, .rank = rank, .id = "world"};

    enum { BEFORE, INSIDE, AFTER } state = BEFORE;
    char *text = NULL;
    size_t room = 0;
    int line = 1;
    for (; getline(&text, &room, file) >= 0; line++) {
        char *words[MAX_WORDS + 1], *rest = text;
        int count = 0;
        text[strcspn(text, "#")] = '\0';
        while (count <= MAX_WORDS && (words[count] = strtok_r(rest, " \t\r\n", &rest))) count++;
        if (!count) continue;
        if (count > MAX_WORDS) refuse(plan, line, "too many words");
        bool alone = count == 1;
        if (state == BEFORE && !strcmp(words[0], "group"))
            read_group(plan, line, words, count);
        else if (state == BEFORE && alone && !strcmp(words[0], "step"))
            state = INSIDE;
        else if (state == INSIDE && alone && !strcmp(words[0], "end"))
            state = AFTER;
        else if (state == INSIDE)
            read_instruction(plan, line, words, count);
        else
            refuse(plan, line, "%s: only groups come before the step, and nothing after it", words[0]);
    }
    if (state != AFTER) refuse(plan, line, state == BEFORE ? "no step" : "the step has no end");
    free(text);
    fclose(file);
    match(plan);
}

/* ---- all of them ---- */

/* The nth split of a plan, NULL after the last. */
static struct group *nth_split(const struct plan *plan, int n) {
    for (int i = 0; i < plan->group_count; i++)
        if (plan->groups[i].how == GROUP_SPLIT && !n--) return &plan->groups[i];
    return NULL;
}

static struct group *with_id(const struct plan *plan, const char *id) {
    for (int i = 0; i < plan->group_count; i++)
        if (plan->groups[i].how == GROUP_INIT && !strcmp(plan->groups[i].id, id)) return &plan->groups[i];
    return NULL;
}

/* As NCCL numbers them: by key, then by rank. */
static void resolve_split(const struct plan *plans, int world, int n, int rank) {
    struct group *group = nth_split(&plans[rank], n);
    group->size = 0;
    group->rank = -1;
    if (group->color == NCCL_SPLIT_NOCOLOR) return;
    for (int other = 0; other < world; other++) {
        const struct group *its = nth_split(&plans[other], n);
        if (its->color != group->color) continue;
        int place = group->size++;
        for (; place && nth_split(&plans[group->ranks[place - 1]], n)->key > its->key; place--)
            group->ranks[place] = group->ranks[place - 1];
        group->ranks[place] = other;
    }
    for (int i = 0; i < group->size; i++)
        if (group->ranks[i] == rank) group->rank = i;
}

static void resolve_init(const struct plan *plans, int world, struct group *group, int rank) {
    int found = 0;
    for (int i = 0; i < world; i++) group->ranks[i] = -1;
    for (int other = 0; other < world; other++) {
        const struct group *its = with_id(&plans[other], group->id);
        if (!its) continue;
        if (its->size != group->size || its->rank >= world || group->ranks[its->rank] >= 0)
            refuse(&plans[rank], group->line, "rank %d sees the group %s otherwise", other, group->id);
        group->ranks[its->rank] = other;
        found++;
    }
    if (found != group->size) refuse(&plans[rank], group->line, "%d ranks of %d have it", found, group->size);
}

static int split_count(const struct plan *plan) {
    int count = 0;
    while (nth_split(plan, count)) count++;
    return count;
}

static void resolve(const struct plan *plans, int world, int rank) {
    const struct plan *plan = &plans[rank];
    for (int i = 0; i < plan->group_count; i++) {
        struct group *group = &plan->groups[i];
        group->ranks = calloc((size_t)world, sizeof *group->ranks);
        if (!group->ranks) abort();
        if (group->how == GROUP_INIT) resolve_init(plans, world, group, rank);
        for (int other = 0; group->how == GROUP_WORLD && other < world; other++) group->ranks[other] = other;
    }
    for (int n = 0; nth_split(plan, n); n++) resolve_split(plans, world, n, rank);
    for (int i = 0; i < plan->length; i++) {
        const struct instruction *one = &plan->step[i];
        if (one->act < ACT_ALLREDUCE || one->act > ACT_RECV) continue;
        const struct group *group = &plan->groups[one->group];
        if (group->rank < 0) refuse(plan, one->line, "this rank is in no part of %s", group->name);
        if (one->peer >= group->size) refuse(plan, one->line, "%s has %d ranks", group->name, group->size);
    }
}

struct plan *plans_read(const char *path, int world) {
    struct plan *plans = calloc((size_t)world, sizeof *plans);
    if (!plans) abort();
    for (int rank = 0; rank < world; rank++) read_plan(&plans[rank], path, rank, world);
    for (int rank = 1; rank < world; rank++) {
        int splits = split_count(&plans[rank]), first = split_count(&plans[0]);
        if (splits != first) refuse(&plans[rank], 0, "%d splits, but rank 0 has %d", splits, first);
        if (plans[rank].world != plans[0].world)
            refuse(&plans[rank], 0, "all ranks or none must split or use the world");
    }
    for (int rank = 0; rank < world; rank++) resolve(plans, world, rank);
    return plans;
}
