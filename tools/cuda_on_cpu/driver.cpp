// CUDA's driver: one device, whose streams do everything at once.
#include "device.hpp"
#include <cstdio>
#include <cstring>
#include <dlfcn.h>

extern "C" {

int cuInit(unsigned) { return SUCCESS; }

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

int cuDeviceGetCount(int *count) {
    *count = 1;
    return SUCCESS;
}

int cuDeviceGet(int *device, int number) {
    *device = number;
    return number == 0 ? SUCCESS : INVALID_VALUE;
}

int cuDeviceGetName(char *name, int size, int) {
    std::snprintf(name, static_cast<size_t>(size), "a CPU");
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int) {
    switch (attribute) {
    case 75: *value = 9; return SUCCESS;      // compute capability, major
    case 76: *value = 0; return SUCCESS;      // and minor
    case 97: *value = 232448; return SUCCESS; // shared memory of a block
    case 115: *value = 1; return SUCCESS;     // memory pools
    default: return INVALID_VALUE;
    }
}

int cuDevicePrimaryCtxRetain(void **context, int) {
    static int there;
    *context = &there;
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

thread_local void *current;

int cuCtxSetCurrent(void *context) {
    current = context;
    return SUCCESS;
}

int cuCtxGetCurrent(void **context) {
    *context = current;
    return SUCCESS;
}

int cuCtxSynchronize() { return SUCCESS; }

int cuStreamCreate(void **stream, unsigned) {
    *stream = new int(0);
    return SUCCESS;
}

int cuStreamDestroy_v2(void *stream) {
    delete static_cast<int *>(stream);
    return SUCCESS;
}

int cuStreamSynchronize(void *) { return SUCCESS; }
int cuStreamWaitEvent(void *, void *, unsigned) { return SUCCESS; }

// An event counts down to its end, so that a wait is a wait.
int cuEventCreate(void **event, unsigned) {
    *event = new int(0);
    return SUCCESS;
}

int cuEventDestroy_v2(void *event) {
    delete static_cast<int *>(event);
    return SUCCESS;
}

int cuEventRecord(void *event, void *) {
    *static_cast<int *>(event) = 3;
    return SUCCESS;
}

int cuEventQuery(void *event) { return (*static_cast<int *>(event))-- > 0 ? NOT_READY : SUCCESS; }
int cuEventSynchronize(void *) { return SUCCESS; }

int cuMemAllocAsync(uintptr_t *to, size_t size, void *) { return allocate(to, size); }
int cuMemAlloc_v2(uintptr_t *to, size_t size) { return allocate(to, size); }
int cuMemFreeAsync(uintptr_t at, void *) { return release(at); }
int cuMemFree_v2(uintptr_t at) { return release(at); }

int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t size, void *) {
    check_copy(to, size);
    std::memcpy(reinterpret_cast<void *>(to), from, size);
    return SUCCESS;
}

int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t size, void *) {
    check_copy(from, size);
    std::memcpy(to, reinterpret_cast<const void *>(from), size);
    return SUCCESS;
}

int cuMemsetD8Async(uintptr_t to, unsigned char value, size_t size, void *) {
    check_copy(to, size);
    std::memset(reinterpret_cast<void *>(to), value, size);
    return SUCCESS;
}

int cuModuleLoadData(void **module, const void *image) {
    *module = dlopen(static_cast<const char *>(image), RTLD_NOW | RTLD_LOCAL);
    if (*module == nullptr) {
        fail(dlerror());
    }
    return SUCCESS;
}

int cuModuleUnload(void *) { return SUCCESS; }

int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = dlsym(module, (std::string("entry_") + name).c_str());
    return *function == nullptr ? NOT_FOUND : SUCCESS;
}

int cuFuncSetAttribute(void *, int, int) { return SUCCESS; }

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared_bytes, void *, void **parameters, void **) {
    if (gx == 0 || gy == 0 || gz != 1 || gy > 65535 || bx == 0 || bx > 1024 || by != 1 || bz != 1) {
        return INVALID_VALUE;
    }
    auto *entry = reinterpret_cast<void (*)(void **)>(function);
    gridDim = {gx, gy, gz};
    for (unsigned y = 0; y < gy; y++) {
        for (unsigned x = 0; x < gx; x++) {
            blockIdx = {x, y, 0};
            run_block(bx, shared_bytes, [=] { entry(parameters); });
        }
    }
    return SUCCESS;
}

int cuGetErrorName(int error, const char **name) {
    *name = error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR";
    return SUCCESS;
}

int cuGetErrorString(int, const char **text) {
    *text = "as on a CPU";
    return SUCCESS;
}
}
