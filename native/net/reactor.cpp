#include "net/reactor.h"

#include <pthread.h>

#include <algorithm>
#include <cassert>
#include <exception>
#include <string>
#include <utility>

#include "net/scheduling.h"

namespace dfkv::server {

namespace {

// Deadlines are kept to within a quarter of themselves, and a quarter of a second.
std::chrono::milliseconds sweep_interval(const ServerOptions& options) {
  const std::uint32_t shortest = std::min(options.handshake_timeout_ms, options.stall_timeout_ms);
  return std::chrono::milliseconds(std::clamp<std::uint32_t>(shortest / 4, 5, 250));
}

}  // namespace

Reactor::Reactor(Store& store, const ServerOptions& options, const ViewBoard& views, RequestBudget& budget,
                 RequestBudget& reads_ahead, std::function<Counters()> stats, std::function<void()> closed,
                 Settle settle)
    : sweep_every_(sweep_interval(options)),
      scratch_(kPieceBytes),
      put_queue_(loop_),
      closed_(std::move(closed)),
      settle_(std::move(settle)),
      context_{loop_,
               store,
               options,
               views,
               counters_,
               scratch_,
               budget,
               reads_ahead,
               put_queue_,
               std::move(stats),
               [this](std::uint64_t id) { introduced(id); },
               [this](std::uint64_t id) {
                 introduced(id);
                 sessions_.erase(id);
                 closed_();
               },
               nullptr} {
  if (settle_) context_.settle = [this](std::uint64_t id) { let_go(id); };
}

Reactor::~Reactor() { assert(!thread_.joinable()); }

void Reactor::start(const std::string& thread_name) {
  thread_ = std::thread([this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), thread_name.c_str());
}

void Reactor::run() {
  if (settle_) {
    prefer_short_turns();  // only small requests stay here
  } else {
    give_way_to_lookups();
  }
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
    close_all();
    loop_.stop();
  });
}

void Reactor::close_all() {
  decltype(sessions_) sessions;
  sessions.swap(sessions_);
  for (const auto& [id, session] : sessions) session->close();
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

void Reactor::let_go(std::uint64_t id) {
  const auto it = sessions_.find(id);
  auto session = std::move(it->second);
  sessions_.erase(it);
  settle_(std::move(session), id);
}

void Reactor::take(std::shared_ptr<Session> session, std::uint64_t id) {
  loop_.post([this, session = std::move(session), id] {
    sessions_.emplace(id, session);
    try {
      session->move_to(context_);
    } catch (const std::exception&) {
      session->close();  // no room in epoll
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
