// Counts the total and the used memory of each device.
//
// Bytes are counted at the calls that allocate and free them, not when a stream reaches these: a driver's pool reuses memory
// that a stream frees for the next call on that stream, without waiting. Emulated streams run later than any driver's, so counting
// when they run would say nothing about a GPU.
#include "device.hpp"
#include <algorithm>
#include <cstdlib>
#include <mutex>

namespace {

constexpr int DEVICES = 2;
enum Attribute { RELEASE_THRESHOLD = 4, USED_NOW = 7, USED_HIGH = 8 };

std::mutex lock;

// Bytes in use: from the device's pool, their maximum since it was reset, and bytes allocated without a pool.
struct Use {
    uint64_t now, high, beside;
} uses[DEVICES];

// Memory of each device: 16 GiB, or CUDA_ON_CPU_MEMORY bytes.
uint64_t total() {
    static const char *given = std::getenv("CUDA_ON_CPU_MEMORY");
    static const uint64_t bytes = given == nullptr ? uint64_t{16} << 30 : std::strtoull(given, nullptr, 10);
    return bytes;
}

uint64_t left(const Use &use) { return total() - std::min(total(), use.now + use.beside); }

} // namespace

Result count(size_t size, int device, bool of_pool) {
    std::lock_guard<std::mutex> guard(lock);
    Use &use = uses[device];
    if (size > left(use)) {
        return OUT_OF_MEMORY;
    }
    (of_pool ? use.now : use.beside) += size;
    use.high = std::max(use.high, use.now);
    return SUCCESS;
}

void discount(size_t size, int device, bool of_pool) {
    std::lock_guard<std::mutex> guard(lock);
    (of_pool ? uses[device].now : uses[device].beside) -= size;
}

extern "C" {

int cuMemGetInfo_v2(size_t *free, size_t *all) {
    std::lock_guard<std::mutex> guard(lock);
    *free = left(uses[device()]);
    *all = total();
    return SUCCESS;
}

int cuDeviceGetDefaultMemPool(void **pool, int number) {
    if (number < 0 || number >= DEVICES) {
        return INVALID_VALUE;
    }
    *pool = &uses[number];
    return SUCCESS;
}

int cuMemPoolGetAttribute(void *pool, int attribute, void *value) {
    std::lock_guard<std::mutex> guard(lock);
    const Use &use = *static_cast<Use *>(pool);
    switch (attribute) {
    case USED_NOW: *static_cast<uint64_t *>(value) = use.now; return SUCCESS;
    case USED_HIGH: *static_cast<uint64_t *>(value) = use.high; return SUCCESS;
    default: return INVALID_VALUE;
    }
}

// The maximum can only be reset to 0. Freed memory that a pool keeps for reuse is not counted.
int cuMemPoolSetAttribute(void *pool, int attribute, void *value) {
    if (attribute == RELEASE_THRESHOLD) {
        return SUCCESS;
    }
    std::lock_guard<std::mutex> guard(lock);
    if (attribute != USED_HIGH || *static_cast<uint64_t *>(value) != 0) {
        return INVALID_VALUE;
    }
    static_cast<Use *>(pool)->high = 0;
    return SUCCESS;
}
}
