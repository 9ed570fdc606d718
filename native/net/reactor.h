// One thread of the server with its connections.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "net/counters.h"
#include "net/event_loop.h"
#include "net/session.h"

namespace dfkv::server {

class Reactor {
 public:
  // stats: the answer to STAT. closed: called on this thread for each connection that ended.
  Reactor(Store& store, const ServerOptions& options, const ViewBoard& views, std::function<Counters()> stats,
          std::function<void()> closed);
  ~Reactor();  // stop() must have succeeded, or start() never been called

  void start(unsigned number);
  // Any thread. Asks for the end; every connection is closed on the reactor's thread.
  void stop();
  // False: still running at `deadline`.
  [[nodiscard]] bool join(Clock::time_point deadline);

  // Any thread.
  void adopt(Fd fd, std::uint64_t id);
  void view_changed();
  [[nodiscard]] EventLoop& loop() { return loop_; }
  [[nodiscard]] const ServerCounters& counters() const { return counters_; }
  [[nodiscard]] ServerCounters& own_counters() { return counters_; }  // this reactor's thread only

 private:
  void run();
  void sweep();

  const std::chrono::milliseconds sweep_every_;
  ServerCounters counters_;
  std::vector<std::byte> scratch_;
  EventLoop loop_;
  std::function<void()> closed_;
  SessionContext context_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Session>> sessions_;  // this reactor's thread only
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable ended_changed_;
  bool ended_ = false;
};

}  // namespace dfkv::server
