#define _GNU_SOURCE
#include "pool.h"

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

void *pool_take(struct pool *pool) {
    struct pooled *object = pool->free;
    if (object) {
        pool->free = object->next_free;
        memset(object, 0, pool->size);
    } else {
        if (!pool->base) {
            void *base = mmap(NULL, pool->size * pool->capacity, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (base == MAP_FAILED) return NULL;
            pool->base = base;
        }
        if (pool->used == pool->capacity) return NULL;
        object = (struct pooled *)(pool->base + pool->size * pool->used++);
    }
    object->live = true;
    return object;
}

void pool_return(struct pool *pool, void *object) {
    struct pooled *header = object;
    header->live = false;
    header->next_free = pool->free;
    pool->free = header;
}

void *pool_check(struct pool *pool, const void *handle) {
    uintptr_t offset = (uintptr_t)handle - (uintptr_t)pool->base;
    if (!pool->base || (uintptr_t)handle < (uintptr_t)pool->base || offset >= pool->size * pool->used ||
        offset % pool->size)
        return NULL;
    struct pooled *object = (struct pooled *)(pool->base + offset);
    return object->live ? object : NULL;
}
