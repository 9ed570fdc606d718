#include "net/client_resolve.h"

#include <system_error>
#include <thread>
#include <utility>

namespace dfkv::client {

namespace {
constexpr unsigned kMaxThreads = 4;
}

struct Resolver::Shared {
  std::mutex mutex;
  EventLoop* loop;  // null once the resolver is gone
  std::deque<std::pair<Endpoint, Done>> waiting;
  unsigned threads = 0;

  // Runs on a thread of its own until nothing waits.
  static void work(const std::shared_ptr<Shared>& shared) {
    for (;;) {
      std::pair<Endpoint, Done> next;
      {
        const std::lock_guard lock(shared->mutex);
        if (shared->loop == nullptr || shared->waiting.empty()) {
          --shared->threads;
          return;
        }
        next = std::move(shared->waiting.front());
        shared->waiting.pop_front();
      }
      auto addresses = resolve_blocking(next.first);
      const std::lock_guard lock(shared->mutex);
      if (shared->loop == nullptr) continue;
      shared->loop->post(
          [done = std::move(next.second), addresses = std::move(addresses)] { done(addresses); });
    }
  }
};

Resolver::Resolver(EventLoop& loop) : shared_(std::make_shared<Shared>()) { shared_->loop = &loop; }

Resolver::~Resolver() {
  std::deque<std::pair<Endpoint, Done>> dropped;
  const std::lock_guard lock(shared_->mutex);
  shared_->loop = nullptr;
  dropped.swap(shared_->waiting);
}

void Resolver::resolve(const Endpoint& endpoint, Done done) {
  if (const auto numeric = numeric_address(endpoint)) {
    done({*numeric});
    return;
  }
  bool start = false;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->waiting.emplace_back(endpoint, std::move(done));
    start = shared_->threads < kMaxThreads;
    if (start) ++shared_->threads;
  }
  if (!start) return;
  try {
    std::thread([shared = shared_] { Shared::work(shared); }).detach();
  } catch (const std::system_error&) {
    // No thread to be had: the attempt fails like a name that is not found, and is made again later.
    Done unanswered;
    {
      const std::lock_guard lock(shared_->mutex);
      --shared_->threads;
      unanswered = std::move(shared_->waiting.back().second);
      shared_->waiting.pop_back();
    }
    unanswered({});
  }
}

}  // namespace dfkv::client
