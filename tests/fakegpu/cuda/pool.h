/* Objects behind opaque handles: stable addresses, no malloc in use, and a check that a handle is one of ours. */
#ifndef FAKEGPU_POOL_H
#define FAKEGPU_POOL_H

#include <stdbool.h>
#include <stddef.h>

/* First member of every pooled object. */
struct pooled {
    struct pooled *next_free;
    bool live;
};

struct pool {
    size_t size, capacity; /* of one object, in bytes; of the pool, in objects */
    char *base;
    size_t used;
    struct pooled *free;
};

#define POOL(type, count) {.size = sizeof(type), .capacity = (count)}

/* A zeroed object, or NULL when the pool is full. */
void *pool_take(struct pool *pool);
void pool_return(struct pool *pool, void *object);
/* The object behind a handle, or NULL when the handle is not one of a living object of this pool. */
void *pool_check(struct pool *pool, const void *handle);

#endif
