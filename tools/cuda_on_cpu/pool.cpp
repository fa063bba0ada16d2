// How much memory each device has, and how much of it is in use.
//
// Bytes are counted when a call takes them and when a call gives them back, not when a stream gets there: what a stream gives
// back, a driver's pool hands to the next call on that stream without waiting. Streams here are later than any driver's, so what
// they have not come to says nothing of a GPU.
#include "device.hpp"
#include <algorithm>
#include <cstdlib>
#include <mutex>

namespace {

constexpr int DEVICES = 2;
enum Attribute { RELEASE_THRESHOLD = 4, USED_NOW = 7, USED_HIGH = 8 };

std::mutex lock;

// Bytes in use: of the device's pool, the most of them since somebody wrote 0 there, and those that no pool gave.
struct Use {
    uint64_t now, high, beside;
} uses[DEVICES];

// Of each device: 16 GiB, or CUDA_ON_CPU_MEMORY bytes.
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

// The mark can be set to nothing but 0. What a pool keeps for later is not counted here.
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
