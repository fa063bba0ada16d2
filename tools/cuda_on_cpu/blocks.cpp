// Runs the threads of a thread block as fibers on the calling thread.
#include "device.hpp"
#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <ucontext.h>
#include <vector>

__thread Index threadIdx, blockIdx, blockDim, gridDim;
alignas(16) __thread float shared[58112];

namespace {

constexpr size_t STACK = 128 * 1024, WARP = 32, MOST_THREADS = 1024;

// The saved execution context of a fiber or of the scheduler.
#if defined(__x86_64__)
// The C library's functions for this also save signal masks, which takes most of the time of a barrier.
using Place = void *;

asm(R"(
.text
.type go_on, @function
go_on:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");
extern "C" void go_on(Place *from, Place *to) asm("go_on");

void prepare(Place &place, char *stack, void (*start)()) {
    auto top = reinterpret_cast<uintptr_t>(stack + STACK) & ~uintptr_t(15);
    auto *words = reinterpret_cast<uintptr_t *>(top) - 8;
    std::fill(words, words + 6, 0);
    words[6] = reinterpret_cast<uintptr_t>(start);
    place = words;
}
#else
using Place = ucontext_t;

void go_on(Place *from, Place *to) { swapcontext(from, to); }

void prepare(Place &place, char *stack, void (*start)()) {
    getcontext(&place);
    place.uc_stack.ss_sp = stack;
    place.uc_stack.ss_size = STACK;
    place.uc_link = nullptr;
    makecontext(&place, start, 0);
}
#endif

// The state of a thread that is not running.
enum class State { READY, AT_BARRIER, AT_SHUFFLE, ENDED };

struct Copy {
    void *to;
    // Null to write zeros.
    const void *from;
    size_t size;
};

struct Fiber {
    Place place;
    // Not initialised, so that unused pages take no memory.
    std::unique_ptr<char[]> stack;
    State state;
    size_t shuffles;
    // Groups of copies and products that were started and are not complete; the last group is still open.
    std::deque<std::vector<Copy>> copies;
    std::deque<std::vector<std::function<void()>>> products;
    // Indices of 16-byte units of shared memory that this thread has copied and not made visible to products.
    std::vector<size_t> unshared;
    bool says;
};

struct Block {
    std::vector<Fiber> fibers;
    Place scheduler;
    size_t current = 0;
    const std::function<void()> *body = nullptr;
    // Values of the current shuffle, double-buffered: a late thread still reads one buffer while others write the next.
    unsigned char slots[2][MOST_THREADS][16];
    size_t shared_bytes;
    std::vector<bool> unshared;
};

// The thread block of the calling thread, and its owner, which deletes it when the thread ends.
__thread Block *block;
thread_local std::unique_ptr<Block> owner;

void leave(State state) {
    Fiber &fiber = block->fibers[block->current];
    fiber.state = state;
    go_on(&fiber.place, &block->scheduler);
}

void enter() {
    (*block->body)();
    leave(State::ENDED);
}

size_t offset(const void *at) {
    return static_cast<size_t>(static_cast<const char *>(at) - reinterpret_cast<const char *>(shared));
}

void finish(std::vector<Copy> &copies) {
    for (const Copy &copy : copies) {
        const size_t step = offset(copy.to) / 16;
        block->unshared[step] = true;
        block->fibers[block->current].unshared.push_back(step);
        if (copy.from != nullptr) {
            std::memcpy(copy.to, copy.from, copy.size);
        } else {
            std::memset(copy.to, 0, copy.size);
        }
    }
    copies.clear();
}

// Number of threads in [first, end) that are in this state.
size_t standing(size_t first, size_t end, State state) {
    const auto begin = block->fibers.begin();
    return static_cast<size_t>(std::count_if(begin + static_cast<long>(first), begin + static_cast<long>(end),
                                             [=](const Fiber &fiber) { return fiber.state == state; }));
}

} // namespace

void barrier() { leave(State::AT_BARRIER); }

void shuffle(void *value, size_t size, unsigned lane) {
    const size_t self = block->current, from = self / WARP * WARP + lane;
    auto &slots = block->slots[block->fibers[self].shuffles++ % 2];
    std::memcpy(slots[self], value, size);
    leave(State::AT_SHUFFLE);
    if (from / WARP != self / WARP || from >= blockDim.x) {
        fail("a thread asks for the value of one that is not in its warp");
    }
    std::memcpy(value, slots[from], size);
}

namespace {

// Collects the values of all threads of a warp, SIZE bytes each.
template <size_t SIZE> void gather(unsigned char *all, const unsigned char (*slots)[16]) {
    for (size_t lane = 0; lane < WARP; lane++) {
        std::memcpy(all + lane * SIZE, slots[lane], SIZE);
    }
}

} // namespace

void exchange(const void *value, size_t size, void *all) {
    const size_t self = block->current, first = self / WARP * WARP;
    auto &slots = block->slots[block->fibers[self].shuffles++ % 2];
    std::memcpy(slots[self], value, size);
    leave(State::AT_SHUFFLE);
    auto *to = static_cast<unsigned char *>(all);
    switch (size) {
    case 8: return gather<8>(to, slots + first);
    case 16: return gather<16>(to, slots + first);
    default: fail("values of a warp have 8 bytes or 16");
    }
}

bool any_of_block(bool yes) {
    block->fibers[block->current].says = yes;
    barrier();
    bool any = false;
    for (size_t i = 0; i < blockDim.x; i++) {
        any = any || block->fibers[i].says;
    }
    barrier(); // All threads have read `says`, which the next call overwrites.
    return any;
}

void later(void *to, const void *from, size_t size) {
    auto &copies = block->fibers[block->current].copies;
    copies.back().push_back({to, from, size});
    // Odd blocks copy at once, even ones as late as allowed.
    if (blockIdx.x % 2 == 1) {
        finish(copies.back());
    }
}

void close_group() { block->fibers[block->current].copies.emplace_back(); }

void finish_groups(size_t left) {
    auto &copies = block->fibers[block->current].copies;
    for (; copies.size() > left + 1; copies.pop_front()) {
        finish(copies.front());
    }
}

void later_product(const std::function<void()> &product) {
    // Half of the blocks compute at once, independently of when they copy.
    if ((blockIdx.x / 2 + blockIdx.y) % 2 == 1) {
        product();
    } else {
        block->fibers[block->current].products.back().push_back(product);
    }
}

void close_products() { block->fibers[block->current].products.emplace_back(); }

void finish_products(size_t left) {
    auto &products = block->fibers[block->current].products;
    for (; products.size() > left + 1; products.pop_front()) {
        for (const auto &product : products.front()) {
            product();
        }
    }
}

void share_copies() {
    Fiber &fiber = block->fibers[block->current];
    for (const size_t step : fiber.unshared) {
        block->unshared[step] = false;
    }
    fiber.unshared.clear();
}

void check_shared(const void *at) {
    if (offset(at) + 16 > block->shared_bytes || offset(at) % 16 != 0) {
        fail("a product reads beside the shared memory of its block");
    }
    if (block->unshared[offset(at) / 16]) {
        fail("a product reads what was copied to shared memory and not shared");
    }
}

void run_block(size_t threads, size_t shared_bytes, const std::function<void()> &body) {
    if (shared_bytes > sizeof shared) {
        fail("more shared memory than there is");
    }
    if (block == nullptr) {
        owner = std::make_unique<Block>();
        block = owner.get();
    }
    auto *memory = reinterpret_cast<unsigned char *>(shared);
    std::memset(memory, UNWRITTEN, shared_bytes);
    const size_t fenced = std::min(shared_bytes + PAGE, sizeof shared);
    std::memset(memory + shared_bytes, FENCE, fenced - shared_bytes);
    block->body = &body;
    block->shared_bytes = shared_bytes;
    block->unshared.assign(sizeof shared / 16, false);
    if (block->fibers.size() < threads) {
        block->fibers.resize(threads);
    }
    for (size_t i = 0; i < threads; i++) {
        Fiber &fiber = block->fibers[i];
        if (fiber.stack == nullptr) {
            fiber.stack.reset(new char[STACK]);
        }
        fiber.state = State::READY;
        fiber.shuffles = 0;
        fiber.copies.assign(1, {});
        fiber.products.assign(1, {});
        fiber.unshared.clear();
        prepare(fiber.place, fiber.stack.get(), enter);
    }
    const size_t warps = (threads + WARP - 1) / WARP;
    for (bool forwards = true;;) {
        if (standing(0, threads, State::ENDED) == threads) {
            break;
        }
        if (standing(0, threads, State::AT_BARRIER) == threads) {
            for (size_t i = 0; i < threads; i++) {
                block->fibers[i].state = State::READY;
            }
            forwards = !forwards;
        }
        // One warp runs to the next barrier before another begins.
        size_t first = threads, end = threads;
        for (const State state : {State::AT_SHUFFLE, State::READY}) {
            for (size_t n = 0; n < warps && first == threads; n++) {
                const size_t from = (forwards ? n : warps - 1 - n) * WARP, to = std::min(from + WARP, threads);
                if (standing(from, to, state) == to - from) {
                    first = from;
                    end = to;
                }
            }
        }
        if (first == threads) {
            fail("some threads of a block wait for each other, and others have ended or wait elsewhere");
        }
        for (size_t n = first; n < end; n++) {
            const size_t next = forwards ? n : first + end - 1 - n;
            block->current = next;
            threadIdx = {static_cast<unsigned>(next), 0, 0};
            go_on(&block->scheduler, &block->fibers[next].place);
        }
    }
    for (size_t i = 0; i < threads; i++) {
        const auto &products = block->fibers[i].products;
        if (std::any_of(products.begin(), products.end(), [](const auto &group) { return !group.empty(); })) {
            fail("a thread ends before its products");
        }
    }
    for (size_t i = shared_bytes; i < fenced; i++) {
        if (memory[i] != FENCE) {
            fail("a kernel wrote behind its " + std::to_string(shared_bytes) + " bytes of shared memory");
        }
    }
}
