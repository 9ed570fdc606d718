// A store's operations as calls that wait for their callback, at most a while.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "slab/store.h"

namespace dfkv::test {

// Takes one result from any thread. A second one, and none in a minute, end the process: there may be no test
// case around it.
template <typename T>
class Arrival {
 public:
  void put(T value) {
    const std::lock_guard lock(mutex_);
    if (value_) fail("a callback came twice");
    value_ = std::move(value);
    changed_.notify_all();
  }
  T take() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(60), [this] { return value_.has_value(); })) {
      fail("a callback did not come");
    }
    return std::move(*value_);
  }

 private:
  static void fail(const char* what) {
    std::fprintf(stderr, "%s\n", what);
    std::abort();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<T> value_;
};

inline Status committed(WriteTicket& ticket, std::uint64_t checksum) {
  const auto arrival = std::make_shared<Arrival<Status>>();
  ticket.commit(checksum, [arrival](Status status) { arrival->put(status); });
  return arrival->take();
}

inline ReadResult acquired(Store& store, const ObjectKey& key) {
  const auto arrival = std::make_shared<Arrival<ReadResult>>();
  store.acquire(key, [arrival](ReadResult result) { arrival->put(std::move(result)); });
  return arrival->take();
}

inline Status removed(Store& store, const ObjectKey& key) {
  const auto arrival = std::make_shared<Arrival<Status>>();
  store.remove(std::span(&key, 1), [arrival](std::vector<Status> statuses) { arrival->put(statuses.at(0)); });
  return arrival->take();
}

inline std::pair<Status, std::uint64_t> erased(Store& store, const NamespaceId& ns) {
  const auto arrival = std::make_shared<Arrival<std::pair<Status, std::uint64_t>>>();
  store.erase(ns, [arrival](Status status, std::uint64_t objects) { arrival->put({status, objects}); });
  return arrival->take();
}

inline Status synced(Store& store) {
  const auto arrival = std::make_shared<Arrival<Status>>();
  store.sync([arrival](Status status) { arrival->put(status); });
  return arrival->take();
}

}  // namespace dfkv::test
