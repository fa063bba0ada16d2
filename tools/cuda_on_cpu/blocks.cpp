// Threads of a block as fibers of the calling thread.
#include "device.hpp"
#include <algorithm>
#include <cstring>
#include <ucontext.h>
#include <vector>

thread_local Index threadIdx, blockIdx, gridDim;
thread_local float shared[58112];

namespace {

constexpr size_t STACK = 128 * 1024;

// Where a fiber or the scheduler stands.
#if defined(__x86_64__)
// The calls for this of the C library save signal masks, which takes most of the time of a barrier.
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

void prepare(Place &place, std::vector<char> &stack, void (*start)()) {
    auto top = reinterpret_cast<uintptr_t>(stack.data() + stack.size()) & ~uintptr_t(15);
    auto *words = reinterpret_cast<uintptr_t *>(top) - 8;
    std::fill(words, words + 6, 0);
    words[6] = reinterpret_cast<uintptr_t>(start);
    place = words;
}
#else
using Place = ucontext_t;

void go_on(Place *from, Place *to) { swapcontext(from, to); }

void prepare(Place &place, std::vector<char> &stack, void (*start)()) {
    getcontext(&place);
    place.uc_stack.ss_sp = stack.data();
    place.uc_stack.ss_size = stack.size();
    place.uc_link = nullptr;
    makecontext(&place, start, 0);
}
#endif

struct Fiber {
    Place place;
    std::vector<char> stack;
    bool ended;
};

struct Block {
    std::vector<Fiber> fibers;
    Place scheduler;
    size_t current = 0;
    const std::function<void()> *body = nullptr;
};

thread_local Block block;

void leave() { go_on(&block.fibers[block.current].place, &block.scheduler); }

void enter() {
    (*block.body)();
    block.fibers[block.current].ended = true;
    leave();
}

} // namespace

void barrier() { leave(); }

void run_block(size_t threads, size_t shared_bytes, const std::function<void()> &body) {
    if (shared_bytes > sizeof shared) {
        fail("more shared memory than there is");
    }
    auto *memory = reinterpret_cast<unsigned char *>(shared);
    std::memset(memory, UNWRITTEN, shared_bytes);
    const size_t fenced = std::min(shared_bytes + PAGE, sizeof shared);
    std::memset(memory + shared_bytes, FENCE, fenced - shared_bytes);
    block.body = &body;
    if (block.fibers.size() < threads) {
        block.fibers.resize(threads);
    }
    for (size_t i = 0; i < threads; i++) {
        Fiber &fiber = block.fibers[i];
        fiber.stack.resize(STACK);
        fiber.ended = false;
        prepare(fiber.place, fiber.stack, enter);
    }
    for (bool forwards = true;; forwards = !forwards) {
        for (size_t n = 0; n < threads; n++) {
            block.current = forwards ? n : threads - 1 - n;
            threadIdx = {static_cast<unsigned>(block.current), 0, 0};
            go_on(&block.scheduler, &block.fibers[block.current].place);
        }
        const auto ended = std::count_if(block.fibers.begin(), block.fibers.begin() + static_cast<long>(threads),
                                         [](const Fiber &fiber) { return fiber.ended; });
        if (ended == static_cast<long>(threads)) {
            break;
        }
        if (ended > 0) {
            fail("some threads of a block wait at a barrier and others have ended");
        }
    }
    for (size_t i = shared_bytes; i < fenced; i++) {
        if (memory[i] != FENCE) {
            fail("a kernel wrote behind its " + std::to_string(shared_bytes) + " bytes of shared memory");
        }
    }
}
