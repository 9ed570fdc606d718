#include "net/reactor.h"

#include <pthread.h>

#include <algorithm>
#include <cassert>
#include <exception>
#include <string>
#include <utility>

namespace dfkv::server {

namespace {

// Deadlines are kept to within a quarter of themselves, and a quarter of a second.
std::chrono::milliseconds sweep_interval(const ServerOptions& options) {
  const std::uint32_t shortest = std::min(options.handshake_timeout_ms, options.stall_timeout_ms);
  return std::chrono::milliseconds(std::clamp<std::uint32_t>(shortest / 4, 5, 250));
}

}  // namespace

Reactor::Reactor(Store& store, const ServerOptions& options, const ViewBoard& views, RequestBudget& budget,
                 std::function<Counters()> stats, std::function<void()> closed)
    : sweep_every_(sweep_interval(options)),
      scratch_(kPieceBytes),
      closed_(std::move(closed)),
      context_{loop_,
               store,
               options,
               views,
               counters_,
               scratch_,
               budget,
               std::move(stats),
               [this](std::uint64_t id) { introduced(id); },
               [this](std::uint64_t id) {
                 introduced(id);
                 sessions_.erase(id);
                 closed_();
               }} {}

Reactor::~Reactor() { assert(!thread_.joinable()); }

void Reactor::start(unsigned number) {
  thread_ = std::thread([this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), ("dfkv-net-" + std::to_string(number)).c_str());
}

void Reactor::run() {
  loop_.at(Clock::now() + sweep_every_, [this] { sweep(); });
  loop_.run();
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  ended_changed_.notify_all();
}

void Reactor::stop() {
  loop_.post([this] {
    decltype(sessions_) sessions;
    sessions.swap(sessions_);
    for (const auto& [id, session] : sessions) session->close();
    loop_.stop();
  });
}

bool Reactor::join(Clock::time_point deadline) {
  if (!thread_.joinable()) return true;
  {
    std::unique_lock lock(mutex_);
    if (!ended_changed_.wait_until(lock, deadline, [this] { return ended_; })) return false;
  }
  thread_.join();
  return true;
}

void Reactor::adopt(Fd fd, std::uint64_t id) {
  // A task has to be copyable; a task that is never run still closes the connection.
  auto shared = std::make_shared<Fd>(std::move(fd));
  loop_.post([this, shared, id] {
    counters_.connections_total.add();
    try {
      auto session = std::make_shared<Session>(context_, std::move(*shared), id);
      session->start();
      sessions_.emplace(id, std::move(session));
      half_open_.insert(id);
      half_open_count_.store(half_open_.size(), std::memory_order_relaxed);
    } catch (const std::exception&) {
      // No memory, or no room in epoll: the connection closes, the others go on.
      counters_.connections_refused.add();
      closed_();
    }
  });
}

void Reactor::introduced(std::uint64_t id) {
  half_open_.erase(id);
  half_open_count_.store(half_open_.size(), std::memory_order_relaxed);
}

void Reactor::shed_half_open(std::size_t count) {
  loop_.post([this, count] { shed(count); });
}

void Reactor::shed(std::size_t count) {
  for (; count > 0 && !half_open_.empty(); --count) {
    const auto session = sessions_.at(*half_open_.begin());
    counters_.connections_shed.add();
    session->close();
  }
}

void Reactor::view_changed() {
  loop_.post([this] {
    const auto sessions = sessions_;  // answering may close one
    for (const auto& [id, session] : sessions) session->view_changed();
  });
}

void Reactor::sweep() {
  const auto now = Clock::now();
  std::vector<std::shared_ptr<Session>> sessions;
  sessions.reserve(sessions_.size());
  for (const auto& [id, session] : sessions_) sessions.push_back(session);
  for (const auto& session : sessions) session->check_deadlines(now);
  loop_.at(now + sweep_every_, [this] { sweep(); });
}

}  // namespace dfkv::server
