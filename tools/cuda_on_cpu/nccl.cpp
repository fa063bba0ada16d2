// NCCL between threads and processes of one machine, without buffers: the sends and receives of two ranks are matched in order, no
// transfer ends before both its ends have begun, the transfers of a group move together, and the groups of a communicator run one
// after the other. Calls that deadlock in NCCL deadlock here. Non-blocking communicators begin late.
//
// Ranks communicate through a folder, whose path is the id: `rank.R` says that R has joined and on which device, `want.A.B.N` that B
// waits for the N-th block of A, `data.A.B.N` is that block, and `ended.R` says that R no longer needs the folder.
#include "device.hpp"
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;

enum Code { OK = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };

// Number of queries that return IN_PROGRESS before an operation begins.
constexpr int LATE = 2;

struct Transfer {
    bool sends;
    int peer;
    uintptr_t at;
    size_t bytes;
    bool done = false;
};

using Group = std::vector<Transfer>;

struct Comm {
    std::mutex lock;
    fs::path folder;
    int rank = 0, size = 0, device = 0;
    bool connected = false, aborted = false, finalized = false;
    int late = LATE;
    // The group that has been closed and is not on the stream yet.
    std::shared_ptr<Group> starting;
    Stream *stream = nullptr;
    // The group that is running on the stream.
    std::shared_ptr<Group> open;
    // Number of blocks sent and received so far, by peer.
    std::map<int, unsigned> sent, received;
};

struct Id {
    char bytes[128];
};

struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

std::mutex lock;
// The communicators that have not been destroyed.
std::map<Comm *, std::shared_ptr<Comm>> comms;

thread_local int depth = 0;
thread_local std::shared_ptr<Comm> grouped;
thread_local std::shared_ptr<Group> group;
thread_local Stream *group_stream;
thread_local const char *last = "";

int refuse(const char *why, Code code = INVALID_USAGE) {
    last = why;
    return code;
}

std::shared_ptr<Comm> of(void *handle) {
    std::lock_guard<std::mutex> guard(lock);
    const auto found = comms.find(static_cast<Comm *>(handle));
    if (found == comms.end()) {
        fail("NCCL is given a communicator that has ended");
    }
    return found->second;
}

std::string named(const char *what, int rank) { return std::string(what) + "." + std::to_string(rank); }

// Writes a file atomically.
void put(const fs::path &path, const void *bytes, size_t size) {
    fs::path begun = path;
    begun += ".begun";
    std::ofstream(begun, std::ios::binary).write(static_cast<const char *>(bytes), static_cast<std::streamsize>(size));
    std::error_code error;
    fs::rename(begun, path, error);
}

std::optional<std::string> get(const fs::path &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        return std::nullopt;
    }
    return std::string(std::istreambuf_iterator<char>(file), {});
}

// Completes a transfer if its other end has begun.
void move(Comm &comm, Transfer &mine) {
    const int from = mine.sends ? comm.rank : mine.peer, to = mine.sends ? mine.peer : comm.rank;
    unsigned &number = (mine.sends ? comm.sent : comm.received)[mine.peer];
    const std::string name = named("", from) + named("", to) + "." + std::to_string(number);
    const fs::path want = comm.folder / ("want" + name), data = comm.folder / ("data" + name);
    auto *memory = reinterpret_cast<char *>(mine.at);
    if (mine.sends) {
        const auto wanted = get(want);
        if (!wanted) {
            return;
        }
        if (*wanted != std::to_string(mine.bytes)) {
            fail("NCCL: rank " + std::to_string(to) + " waits for " + *wanted + " bytes of rank " + std::to_string(from) +
                 ", which sends " + std::to_string(mine.bytes));
        }
        check_copy(mine.at, mine.bytes, comm.device);
        put(data, memory, mine.bytes);
    } else {
        const auto block = get(data);
        if (!block) {
            if (!fs::exists(want)) {
                const std::string bytes = std::to_string(mine.bytes);
                put(want, bytes.data(), bytes.size());
            }
            return;
        }
        check_copy(mine.at, mine.bytes, comm.device);
        std::memcpy(memory, block->data(), block->size());
        std::error_code error;
        fs::remove(want, error);
        fs::remove(data, error);
    }
    number++;
    mine.done = true;
}

// Completes the transfers of a group of which both ends have begun; returns whether all are complete.
bool move(Comm &comm, const std::shared_ptr<Group> &now) {
    std::lock_guard<std::mutex> guard(comm.lock);
    if (comm.aborted) {
        return true;
    }
    if (comm.open == nullptr) {
        comm.open = now;
    }
    if (comm.open != now) {
        return false;
    }
    bool all = true;
    // For each peer and direction, only the first incomplete transfer may move.
    std::map<std::pair<int, bool>, bool> later;
    for (Transfer &mine : *now) {
        if (!mine.done && !std::exchange(later[{mine.peer, mine.sends}], true)) {
            move(comm, mine);
        }
        all = all && mine.done;
    }
    if (all) {
        comm.open = nullptr;
    }
    return all;
}

// Destroys a communicator; the last rank removes the folder.
void end(void *handle) {
    const auto comm = of(handle);
    put(comm->folder / named("ended", comm->rank), "", 0);
    bool all = true;
    for (int rank = 0; rank < comm->size; rank++) {
        all = all && fs::exists(comm->folder / named("ended", rank));
    }
    std::error_code error;
    if (all) {
        fs::remove_all(comm->folder, error);
    }
    std::lock_guard<std::mutex> guard(lock);
    comms.erase(static_cast<Comm *>(handle));
}

void launch(const std::shared_ptr<Comm> &comm) {
    comm->stream->push_until([comm, now = std::move(comm->starting)] { return move(*comm, now); });
    comm->starting = nullptr;
}

int add(bool sends, uintptr_t at, size_t count, int type, int peer, void *handle, void *given) {
    const auto comm = of(handle);
    if (type != 1) {
        return refuse("only bytes are moved here", INVALID_ARGUMENT);
    }
    if (peer < 0 || peer >= comm->size || peer == comm->rank) {
        return refuse("a peer that is not there, or oneself", INVALID_ARGUMENT);
    }
    if (!comm->connected || comm->starting != nullptr || comm->finalized) {
        return refuse("a call before the last one has begun, or after the end");
    }
    if (depth == 0) {
        return refuse("sends and receives belong into groups here");
    }
    Stream *on = stream(given);
    if ((grouped != nullptr && grouped != comm) || (group_stream != nullptr && group_stream != on)) {
        return refuse("a group has one communicator and one stream here");
    }
    if (on->device != comm->device) {
        return refuse("a stream of another device");
    }
    if (group == nullptr) {
        group = std::make_shared<Group>();
    }
    grouped = comm;
    group_stream = on;
    group->push_back({sends, peer, at, count});
    return IN_PROGRESS;
}

struct AtEnd {
    ~AtEnd() {
        if (!comms.empty()) {
            fail(std::to_string(comms.size()) + " communicators of NCCL were never ended");
        }
    }
} at_end;

} // namespace

extern "C" {

int ncclGetVersion(int *version) {
    *version = 22203;
    return OK;
}

int ncclGetUniqueId(Id *id) {
    std::memset(id, 0, sizeof *id);
    std::error_code error;
    const fs::path shared = "/dev/shm", root = fs::exists(shared, error) ? shared : fs::temp_directory_path();
    const std::string folder = (root / "nccl-on-cpu-XXXXXX").string();
    std::memcpy(id->bytes, folder.data(), std::min(folder.size(), sizeof id->bytes - 1));
    return mkdtemp(id->bytes) == nullptr ? refuse("no folder to meet in", SYSTEM_ERROR) : OK;
}

int ncclCommInitRankConfig(void **made, int size, Id id, int rank, const Config *config) {
    if (config->magic != 0xcafebeef || config->size < sizeof *config || rank < 0 || rank >= size) {
        return refuse("a configuration that is none", INVALID_ARGUMENT);
    }
    if (config->blocking != 0) {
        return refuse("communicators that block are not made here", INVALID_ARGUMENT);
    }
    const auto comm = std::make_shared<Comm>();
    comm->folder = id.bytes;
    comm->rank = rank;
    comm->size = size;
    comm->device = device();
    const fs::path here = comm->folder / named("rank", rank);
    if (!fs::exists(comm->folder) || fs::exists(here)) {
        return refuse("an id that nobody made, or two of the same rank", INVALID_ARGUMENT);
    }
    const std::string on = std::to_string(comm->device);
    put(here, on.data(), on.size());
    *made = comm.get();
    std::lock_guard<std::mutex> guard(lock);
    comms[comm.get()] = comm;
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(void *handle, int *state) {
    const auto comm = of(handle);
    *state = OK;
    if (!comm->connected) {
        const char *shared = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
        for (int rank = 0; rank < comm->size; rank++) {
            const auto on = get(comm->folder / named("rank", rank));
            if (!on) {
                *state = IN_PROGRESS;
                return OK;
            }
            const bool same = rank != comm->rank && *on == std::to_string(comm->device);
            if (same && (shared == nullptr || std::strcmp(shared, "1") != 0)) {
                *state = refuse("Duplicate GPU detected");
                return OK;
            }
        }
        comm->connected = true;
        comm->late = LATE;
    }
    if (comm->starting != nullptr || comm->finalized) {
        if (comm->late-- > 0) {
            *state = IN_PROGRESS;
        } else if (comm->starting != nullptr) {
            launch(comm);
        }
    }
    return OK;
}

int ncclGroupStart() {
    depth++;
    return OK;
}

int ncclGroupEnd() {
    if (depth-- == 0) {
        depth = 0;
        return refuse("a group that was not begun");
    }
    if (depth > 0 || grouped == nullptr) {
        return OK;
    }
    grouped->starting = std::move(group);
    grouped->stream = group_stream;
    grouped->late = LATE;
    grouped = nullptr;
    group = nullptr;
    group_stream = nullptr;
    return IN_PROGRESS;
}

int ncclSend(const void *at, size_t count, int type, int peer, void *comm, void *stream) {
    return add(true, reinterpret_cast<uintptr_t>(at), count, type, peer, comm, stream);
}

int ncclRecv(void *at, size_t count, int type, int peer, void *comm, void *stream) {
    return add(false, reinterpret_cast<uintptr_t>(at), count, type, peer, comm, stream);
}

int ncclCommFinalize(void *handle) {
    const auto comm = of(handle);
    std::lock_guard<std::mutex> guard(comm->lock);
    if (comm->open != nullptr || comm->starting != nullptr) {
        fail("NCCL is to end in peace with a group under way");
    }
    comm->finalized = true;
    comm->late = LATE;
    return IN_PROGRESS;
}

int ncclCommDestroy(void *handle) {
    if (!of(handle)->finalized) {
        fail("a communicator of NCCL is destroyed that was not finalized");
    }
    end(handle);
    return OK;
}

int ncclCommAbort(void *handle) {
    const auto comm = of(handle);
    {
        std::lock_guard<std::mutex> guard(comm->lock);
        comm->aborted = true;
        comm->open = nullptr;
        comm->starting = nullptr;
    }
    end(handle);
    return OK;
}

const char *ncclGetErrorString(int code) { return code == INVALID_USAGE ? "invalid usage" : "an error"; }

const char *ncclGetLastError(void *) { return last; }
}
