/* Memory: device pointers are reserved addresses with nothing behind them; managed and pinned memory is real. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

#include "engine.h"
#include "settings.h"

#define RESERVE_BYTES (1ull << 40)
#define FALLBACK_BASE 0x7e0000000000ull /* where reserving is refused; nobody reads device memory anyway */
#define SMALLEST_CLASS 9                /* 512 bytes, as CUDA aligns */
#define CLASSES 42

enum place { FREE, DEVICE, MANAGED, PINNED };

struct block {
    uint64_t address, bytes;
    enum place place;
    struct block *next; /* in its hash bucket, or in the free list of its size class */
};

#define BUCKETS 4096
static struct block *buckets[BUCKETS]; /* all guarded by the engine's lock */
static struct block *spare[CLASSES];
static uint64_t reserve_base, reserve_used, device_used;

static struct block **bucket_of(uint64_t address) { return &buckets[(address >> SMALLEST_CLASS) % BUCKETS]; }

static struct block *block_new(uint64_t address, uint64_t bytes, enum place place) {
    struct block *block = malloc(sizeof *block);
    if (!block) abort();
    *block = (struct block){address, bytes, place, *bucket_of(address)};
    *bucket_of(address) = block;
    return block;
}

static int class_of(uint64_t bytes) {
    int class = SMALLEST_CLASS;
    while (1ull << class < bytes) class++;
    return class;
}

static CUresult allocate_device(uint64_t bytes, uint64_t *address) {
    uint64_t limit = (uint64_t)settings.memory_gb * 1000000000;
    if (bytes > limit || device_used + bytes > limit) return CUDA_ERROR_OUT_OF_MEMORY;
    int class = class_of(bytes);
    struct block *block = spare[class];
    if (block) {
        spare[class] = block->next;
        block->bytes = bytes;
        block->place = DEVICE;
        block->next = *bucket_of(block->address);
        *bucket_of(block->address) = block;
    } else {
        if (!reserve_base) {
            void *base = mmap(NULL, RESERVE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            reserve_base = base == MAP_FAILED ? FALLBACK_BASE : (uint64_t)(uintptr_t)base;
        }
        if (reserve_used + (1ull << class) > RESERVE_BYTES) return CUDA_ERROR_OUT_OF_MEMORY;
        block = block_new(reserve_base + reserve_used, bytes, DEVICE);
        reserve_used += 1ull << class;
    }
    device_used += bytes;
    *address = block->address;
    return CUDA_SUCCESS;
}

static CUresult allocate(CUdeviceptr *pointer, size_t bytes, enum place place) {
    int device;
    CUresult result = context_device(&device);
    if (result) return result;
    if (!pointer || !bytes) return CUDA_ERROR_INVALID_VALUE;
    engine_lock();
    uint64_t address = 0;
    if (place == DEVICE) {
        result = allocate_device(bytes, &address);
    } else {
        void *memory =
            mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED)
            result = CUDA_ERROR_OUT_OF_MEMORY;
        else
            address = block_new((uint64_t)(uintptr_t)memory, bytes, place)->address;
    }
    engine_unlock();
    if (!result) *pointer = address;
    return result;
}

/* Locked. Host memory and device memory have each their own way of being freed. */
static CUresult release(uint64_t address, bool host) {
    struct block **link = bucket_of(address);
    while (*link && (*link)->address != address) link = &(*link)->next;
    struct block *block = *link;
    if (!block || (block->place == PINNED) != host) return CUDA_ERROR_INVALID_VALUE;
    *link = block->next;
    if (block->place == DEVICE) {
        device_used -= block->bytes;
        block->place = FREE;
        int class = class_of(block->bytes);
        block->next = spare[class];
        spare[class] = block;
    } else {
        munmap((void *)(uintptr_t)address, block->bytes);
        free(block);
    }
    return CUDA_SUCCESS;
}

#define MAX_BACKED 64
#define MAX_BACKED_BYTES (64ull << 20)
static struct {
    uint64_t address, bytes;
} backed[MAX_BACKED]; /* guarded by the engine's lock */
static int backed_count;

void memory_back(uint64_t address, uint64_t bytes) {
    if (memory_content(address, bytes)) return;
    struct block *block = *bucket_of(address);
    while (block && block->address != address) block = block->next;
    if (!block || block->place != DEVICE || bytes > block->bytes || bytes > MAX_BACKED_BYTES || address % 4096) return;
    if (backed_count == MAX_BACKED || mprotect((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE)) return;
    backed[backed_count].address = address;
    backed[backed_count++].bytes = bytes;
}

void *memory_content(uint64_t address, uint64_t bytes) {
    for (int i = 0; i < backed_count; i++)
        if (address >= backed[i].address && address + bytes <= backed[i].address + backed[i].bytes)
            return (void *)(uintptr_t)address;
    return NULL;
}

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    DRIVER_CALL;
    RETURN(allocate(pointer, bytes, DEVICE));
}

CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned flags) {
    DRIVER_CALL;
    if (flags != 1 && flags != 2) RETURN(CUDA_ERROR_INVALID_VALUE);
    RETURN(allocate(pointer, bytes, MANAGED));
}

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream handle) {
    DRIVER_CALL;
    engine_lock();
    struct stream *stream;
    CUresult result = stream_find(handle, false, &stream);
    engine_unlock();
    RETURN(result ? result : allocate(pointer, bytes, DEVICE));
}

/* Freeing waits for the device, the well-known stall of cudaFree. */
CUresult cuMemFree_v2(CUdeviceptr pointer) {
    DRIVER_CALL;
    int device;
    CUresult result = context_device(&device);
    if (result || !pointer) RETURN(result);
    engine_lock();
    device_synchronize(device);
    result = release(pointer, false);
    engine_unlock();
    RETURN(result);
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream handle) {
    DRIVER_CALL;
    engine_lock();
    struct stream *stream;
    CUresult result = stream_find(handle, false, &stream);
    if (!result) result = release(pointer, false);
    engine_unlock();
    RETURN(result);
}

CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    DRIVER_CALL;
    if (!pointer || flags > 7) RETURN(CUDA_ERROR_INVALID_VALUE);
    CUdeviceptr address;
    CUresult result = allocate(&address, bytes, PINNED);
    if (!result) *pointer = (void *)(uintptr_t)address;
    RETURN(result);
}

CUresult cuMemFreeHost(void *pointer) {
    DRIVER_CALL;
    int device;
    CUresult result = context_device(&device);
    if (result) RETURN(result);
    engine_lock();
    result = release((uint64_t)(uintptr_t)pointer, true);
    engine_unlock();
    RETURN(result);
}
