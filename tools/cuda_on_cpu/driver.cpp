// CUDA's driver: two devices, whose streams run as late as allowed.
#include "device.hpp"
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <vector>

namespace {

constexpr int DEVICES = 2;

// A context is the address of one of these.
int contexts[DEVICES];

int device_of(const void *context) { return static_cast<int>(static_cast<const int *>(context) - contexts); }

// A position in a stream's work; a new event has no stream and counts as complete.
struct Event {
    Stream *stream;
    uint64_t position;
};

// Binds a kernel to its parameters (prelude.h).
using Entry = std::function<void()> *(void **);

int take(uintptr_t *to, size_t size, int device, bool of_pool) {
    const Result counted = count(size, device, of_pool);
    if (counted != SUCCESS) {
        return counted;
    }
    const Result taken = allocate(to, size, device);
    if (taken != SUCCESS) {
        discount(size, device, of_pool);
    }
    return taken;
}

} // namespace

thread_local void *current;

int device() { return current == nullptr ? 0 : device_of(current); }

Stream *stream(void *given) {
    // The default stream of each device.
    static Stream *nameless[DEVICES] = {new_stream(0), new_stream(1)};
    return given == nullptr ? nameless[device()] : static_cast<Stream *>(given);
}

extern "C" {

int cuInit(unsigned) { return SUCCESS; }

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

int cuDeviceGetCount(int *count) {
    *count = DEVICES;
    return SUCCESS;
}

int cuDeviceGet(int *device, int number) {
    *device = number;
    return 0 <= number && number < DEVICES ? SUCCESS : INVALID_VALUE;
}

int cuDeviceGetName(char *name, int size, int) {
    std::snprintf(name, static_cast<size_t>(size), "a CPU");
    return SUCCESS;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int number) {
    std::memset(uuid, 0, 16);
    uuid[0] = static_cast<unsigned char>(1 + number);
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int number) {
    switch (attribute) {
    case 75: *value = 9 - number; return SUCCESS; // compute capability, major
    case 76: *value = 0; return SUCCESS;          // and minor
    case 97: *value = 232448; return SUCCESS;     // shared memory of a block
    case 115: *value = 1; return SUCCESS;         // memory pools
    default: return INVALID_VALUE;
    }
}

int cuDevicePrimaryCtxRetain(void **context, int number) {
    *context = &contexts[number];
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

int cuCtxSetCurrent(void *context) {
    current = context;
    return SUCCESS;
}

int cuCtxGetCurrent(void **context) {
    *context = current;
    return SUCCESS;
}

int cuCtxSynchronize() {
    run_all();
    return SUCCESS;
}

int cuStreamCreate(void **made, unsigned) {
    *made = new_stream(device());
    return SUCCESS;
}

// The stream's remaining work is still run.
int cuStreamDestroy_v2(void *) { return SUCCESS; }

int cuStreamSynchronize(void *given) {
    stream(given)->run(stream(given)->pushed);
    return SUCCESS;
}

int cuStreamWaitEvent(void *given, void *event, unsigned) {
    const Event until = *static_cast<Event *>(event);
    if (until.stream != nullptr) {
        // One piece per poll: work that waits for another rank must not block the thread that polls.
        stream(given)->push_until([until] { return !until.stream->step(until.position); });
    }
    return SUCCESS;
}

int cuEventCreate(void **event, unsigned) {
    *event = new Event{nullptr, 0};
    return SUCCESS;
}

int cuEventDestroy_v2(void *event) {
    delete static_cast<Event *>(event);
    return SUCCESS;
}

int cuEventRecord(void *event, void *given) {
    *static_cast<Event *>(event) = {stream(given), stream(given)->pushed};
    return SUCCESS;
}

// Each query runs one piece of the stream's work, so that polling ends.
int cuEventQuery(void *event) {
    const Event until = *static_cast<Event *>(event);
    return until.stream != nullptr && until.stream->step(until.position) ? NOT_READY : SUCCESS;
}

int cuEventSynchronize(void *event) {
    const Event until = *static_cast<Event *>(event);
    if (until.stream != nullptr) {
        until.stream->run(until.position);
    }
    return SUCCESS;
}

// Memory from a pool is inaccessible until the stream has reached its allocation.
int cuMemAllocAsync(uintptr_t *to, size_t size, void *given) {
    *to = 0;
    if (size == 0) {
        return SUCCESS;
    }
    const int taken = take(to, size, stream(given)->device, true);
    if (taken == SUCCESS) {
        open_or_close(*to, false);
        stream(given)->push([at = *to] { open_or_close(at, true); });
    }
    return taken;
}

int cuMemAlloc_v2(uintptr_t *to, size_t size) { return take(to, size, device(), false); }

int cuMemFreeAsync(uintptr_t at, void *given) {
    if (at != 0) {
        const Buffer buffer = buffer_at(at);
        discount(buffer.size, buffer.device, true);
        stream(given)->push([at] { release(at); });
    }
    return SUCCESS;
}

int cuMemFree_v2(uintptr_t at) {
    const Buffer buffer = buffer_at(at);
    discount(buffer.size, buffer.device, false);
    run_all();
    return release(at);
}

int cuMemHostAlloc(void **to, size_t size, unsigned) { return pin(to, size); }

int cuMemFreeHost(void *at) { return unpin(at); }

// CPU memory that is not pinned is read before the call returns, as by a real driver.
int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t size, void *given) {
    const auto *bytes = static_cast<const unsigned char *>(from);
    Stream *on = stream(given);
    if (is_pinned(from, size)) {
        on->push([=] {
            check_copy(to, size, on->device);
            std::memcpy(reinterpret_cast<void *>(to), bytes, size);
        });
        return SUCCESS;
    }
    on->push([=, held = std::vector<unsigned char>(bytes, bytes + size)] {
        check_copy(to, size, on->device);
        std::memcpy(reinterpret_cast<void *>(to), held.data(), size);
    });
    return SUCCESS;
}

// CPU memory that is not pinned is written before the call returns.
int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t size, void *given) {
    if (is_pinned(to, size)) {
        Stream *on = stream(given);
        on->push([=] {
            check_copy(from, size, on->device);
            std::memcpy(to, reinterpret_cast<const void *>(from), size);
        });
        return SUCCESS;
    }
    stream(given)->run(stream(given)->pushed);
    check_copy(from, size, stream(given)->device);
    std::memcpy(to, reinterpret_cast<const void *>(from), size);
    return SUCCESS;
}

int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t size, void *given) {
    Stream *on = stream(given);
    on->push([=] {
        check_copy(from, size, on->device);
        check_copy(to, size, on->device);
        std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), size);
    });
    return SUCCESS;
}

int cuMemcpyPeerAsync(uintptr_t to, void *to_context, uintptr_t from, void *from_context, size_t size, void *given) {
    const int to_device = device_of(to_context), from_device = device_of(from_context);
    stream(given)->push([=] {
        check_copy(from, size, from_device);
        check_copy(to, size, to_device);
        std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), size);
    });
    return SUCCESS;
}

int cuMemsetD8Async(uintptr_t to, unsigned char value, size_t size, void *given) {
    Stream *on = stream(given);
    on->push([=] {
        check_copy(to, size, on->device);
        std::memset(reinterpret_cast<void *>(to), value, size);
    });
    return SUCCESS;
}

// The image is the path of a library, or an #include of a source of candle's.
int cuModuleLoadData(void **module, const void *image) {
    std::string library = static_cast<const char *>(image), log;
    if (library.rfind("#include ", 0) == 0) {
        library = compile_candle(library, log);
        if (library.empty()) {
            fail(log);
        }
    }
    *module = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
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
                   unsigned shared_bytes, void *given, void **parameters, void **) {
    if (gx == 0 || gy == 0 || gz != 1 || gy > 65535 || bx == 0 || bx > 1024 || by != 1 || bz != 1) {
        return INVALID_VALUE;
    }
    // The parameters are copied now, because the kernel may run later.
    std::shared_ptr<std::function<void()>> kernel(reinterpret_cast<Entry *>(function)(parameters));
    stream(given)->push([=] {
        gridDim = {gx, gy, gz};
        blockDim = {bx, by, bz};
        for (unsigned y = 0; y < gy; y++) {
            for (unsigned x = 0; x < gx; x++) {
                blockIdx = {x, y, 0};
                run_block(bx, shared_bytes, *kernel);
            }
        }
    });
    return SUCCESS;
}

// An undocumented interface between NVIDIA's libraries: NVRTC asks for it if there is a driver, and works without it.
int cuGetExportTable(const void **table, const void *) {
    *table = nullptr;
    return NOT_FOUND;
}

int cuGetErrorName(int error, const char **name) {
    *name = error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
    return SUCCESS;
}

int cuGetErrorString(int, const char **text) {
    *text = "as on a CPU";
    return SUCCESS;
}
}
