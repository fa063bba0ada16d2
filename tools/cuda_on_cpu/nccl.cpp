// NCCL between threads of one process, without buffers: the sends and receives of a pair are matched in order, none ends before
// both ends of it are there, those of a group move together, and groups of a communicator follow each other. What would wait
// for ever there does so here. Communicators that do not block begin late.
#include "device.hpp"
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

namespace {

enum Code { OK = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };

// Questions that are answered with "not yet".
constexpr int LATE = 2;

struct Transfer {
    bool sends;
    int peer;
    uintptr_t at;
    size_t bytes;
    bool done = false;
};

using Group = std::vector<Transfer>;

struct World;

struct Comm {
    std::shared_ptr<World> world;
    int rank = 0, device = 0;
    bool connected = false, aborted = false, finalized = false;
    int late = LATE;
    // Between the end of a group and its place on the stream.
    std::shared_ptr<Group> starting;
    Stream *stream = nullptr;
    // Whose turn it is on the stream.
    std::shared_ptr<Group> open;
    int failed = OK;
};

struct World {
    std::mutex lock;
    std::vector<std::shared_ptr<Comm>> ranks;
    size_t joined = 0;
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
std::map<std::string, std::shared_ptr<World>> worlds;
// Those that were not ended.
std::map<Comm *, std::shared_ptr<Comm>> comms;
unsigned ids = 0;

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

// The first transfer of a direction that is not done.
Transfer *first(Group &of, int peer, bool sends) {
    for (Transfer &transfer : of) {
        if (!transfer.done && transfer.peer == peer && transfer.sends == sends) {
            return &transfer;
        }
    }
    return nullptr;
}

// Moves what both ends are there for; whether all of this group has moved.
bool move(Comm &comm, const std::shared_ptr<Group> &now) {
    std::lock_guard<std::mutex> guard(comm.world->lock);
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
    for (Transfer &mine : *now) {
        Comm &other = *comm.world->ranks[static_cast<size_t>(mine.peer)];
        if (!mine.done && other.open != nullptr && first(*now, mine.peer, mine.sends) == &mine) {
            if (Transfer *theirs = first(*other.open, comm.rank, !mine.sends)) {
                if (theirs->bytes != mine.bytes) {
                    fail("NCCL: rank " + std::to_string(comm.rank) + " and rank " + std::to_string(mine.peer) + " mean " +
                         std::to_string(mine.bytes) + " and " + std::to_string(theirs->bytes) + " bytes");
                }
                const Transfer &from = mine.sends ? mine : *theirs, &to = mine.sends ? *theirs : mine;
                check_copy(from.at, from.bytes, mine.sends ? comm.device : other.device);
                check_copy(to.at, to.bytes, mine.sends ? other.device : comm.device);
                std::memcpy(reinterpret_cast<void *>(to.at), reinterpret_cast<const void *>(from.at), to.bytes);
                mine.done = theirs->done = true;
            }
        }
        all = all && mine.done;
    }
    if (all) {
        comm.open = nullptr;
    }
    return all;
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
    if (peer < 0 || static_cast<size_t>(peer) >= comm->world->ranks.size() || peer == comm->rank) {
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
    std::lock_guard<std::mutex> guard(lock);
    std::memset(id, 0, sizeof *id);
    std::memcpy(id->bytes, &++ids, sizeof ids);
    worlds[std::string(id->bytes, sizeof id->bytes)] = std::make_shared<World>();
    return OK;
}

int ncclCommInitRankConfig(void **made, int size, Id id, int rank, const Config *config) {
    if (config->magic != 0xcafebeef || config->size < sizeof *config || rank < 0 || rank >= size) {
        return refuse("a configuration that is none", INVALID_ARGUMENT);
    }
    if (config->blocking != 0) {
        return refuse("communicators that block are not made here", INVALID_ARGUMENT);
    }
    std::lock_guard<std::mutex> guard(lock);
    const auto found = worlds.find(std::string(id.bytes, sizeof id.bytes));
    if (found == worlds.end()) {
        return refuse("an id that nobody made", INVALID_ARGUMENT);
    }
    const auto comm = std::make_shared<Comm>();
    comm->world = found->second;
    comm->rank = rank;
    comm->device = device();
    std::lock_guard<std::mutex> world(found->second->lock);
    found->second->ranks.resize(static_cast<size_t>(size));
    if (found->second->ranks[static_cast<size_t>(rank)] != nullptr) {
        return refuse("two of the same rank", INVALID_ARGUMENT);
    }
    found->second->ranks[static_cast<size_t>(rank)] = comm;
    found->second->joined++;
    comms[comm.get()] = comm;
    *made = comm.get();
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(void *handle, int *state) {
    const auto comm = of(handle);
    *state = OK;
    if (!comm->connected) {
        std::lock_guard<std::mutex> guard(comm->world->lock);
        const auto &ranks = comm->world->ranks;
        const char *shared = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
        if (comm->world->joined < ranks.size()) {
            *state = IN_PROGRESS;
            return OK;
        }
        for (const auto &other : ranks) {
            if (other != comm && other->device == comm->device && (shared == nullptr || std::strcmp(shared, "1") != 0)) {
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
    std::lock_guard<std::mutex> guard(comm->world->lock);
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
    std::lock_guard<std::mutex> guard(lock);
    comms.erase(static_cast<Comm *>(handle));
    return OK;
}

int ncclCommAbort(void *handle) {
    const auto comm = of(handle);
    {
        std::lock_guard<std::mutex> guard(comm->world->lock);
        comm->aborted = true;
        comm->open = nullptr;
        comm->starting = nullptr;
    }
    std::lock_guard<std::mutex> guard(lock);
    comms.erase(static_cast<Comm *>(handle));
    return OK;
}

const char *ncclGetErrorString(int code) { return code == INVALID_USAGE ? "invalid usage" : "an error"; }

const char *ncclGetLastError(void *) { return last; }
}
