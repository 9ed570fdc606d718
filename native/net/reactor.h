// One thread of the server with its connections.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "net/counters.h"
#include "net/event_loop.h"
#include "net/session.h"

namespace dfkv::server {

class Reactor {
 public:
  using Settle = std::function<void(std::shared_ptr<Session> session, std::uint64_t id)>;
  // stats: the answer to STAT. closed: called on this thread for each connection that ended. settle: gives a
  // session that moves payload to another reactor; empty: this one keeps all of its own.
  Reactor(Store& store, const ServerOptions& options, const ViewBoard& views, RequestBudget& budget,
          RequestBudget& reads_ahead, std::function<Counters()> stats, std::function<void()> closed,
          Settle settle);
  ~Reactor();  // stop() must have succeeded, or start() never been called

  void start(const std::string& thread_name);
  // Any thread. Asks for the end; every connection is closed on the reactor's thread.
  void stop();
  // False: still running at `deadline`.
  [[nodiscard]] bool join(Clock::time_point deadline);

  // Any thread.
  void adopt(Fd fd, std::uint64_t id);
  // Any thread. A session that another reactor has let go of.
  void take(std::shared_ptr<Session> session, std::uint64_t id);
  void close_all();  // this reactor's thread only
  // Closes the oldest connections that have not introduced themselves, up to `count` of them.
  void shed_half_open(std::size_t count);
  [[nodiscard]] std::size_t half_open() const { return half_open_count_.load(std::memory_order_relaxed); }
  void view_changed();
  [[nodiscard]] EventLoop& loop() { return loop_; }
  [[nodiscard]] const ServerCounters& counters() const { return counters_; }
  [[nodiscard]] ServerCounters& own_counters() { return counters_; }  // this reactor's thread only

 private:
  void run();
  void sweep();
  void shed(std::size_t count);
  void introduced(std::uint64_t id);
  void let_go(std::uint64_t id);

  const std::chrono::milliseconds sweep_every_;
  ServerCounters counters_;
  std::vector<std::byte> scratch_;
  EventLoop loop_;
  PutQueue put_queue_;
  std::function<void()> closed_;
  Settle settle_;
  SessionContext context_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Session>> sessions_;  // this reactor's thread only
  std::set<std::uint64_t> half_open_;  // of these; ids grow, so the oldest is the first
  std::atomic<std::size_t> half_open_count_{0};
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable ended_changed_;
  bool ended_ = false;
};

}  // namespace dfkv::server
