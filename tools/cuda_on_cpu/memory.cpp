// Buffers that show who reads or writes beside them.
#include "device.hpp"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sys/mman.h>
#include <unordered_map>

void fail(const std::string &what) {
    std::fprintf(stderr, "GPU on a CPU: %s\n", what.c_str());
    std::abort();
}

namespace {

std::mutex lock;
std::unordered_map<uintptr_t, size_t> sizes;

// Pages of a buffer, with one before and one behind it that nobody may touch.
size_t pages(size_t size) { return (size + PAGE - 1) / PAGE * PAGE; }

} // namespace

Result allocate(uintptr_t *to, size_t size) {
    if (size == 0) {
        return INVALID_VALUE;
    }
    const size_t held = pages(size);
    void *memory = mmap(nullptr, held + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(static_cast<char *>(memory) + PAGE, held, PROT_READ | PROT_WRITE) != 0) {
        return OUT_OF_MEMORY;
    }
    auto *first = static_cast<unsigned char *>(memory) + PAGE;
    // The end is where buffers are left by mistake: it lies before the closed page.
    std::memset(first, FENCE, held - size);
    std::memset(first + held - size, UNWRITTEN, size);
    *to = reinterpret_cast<uintptr_t>(first + held - size);
    std::lock_guard<std::mutex> guard(lock);
    sizes[*to] = size;
    return SUCCESS;
}

Result release(uintptr_t at) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = sizes.find(at);
    if (found == sizes.end()) {
        fail("memory is given back that was not taken");
    }
    const size_t size = found->second, held = pages(size);
    auto *first = reinterpret_cast<unsigned char *>(at + size - held);
    if (!std::all_of(first, first + held - size, [](unsigned char x) { return x == FENCE; })) {
        fail("a kernel wrote before a buffer of " + std::to_string(size) + " bytes");
    }
    munmap(first - PAGE, held + 2 * PAGE);
    sizes.erase(found);
    return SUCCESS;
}

void check_copy(uintptr_t at, size_t size) {
    std::lock_guard<std::mutex> guard(lock);
    for (const auto &[start, length] : sizes) {
        if (start <= at && at + size <= start + length) {
            return;
        }
    }
    fail("a copy of " + std::to_string(size) + " bytes leaves its buffer");
}

namespace {

struct AtEnd {
    ~AtEnd() {
        if (!sizes.empty()) {
            fail(std::to_string(sizes.size()) + " buffers were never given back");
        }
    }
} at_end;

} // namespace
