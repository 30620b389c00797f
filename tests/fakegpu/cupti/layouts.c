/* Where the fields of records lie, and the numbers of functions: tables made from cupti-python at build time. */
#include <stdlib.h>
#include <string.h>

#include "cupti.h"

#define CUPTI_TABLES
#include "cupti_layouts.h"

#define COUNT(table) (sizeof(table) / sizeof *(table))

/* A version beyond the newest known has the newest layouts, one before the oldest the oldest: who asks for either wants
 * to see it refused. */
static const struct generation *generation(void) {
    static const struct generation *_Atomic known;
    const struct generation *found = known;
    for (size_t i = 0; !found && i < COUNT(generations); i++)
        if (cupti_settings.version <= generations[i].last || i + 1 == COUNT(generations)) found = &generations[i];
    return known = found;
}

const struct layout *layout_of(enum record record) { return &generation()->layout[record]; }

size_t record_size(int kind) {
    switch (kind) {
    case CUPTI_ACTIVITY_KIND_MEMCPY: return layout_of(R_MEMCPY)->size;
    case CUPTI_ACTIVITY_KIND_MEMCPY2: return layout_of(R_MEMCPY2)->size;
    case CUPTI_ACTIVITY_KIND_MEMSET: return layout_of(R_MEMSET)->size;
    case CUPTI_ACTIVITY_KIND_KERNEL:
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: return layout_of(R_KERNEL)->size;
    case CUPTI_ACTIVITY_KIND_DRIVER:
    case CUPTI_ACTIVITY_KIND_RUNTIME: return layout_of(R_API)->size;
    case CUPTI_ACTIVITY_KIND_OVERHEAD: return layout_of(R_OVERHEAD)->size;
    case CUPTI_ACTIVITY_KIND_MODULE: return layout_of(R_MODULE)->size;
    case CUPTI_ACTIVITY_KIND_SYNCHRONIZATION: return layout_of(R_SYNCHRONIZATION)->size;
    case CUPTI_ACTIVITY_KIND_JIT: return layout_of(R_JIT)->size;
    default: return 0;
    }
}

void put(uint8_t *record, const struct layout *layout, enum field field, uint64_t value) {
    /* Little-endian: the low bytes come first. */
    memcpy(record + layout->field[field].at, &value, layout->field[field].size);
}

static int by_name(const void *name, const void *entry) {
    return strcmp(name, ((const struct function_id *)entry)->name);
}

/* Every call asks, with the same few strings: remembered by address, in slots that are written once. */
#define SLOTS 1024
CUpti_CallbackId function_id(enum fakegpu_domain domain, const char *name) {
    static struct slot {
        const char *name;
        CUpti_CallbackId id;
    } slots[SLOTS];
    struct slot *slot = &slots[((uintptr_t)name >> 3) * 0x9e3779b97f4a7c15u >> 54];
    const char *known = __atomic_load_n(&slot->name, __ATOMIC_ACQUIRE);
    if (known == name) return __atomic_load_n(&slot->id, __ATOMIC_RELAXED);
    const struct function_id *found =
        domain == FAKEGPU_DRIVER ? bsearch(name, driver_ids, COUNT(driver_ids), sizeof *driver_ids, by_name)
                                 : bsearch(name, runtime_ids, COUNT(runtime_ids), sizeof *runtime_ids, by_name);
    CUpti_CallbackId id = found && found->id < MAX_FUNCTION_ID ? found->id : 0;
    static const char claimed[] = "";
    const char *none = NULL;
    if (!known && __atomic_compare_exchange_n(&slot->name, &none, claimed, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
        __atomic_store_n(&slot->id, id, __ATOMIC_RELAXED);
        __atomic_store_n(&slot->name, name, __ATOMIC_RELEASE);
    }
    return id;
}
