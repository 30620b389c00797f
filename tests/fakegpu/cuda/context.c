/* Initialisation, devices, contexts, entry points by name, and which stream a handle means. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "settings.h"

#define DRIVER_VERSION 13000

struct context {
    struct pooled pooled;
    int device;
};

static struct pool contexts = POOL(struct context, 256);
static struct context *primary[MAX_DEVICES];
static bool initialised; /* set once, under the lock */
static __thread struct context *current __attribute__((tls_model("initial-exec")));

static CUresult check_device(CUdevice device) {
    if (!__atomic_load_n(&initialised, __ATOMIC_ACQUIRE)) return CUDA_ERROR_NOT_INITIALIZED;
    return device < 0 || device >= settings.devices || device >= MAX_DEVICES ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult context_device(int *device) {
    if (!__atomic_load_n(&initialised, __ATOMIC_ACQUIRE)) return CUDA_ERROR_NOT_INITIALIZED;
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    *device = current->device;
    return CUDA_SUCCESS;
}

CUresult stream_find(CUstream handle, bool per_thread, struct stream **stream) {
    int device;
    CUresult result = context_device(&device);
    if (result) return result;
    if (!handle) handle = per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
    if (handle == CU_STREAM_LEGACY)
        *stream = stream_legacy(device);
    else if (handle == CU_STREAM_PER_THREAD)
        *stream = stream_per_thread(device);
    else
        *stream = stream_check(handle);
    return *stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* A tool's library, loaded as the driver does: once in a process, and not a word if that fails. The tool may call the
 * driver. */
static void inject(void) {
    static bool injected;
    if (__atomic_exchange_n(&injected, true, __ATOMIC_ACQ_REL)) return;
    const char *path = getenv("CUDA_INJECTION64_PATH");
    void *library = path && *path ? dlopen(path, RTLD_NOW) : NULL;
    int (*initialise)(void) = library ? (int (*)(void))dlsym(library, "InitializeInjection") : NULL;
    if (initialise) initialise();
}

CUresult cuInit(unsigned flags) {
    DRIVER_CALL;
    if (flags) RETURN(CUDA_ERROR_INVALID_VALUE);
    __atomic_store_n(&initialised, true, __ATOMIC_RELEASE);
    inject();
    RETURN(CUDA_SUCCESS);
}

CUresult cuDriverGetVersion(int *version) {
    DRIVER_CALL;
    if (!version) RETURN(CUDA_ERROR_INVALID_VALUE);
    *version = DRIVER_VERSION;
    RETURN(CUDA_SUCCESS);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    DRIVER_CALL;
    if (!device) RETURN(CUDA_ERROR_INVALID_VALUE);
    *device = ordinal;
    RETURN(check_device(ordinal));
}

CUresult cuDeviceGetCount(int *count) {
    DRIVER_CALL;
    if (!count) RETURN(CUDA_ERROR_INVALID_VALUE);
    *count = settings.devices < MAX_DEVICES ? (int)settings.devices : MAX_DEVICES;
    RETURN(check_device(0));
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    DRIVER_CALL;
    if (!name || length <= 0) RETURN(CUDA_ERROR_INVALID_VALUE);
    snprintf(name, (size_t)length, "Fake GPU");
    RETURN(check_device(device));
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    DRIVER_CALL;
    const struct {
        int attribute, value;
    } known[] = {{1, 1024} /* threads a block */, {10, 32} /* warp size */, {16, 132} /* multiprocessors */,
                 {41, 1} /* unified addressing */,
                 {75, (int)settings.capability / 10}, {76, (int)settings.capability % 10} /* compute capability */,
                 {115, 1} /* memory pools */};
    if (!value || attribute <= 0) RETURN(CUDA_ERROR_INVALID_VALUE);
    *value = 0;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (known[i].attribute == attribute) *value = known[i].value;
    RETURN(check_device(device));
}

static CUresult make_context(CUcontext *context, CUdevice device, struct context **keep) {
    CUresult result = context ? check_device(device) : CUDA_ERROR_INVALID_VALUE;
    if (result) return result;
    engine_lock();
    struct context *made = keep && *keep ? *keep : pool_take(&contexts);
    if (made) made->device = device;
    if (keep) *keep = made;
    engine_unlock();
    *context = (CUcontext)made;
    return made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
    DRIVER_CALL;
    (void)flags;
    CUresult result = make_context(context, device, NULL);
    if (!result) current = (struct context *)*context;
    RETURN(result);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    DRIVER_CALL;
    CUresult result = check_device(device);
    RETURN(result ? result : make_context(context, device, &primary[device]));
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    DRIVER_CALL;
    if (!context) RETURN(CUDA_ERROR_INVALID_VALUE);
    *context = (CUcontext)current;
    RETURN(check_device(0));
}

CUresult cuCtxSetCurrent(CUcontext context) {
    DRIVER_CALL;
    engine_lock();
    struct context *found = pool_check(&contexts, context);
    engine_unlock();
    if (context && !found) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    current = found;
    RETURN(check_device(0));
}

CUresult cuCtxSynchronize(void) {
    DRIVER_CALL;
    int device;
    CUresult result = context_device(&device);
    if (result) RETURN(result);
    engine_lock();
    device_synchronize(device);
    if (device == settings.broken_device) result = CUDA_ERROR_LAUNCH_FAILED;
    engine_unlock();
    RETURN(result);
}

CUresult cuCtxDestroy_v2(CUcontext context) {
    DRIVER_CALL;
    engine_lock();
    struct context *found = pool_check(&contexts, context);
    bool is_primary = false;
    for (int i = 0; i < MAX_DEVICES; i++) is_primary |= found && primary[i] == found;
    if (found && !is_primary) pool_return(&contexts, found);
    engine_unlock();
    if (!found || is_primary) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    if (current == found) current = NULL;
    RETURN(CUDA_SUCCESS);
}

/* The newest version of a function, as the real one gives for a current `version`: foo_ptsz, foo_v2, foo. */
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    DRIVER_CALL;
    (void)version;
    if (!symbol || !function || !*symbol) RETURN(CUDA_ERROR_INVALID_VALUE);
    static const char *const suffixes[] = {"_v2_ptsz", "_ptsz", "_v2", ""};
    Dl_info self;
    void *library = dladdr((void *)cuInit, &self) ? dlopen(self.dli_fname, RTLD_NOLOAD | RTLD_NOW) : NULL;
    *function = NULL;
    bool per_thread = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    for (size_t i = per_thread ? 0 : 2; library && !*function && i < sizeof suffixes / sizeof suffixes[0]; i++) {
        char name[256];
        if ((size_t)snprintf(name, sizeof name, "%s%s", symbol, suffixes[i]) < sizeof name)
            *function = dlsym(library, name);
    }
    if (library) dlclose(library);
    if (status) *status = *function ? 0 : 1;
    RETURN(*function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND);
}
