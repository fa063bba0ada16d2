// Buffers in which an access out of bounds ends the process.
#include "device.hpp"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <thread>

void fail(const std::string &what) {
    std::fprintf(stderr, "GPU on a CPU: %s\n", what.c_str());
    std::abort();
}

namespace {

std::mutex lock;
std::map<uintptr_t, Buffer> buffers;
std::map<uintptr_t, size_t> pinned;

// The size of a buffer in whole pages; an inaccessible page lies before and after it.
size_t pages(size_t size) { return (size + PAGE - 1) / PAGE * PAGE; }

} // namespace

Result allocate(uintptr_t *to, size_t size, int device) {
    if (size == 0) {
        return INVALID_VALUE;
    }
    const size_t held = pages(size);
    void *memory = mmap(nullptr, held + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(static_cast<char *>(memory) + PAGE, held, PROT_READ | PROT_WRITE) != 0) {
        return OUT_OF_MEMORY;
    }
    auto *first = static_cast<unsigned char *>(memory) + PAGE;
    // The buffer ends at the inaccessible page, since most accesses out of bounds are beyond the end.
    std::memset(first, FENCE, held - size);
    std::memset(first + held - size, UNWRITTEN, size);
    *to = reinterpret_cast<uintptr_t>(first + held - size);
    std::lock_guard<std::mutex> guard(lock);
    buffers[*to] = {size, device};
    return SUCCESS;
}

void open_or_close(uintptr_t at, bool open) {
    std::lock_guard<std::mutex> guard(lock);
    const size_t size = buffers.at(at).size, held = pages(size);
    if (mprotect(reinterpret_cast<char *>(at + size - held), held, open ? PROT_READ | PROT_WRITE : PROT_NONE) != 0) {
        fail("memory cannot be protected");
    }
}

Result release(uintptr_t at) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = buffers.find(at);
    if (found == buffers.end()) {
        fail("memory is given back that was not taken");
    }
    const size_t size = found->second.size, held = pages(size);
    auto *first = reinterpret_cast<unsigned char *>(at + size - held);
    if (!std::all_of(first, first + held - size, [](unsigned char x) { return x == FENCE; })) {
        fail("a kernel wrote before a buffer of " + std::to_string(size) + " bytes");
    }
    munmap(first - PAGE, held + 2 * PAGE);
    buffers.erase(found);
    return SUCCESS;
}

Buffer buffer_at(uintptr_t at) {
    std::lock_guard<std::mutex> guard(lock);
    const auto found = buffers.find(at);
    if (found == buffers.end()) {
        fail("memory is given back that was not taken");
    }
    return found->second;
}

void check_copy(uintptr_t at, size_t size, int device) {
    if (size == 0) {
        return;
    }
    std::lock_guard<std::mutex> guard(lock);
    const auto behind = buffers.upper_bound(at);
    if (behind != buffers.begin()) {
        const auto &[start, buffer] = *std::prev(behind);
        if (at + size <= start + buffer.size && buffer.device == device) {
            return;
        }
    }
    fail("a copy of " + std::to_string(size) + " bytes leaves its buffer, or comes before its stream or behind its end");
}

Result pin(void **to, size_t size) {
    void *memory = mmap(nullptr, pages(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (size == 0 || memory == MAP_FAILED) {
        return OUT_OF_MEMORY;
    }
    std::memset(memory, UNWRITTEN, size);
    *to = memory;
    std::lock_guard<std::mutex> guard(lock);
    pinned[reinterpret_cast<uintptr_t>(memory)] = size;
    return SUCCESS;
}

// A later copy from or to this memory ends the process by a signal.
Result unpin(void *at) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = pinned.find(reinterpret_cast<uintptr_t>(at));
    if (found == pinned.end()) {
        fail("memory of the CPU is given back that was not pinned");
    }
    munmap(at, pages(found->second));
    pinned.erase(found);
    return SUCCESS;
}

bool is_pinned(const void *at, size_t size) {
    const auto first = reinterpret_cast<uintptr_t>(at);
    std::lock_guard<std::mutex> guard(lock);
    const auto behind = pinned.upper_bound(first);
    if (behind == pinned.begin()) {
        return false;
    }
    const auto &[start, held] = *std::prev(behind);
    if (first >= start + held) {
        return false;
    }
    if (first + size > start + held) {
        fail("a copy of " + std::to_string(size) + " bytes leaves its pinned memory");
    }
    return true;
}

namespace {

struct AtEnd {
    ~AtEnd() {
        // A new thread runs the remaining work, because this thread's `thread_local` objects are destroyed already.
        std::thread(run_all).join();
        if (!buffers.empty()) {
            fail(std::to_string(buffers.size()) + " buffers were never given back");
        }
        if (!pinned.empty()) {
            fail(std::to_string(pinned.size()) + " pieces of pinned memory were never given back");
        }
    }
} at_end;

} // namespace
