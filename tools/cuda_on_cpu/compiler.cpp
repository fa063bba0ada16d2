// Compiles kernels with the C++ compiler of this machine.
#include "device.hpp"
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <fstream>
#include <iterator>
#include <mutex>
#include <set>
#include <unistd.h>

namespace {

// The path of this library.
std::string library() {
    Dl_info self;
    dladdr(reinterpret_cast<void *>(&barrier), &self);
    return self.dli_fname;
}

std::string folder() { return library().substr(0, library().rfind('/')); }

// A path quoted for the shell.
std::string quoted(const std::string &path) { return "'" + path + "'"; }

std::string contents(const std::string &path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
}

// Flags for candle's kernels: an architecture with arithmetic on 16-bit types.
const char *const CANDLE = " -D__CUDA_ARCH__=800 -D__CUDACC_VER_MAJOR__=13 -D__CUDACC_VER_MINOR__=0";

std::string with_prelude() { return " -include " + quoted(folder() + "/prelude.h") + " -I " + quoted(folder() + "/include"); }

// A lock on a file, because two threads may compile the same one.
class Turn {
    static inline std::mutex mutex;
    static inline std::condition_variable ended;
    static inline std::set<std::string> held;
    std::string path;

  public:
    explicit Turn(std::string path_) : path(std::move(path_)) {
        std::unique_lock<std::mutex> lock(mutex);
        ended.wait(lock, [&] { return held.insert(path).second; });
    }
    Turn(const Turn &) = delete;
    ~Turn() {
        std::lock_guard<std::mutex> lock(mutex);
        held.erase(path);
        ended.notify_all();
    }
};

} // namespace

std::string entry(const std::string &kernel) {
    return "extern \"C\" std::function<void()> *entry_" + kernel + "(void **at) { return bound(" + kernel + ", at); }\n";
}

std::string compile(const std::string &source, const std::string &flags, std::string &log) {
    const std::string cache = folder() + "/compiled";
    const std::string command = "c++ -std=c++17 -O1 -fno-fast-math -ffp-contract=off -shared -fPIC -w" + flags;
    const std::string stem = cache + "/" + std::to_string(std::hash<std::string>()(source + command));
    const std::string binary = stem + ".so";
    const Turn turn(binary);
    if (std::ifstream(binary)) {
        return binary;
    }
    if (std::system(("mkdir -p " + quoted(cache)).c_str()) != 0) {
        fail("no folder for compiled kernels");
    }
    // Another process may be compiling the same source.
    const std::string own = stem + "-" + std::to_string(getpid());
    std::ofstream(own + ".cpp") << source;
    const std::string build = command + " " + quoted(own + ".cpp") + " " + quoted(library()) + " -Wl,-rpath," +
                              quoted(folder()) + " -o " + quoted(own + ".new") + " 2>" + quoted(own + ".log") +
                              " && mv " + quoted(own + ".new") + " " + quoted(binary);
    const bool built = std::system(build.c_str()) == 0;
    log = contents(own + ".log");
    for (const char *end : {".cpp", ".log"}) {
        std::remove((own + end).c_str());
    }
    if (!built) {
        return "";
    }
    return binary;
}

std::string compile_text(const std::string &source, const std::string &flags, std::string &log) {
    // A changed prelude makes this another source, which is compiled again.
    return compile(source + "\n// " + std::to_string(std::hash<std::string>()(contents(folder() + "/prelude.h"))) + "\n",
                   flags + with_prelude(), log);
}

std::string compile_candle(const std::string &include, std::string &log) {
    const std::string stem = folder() + "/module-" + std::to_string(std::hash<std::string>()(include));
    const std::string first = stem + "-" + std::to_string(reinterpret_cast<uintptr_t>(&log)) + ".cpp";
    std::ofstream(first) << include << "\n";
    const std::string command = "c++ -std=c++17 -E -P" + std::string(CANDLE) + with_prelude() + " " + quoted(first);
    std::string source;
    FILE *output = popen(command.c_str(), "r");
    char part[65536];
    for (size_t count; output != nullptr && (count = std::fread(part, 1, sizeof part, output)) > 0;) {
        source.append(part, count);
    }
    const bool good = output != nullptr && pclose(output) == 0;
    std::remove(first.c_str());
    if (!good) {
        log = "cannot be preprocessed: " + include;
        return "";
    }
    // The prelude's definition of __global__, by which kernels are found.
    const std::string mark = "__attribute__((noinline)) void ";
    std::string entries;
    for (size_t at = source.find(mark); at != std::string::npos; at = source.find(mark, at)) {
        at += mark.size();
        entries += entry(source.substr(at, source.find('(', at) - at));
    }
    return compile(source + "\n" + entries, "", log);
}
