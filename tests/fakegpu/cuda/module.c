/* Modules, libraries, kernels and functions. An image is not looked into: every name can be found in it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"
#include "settings.h"

#define MAX_NAME 4096

struct module {
    struct pooled pooled;
    struct function *functions[64]; /* by first use; a name again gives the same function */
    int count;
};

struct kernel {
    struct pooled pooled;
    struct function *function;
};

static struct pool modules = POOL(struct module, 65536);
static struct pool functions = POOL(struct function, 262144);
static struct pool kernels = POOL(struct kernel, 262144);

/* A CUkernel may be launched in place of a CUfunction. */
struct function *function_check(CUfunction handle) {
    struct function *function = pool_check(&functions, handle);
    if (function) return function;
    struct kernel *kernel = pool_check(&kernels, handle);
    return kernel ? kernel->function : NULL;
}

void functions_retime(void) {
    for (size_t i = 0; i < functions.used; i++) {
        struct function *function = (struct function *)functions.base + i;
        if (function->pooled.live) function->duration_ns = kernel_duration_ns(function->name);
    }
}

/* Loading a module from memory compiles where that fault is planted; a library, loaded by the runtime behind a first
 * launch, is taken as compiled. It blocks, but burns no CPU: test machines are small. */
static void compile(void) {
    engine_lock();
    int64_t stall_ns = fault_active(settings.jit_rank) ? (int64_t)(settings.jit_ms * 1e6) : 0;
    engine_unlock();
    if (stall_ns) sleep_until(now_ns() + stall_ns);
}

static CUresult load(void **handle, const void *image) {
    int device;
    CUresult result = context_device(&device);
    if (result) return result;
    if (!handle || !image) return CUDA_ERROR_INVALID_VALUE;
    engine_lock();
    *handle = pool_take(&modules);
    engine_unlock();
    return *handle ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult load_file(void **handle, const char *path) {
    if (!path) return CUDA_ERROR_INVALID_VALUE;
    return access(path, R_OK) ? CUDA_ERROR_FILE_NOT_FOUND : load(handle, path);
}

static CUresult unload(const void *handle) {
    engine_lock();
    struct module *module = pool_check(&modules, handle);
    for (int i = 0; module && i < module->count; i++) {
        if (module->functions[i]->kernel) pool_return(&kernels, module->functions[i]->kernel);
        pool_return(&functions, module->functions[i]);
    }
    if (module) pool_return(&modules, module);
    engine_unlock();
    return module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult find_function(const void *handle, const char *name, bool kernel, void **found) {
    if (!found || !name) return CUDA_ERROR_INVALID_VALUE;
    if (!*name || strlen(name) >= MAX_NAME) return CUDA_ERROR_NOT_FOUND;
    engine_lock();
    CUresult result = CUDA_SUCCESS;
    struct module *module = pool_check(&modules, handle);
    if (!module) {
        result = CUDA_ERROR_INVALID_HANDLE;
    } else {
        struct function *function = NULL;
        for (int i = 0; i < module->count && !function; i++)
            if (!strcmp(module->functions[i]->name, name)) function = module->functions[i];
        if (!function) function = pool_take(&functions);
        if (!function) {
            result = CUDA_ERROR_OUT_OF_MEMORY;
        } else if (!function->name) {
            function->name = engine_intern(name);
            function->duration_ns = kernel_duration_ns(name);
            function->module = module;
            /* Functions beyond the table live as long as the process. */
            if (module->count < (int)(sizeof module->functions / sizeof module->functions[0]))
                module->functions[module->count++] = function;
        }
        if (!result && kernel && !function->kernel) {
            function->kernel = pool_take(&kernels);
            if (function->kernel) function->kernel->function = function;
        }
        if (!result) *found = kernel ? (void *)function->kernel : (void *)function;
    }
    engine_unlock();
    return result;
}

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    DRIVER_CALL;
    RETURN(load_file((void **)module, path));
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    DRIVER_CALL;
    compile();
    RETURN(load((void **)module, image));
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned optionCount, int *options, void **values) {
    DRIVER_CALL;
    if (optionCount && (!options || !values)) RETURN(CUDA_ERROR_INVALID_VALUE);
    compile();
    RETURN(load((void **)module, image));
}

CUresult cuModuleUnload(CUmodule module) {
    DRIVER_CALL;
    RETURN(unload(module));
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    DRIVER_CALL;
    RETURN(find_function(module, name, false, (void **)function));
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, int *jitOptions, void **jitValues, unsigned jitCount,
                           int *libraryOptions, void **libraryValues, unsigned libraryCount) {
    DRIVER_CALL;
    (void)jitOptions, (void)jitValues, (void)jitCount, (void)libraryOptions, (void)libraryValues, (void)libraryCount;
    RETURN(load((void **)library, code));
}

CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, int *jitOptions, void **jitValues,
                               unsigned jitCount, int *libraryOptions, void **libraryValues, unsigned libraryCount) {
    DRIVER_CALL;
    (void)jitOptions, (void)jitValues, (void)jitCount, (void)libraryOptions, (void)libraryValues, (void)libraryCount;
    RETURN(load_file((void **)library, path));
}

CUresult cuLibraryUnload(CUlibrary library) {
    DRIVER_CALL;
    RETURN(unload(library));
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    DRIVER_CALL;
    RETURN(find_function(library, name, true, (void **)kernel));
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    DRIVER_CALL;
    if (!function) RETURN(CUDA_ERROR_INVALID_VALUE);
    engine_lock();
    struct kernel *found = pool_check(&kernels, kernel);
    *function = found ? (CUfunction)found->function : NULL;
    engine_unlock();
    RETURN(found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

CUresult cuKernelGetName(const char **name, CUkernel kernel) {
    DRIVER_CALL;
    if (!name) RETURN(CUDA_ERROR_INVALID_VALUE);
    engine_lock();
    struct kernel *found = pool_check(&kernels, kernel);
    *name = found ? found->function->name : NULL;
    engine_unlock();
    RETURN(found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

CUresult cuFuncGetName(const char **name, CUfunction function) {
    DRIVER_CALL;
    if (!name) RETURN(CUDA_ERROR_INVALID_VALUE);
    engine_lock();
    struct function *found = function_check(function);
    *name = found ? found->name : NULL;
    engine_unlock();
    RETURN(found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}
