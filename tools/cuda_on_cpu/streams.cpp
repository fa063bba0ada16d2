// Streams that run no work until a call needs it, and then only that work and its dependencies.
#include "device.hpp"
#include <cstdlib>
#include <deque>
#include <thread>
#include <utility>

namespace {

std::mutex lock;

// Never destroyed, since streams have work until the process ends.
std::deque<std::unique_ptr<Stream>> &all() {
    static auto *streams = new std::deque<std::unique_ptr<Stream>>;
    return *streams;
}

} // namespace

Stream *new_stream(int device) {
    std::lock_guard<std::mutex> guard(lock);
    all().push_back(std::make_unique<Stream>());
    all().back()->device = device;
    return all().back().get();
}

void Stream::push(std::function<void()> work) {
    push_until([work = std::move(work)] {
        work();
        return true;
    });
}

void Stream::push_until(std::function<bool()> work) {
    std::lock_guard<std::mutex> guard(queue_lock);
    queue.push_back(std::move(work));
    pushed++;
}

// A thread that needs a stream's work runs it, one thread at a time. Threads that wait for each other's streams do not deadlock: an
// event is recorded before a stream waits for it, so the work that one thread needs is done before the thread that runs the
// stream waits for more. That is why a thread that waits for the lock also checks whether its work is done.
bool Stream::step(uint64_t position) {
    std::unique_lock<std::mutex> guard(running, std::defer_lock);
    do {
        if (done >= position) {
            return false;
        }
        std::this_thread::yield();
    } while (!guard.try_lock());
    if (done >= position) {
        return false;
    }
    std::function<bool()> work;
    {
        std::lock_guard<std::mutex> guard_queue(queue_lock);
        work = std::move(queue.front());
        queue.pop_front();
    }
    if (!work()) {
        {
            std::lock_guard<std::mutex> guard_queue(queue_lock);
            queue.push_front(std::move(work));
        }
        guard.unlock();
        std::this_thread::yield();
        return true;
    }
    done++;
    return true;
}

void Stream::run(uint64_t position) {
    while (step(position)) {
    }
}

void run_all() {
    for (size_t i = 0;; i++) {
        Stream *stream;
        {
            std::lock_guard<std::mutex> guard(lock);
            if (i == all().size()) {
                return;
            }
            stream = all()[i].get();
        }
        stream->run(stream->pushed);
    }
}
