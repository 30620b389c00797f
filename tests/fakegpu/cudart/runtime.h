/* What the files of the runtime share. */
#ifndef FAKEGPU_RUNTIME_H
#define FAKEGPU_RUNTIME_H

#include "cuda_abi.h"
#include "fakegpu.h"

/* Makes sure that the driver is up and the thread has a context, as every runtime call does by itself. */
cudaError_t runtime_ready(void);
/* Remembers an error for cudaGetLastError. */
cudaError_t runtime_error(cudaError_t error);
/* The driver's handle for a kernel's host stub. Loads its image on first use. */
cudaError_t runtime_function(const void *stub, CUfunction *function);

#define RUNTIME_CALL FAKEGPU_CALL(FAKEGPU_RUNTIME)
/* Ends a function with a driver call's result; the thread gets a context first. */
#define RETURN_DRIVER(driver_call)                                      \
    do {                                                                \
        cudaError_t ready_ = runtime_ready();                           \
        RETURN(runtime_error(ready_ ? ready_ : (driver_call)));         \
    } while (0)
#define DEVICE_POINTER(pointer) ((CUdeviceptr)(uintptr_t)(pointer))

#endif
