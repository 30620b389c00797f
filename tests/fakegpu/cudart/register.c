/* Kernels known by their host stubs: registered by constructors, loaded on first use. */
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define TABLE_SIZE 16384 /* a power of two, much larger than the number of kernels */

struct image {
    const void *data;
    CUlibrary library;
};

struct stub {
    const void *address;
    const char *name;
    struct image *image;
    CUfunction function; /* NULL until first launched */
};

/* Open addressing; entries are only added, so a launch reads without the lock. */
static struct stub table[TABLE_SIZE];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct stub *entry_of(const void *address) {
    size_t index = ((uintptr_t)address >> 4) * 0x9e3779b97f4a7c15u >> 50;
    for (size_t probes = 0; probes < TABLE_SIZE; probes++, index++) {
        struct stub *entry = &table[index % TABLE_SIZE];
        const void *known = __atomic_load_n(&entry->address, __ATOMIC_ACQUIRE);
        if (!known || known == address) return entry;
    }
    abort();
}

void **__cudaRegisterFatBinary(void *data) {
    struct image *image = calloc(1, sizeof *image);
    if (!image) abort();
    image->data = data;
    return (void **)image;
}

void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }

void __cudaUnregisterFatBinary(void **handle) {
    struct image *image = (struct image *)handle;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < TABLE_SIZE; i++)
        if (table[i].image == image) {
            table[i].image = NULL;
            __atomic_store_n(&table[i].function, NULL, __ATOMIC_RELEASE);
        }
    pthread_mutex_unlock(&lock);
    free(image);
}

void __cudaRegisterFunction(void **handle, const char *stub, char *deviceFunction, const char *deviceName,
                            int threadLimit, void *tid, void *bid, dim3 *blockDim, dim3 *gridDim, int *warpSize) {
    (void)deviceFunction, (void)threadLimit, (void)tid, (void)bid, (void)blockDim, (void)gridDim, (void)warpSize;
    pthread_mutex_lock(&lock);
    struct stub *entry = entry_of(stub);
    entry->name = deviceName;
    entry->image = (struct image *)handle;
    __atomic_store_n(&entry->address, stub, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
}

static cudaError_t resolve(struct stub *entry, CUfunction *function) {
    pthread_mutex_lock(&lock);
    cudaError_t error = entry->image ? cudaSuccess : CUDA_ERROR_INVALID_DEVICE_FUNCTION;
    CUkernel kernel;
    if (!error && !entry->image->library)
        error = cuLibraryLoadData(&entry->image->library, entry->image->data, NULL, NULL, 0, NULL, NULL, 0);
    if (!error) error = cuLibraryGetKernel(&kernel, entry->image->library, entry->name);
    if (!error) error = cuKernelGetFunction(function, kernel);
    if (!error) __atomic_store_n(&entry->function, *function, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    return error;
}

cudaError_t runtime_function(const void *stub, CUfunction *function) {
    cudaError_t error = runtime_ready();
    if (error) return error;
    if (!stub) return CUDA_ERROR_INVALID_DEVICE_FUNCTION;
    struct stub *entry = entry_of(stub);
    if (!__atomic_load_n(&entry->address, __ATOMIC_ACQUIRE)) return CUDA_ERROR_INVALID_DEVICE_FUNCTION;
    *function = __atomic_load_n(&entry->function, __ATOMIC_ACQUIRE);
    return *function ? cudaSuccess : resolve(entry, function);
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, int *jitOptions, void **jitValues,
                                unsigned jitCount, int *libraryOptions, void **libraryValues, unsigned libraryCount) {
    RUNTIME_CALL;
    RETURN_DRIVER(cuLibraryLoadData(library, code, jitOptions, jitValues, jitCount, libraryOptions, libraryValues,
                                    libraryCount));
}
