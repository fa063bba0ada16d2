// The calls of CUDA's driver and of NVRTC that Ringspan makes, on a CPU. See README.md.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <functional>
#include <mutex>
#include <regex>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <unordered_map>
#include <vector>

namespace {

enum Result { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, NOT_READY = 600 };

[[noreturn]] void fail(const std::string &what) {
    std::fprintf(stderr, "GPU on a CPU: %s\n", what.c_str());
    std::abort();
}

// --- memory ---------------------------------------------------------------------------------------------------------

// As a number NaN, in any type.
constexpr unsigned char UNWRITTEN = 0xFF, FENCE = 0xA5;
constexpr size_t PAGE = 4096;

std::mutex lock;
std::unordered_map<uintptr_t, size_t> sizes;

// Pages of a buffer, with one before and one behind it that nobody may touch.
size_t pages(size_t size) { return (size + PAGE - 1) / PAGE * PAGE; }

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

// Copies must lie within one buffer.
void check(uintptr_t at, size_t size) {
    std::lock_guard<std::mutex> held(lock);
    for (const auto &[start, length] : sizes) {
        if (start <= at && at + size <= start + length) {
            return;
        }
    }
    fail("a copy of " + std::to_string(size) + " bytes leaves its buffer");
}

struct AtEnd {
    ~AtEnd() {
        if (!sizes.empty()) {
            fail(std::to_string(sizes.size()) + " buffers were never given back");
        }
    }
} at_end;

// --- blocks of threads ----------------------------------------------------------------------------------------------

struct Index {
    unsigned x, y, z;
};

} // namespace

extern "C" {
thread_local Index threadIdx, blockIdx, gridDim;
thread_local float shared[58112];
void barrier();
}

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

// --- compiler -------------------------------------------------------------------------------------------------------

struct Program {
    std::string source, log, binary;
};

// This file, as it was found.
std::string library() {
    Dl_info self;
    dladdr(reinterpret_cast<void *>(&barrier), &self);
    return self.dli_fname;
}

std::string folder() { return library().substr(0, library().rfind('/')); }

// Kernels take one job, which the driver gives as an address.
std::string with_entries(const std::string &source) {
    std::string entries;
    const std::regex kernel(R"(__launch_bounds__\(\w+\)\s+(\w+)\(const Job job\))");
    for (std::sregex_iterator at(source.begin(), source.end(), kernel), end; at != end; ++at) {
        const std::string name = (*at)[1];
        entries += "extern \"C\" void entry_" + name + "(void **job) { " + name + "(*(const Job *)job[0]); }\n";
    }
    return source + "\n" + entries;
}

} // namespace

extern "C" {

void barrier() { leave(); }

// --- NVRTC ---

int nvrtcCreateProgram(Program **program, const char *source, const char *, int, const char *const *,
                       const char *const *) {
    *program = new Program{source, "", ""};
    return 0;
}

int nvrtcDestroyProgram(Program **program) {
    delete *program;
    *program = nullptr;
    return 0;
}

int nvrtcCompileProgram(Program *program, int count, const char *const *options) {
    std::string flags;
    for (int i = 0; i < count; i++) {
        if (std::strncmp(options[i], "-D", 2) == 0) {
            flags += std::string(" ") + options[i];
        }
    }
    const std::string source = with_entries(program->source);
    const std::string cache = folder() + "/compiled";
    const std::string stem = cache + "/" + std::to_string(std::hash<std::string>()(source + flags));
    program->binary = stem + ".so";
    if (!std::ifstream(program->binary)) {
        static std::mutex one;
        std::lock_guard<std::mutex> held(one);
        if (std::system(("mkdir -p " + cache).c_str()) != 0) {
            fail("no folder for compiled kernels");
        }
        std::ofstream(stem + ".cpp") << source;
        const std::string command = "c++ -std=c++17 -O1 -fno-fast-math -ffp-contract=off -shared -fPIC -w -include " + folder() +
                                    "/prelude.h" + flags + " " + stem + ".cpp " + library() + " -Wl,-rpath," + folder() + " -o " + stem + ".new 2>" + stem +
                                    ".log && mv " + stem + ".new " + program->binary;
        if (std::system(command.c_str()) != 0) {
            std::ifstream log(stem + ".log");
            program->log.assign(std::istreambuf_iterator<char>(log), {});
            return 6;
        }
    }
    return 0;
}

int nvrtcGetProgramLogSize(Program *program, size_t *size) {
    *size = program->log.size() + 1;
    return 0;
}

int nvrtcGetProgramLog(Program *program, char *to) {
    std::memcpy(to, program->log.c_str(), program->log.size() + 1);
    return 0;
}

int nvrtcGetCUBINSize(Program *program, size_t *size) {
    *size = program->binary.size() + 1;
    return 0;
}

int nvrtcGetCUBIN(Program *program, char *to) {
    std::memcpy(to, program->binary.c_str(), program->binary.size() + 1);
    return 0;
}

// --- driver: one device, streams that do everything at once ---

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
    check(to, size);
    std::memcpy(reinterpret_cast<void *>(to), from, size);
    return SUCCESS;
}

int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t size, void *) {
    check(from, size);
    std::memcpy(to, reinterpret_cast<const void *>(from), size);
    return SUCCESS;
}

int cuMemsetD8Async(uintptr_t to, unsigned char value, size_t size, void *) {
    check(to, size);
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
