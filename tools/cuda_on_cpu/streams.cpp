// Streams that do nothing until somebody asks for it, and then no more than that needs.
#include "device.hpp"
#include <cstdlib>
#include <deque>
#include <thread>
#include <utility>

namespace {

std::mutex lock;

// Never destroyed: work is left on them until the process ends.
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

// Whoever needs work of a stream does it, one at a time. Threads that wait for each other's streams do so without a circle: an
// event is recorded before a stream is told to wait for it, so what one needs of a stream is done before whoever works on it
// waits for more. That is why nobody waits for the lock alone.
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
