// One thread's epoll loop with timers and cross-thread tasks. Server reactors and the client's I/O thread are
// built on it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "net/fd.h"

namespace dfkv {

using Clock = std::chrono::steady_clock;

class EventLoop {
 public:
  // Called with the epoll event mask, on the loop's thread. Must not throw.
  using Handler = std::function<void(std::uint32_t events)>;
  using Task = std::function<void()>;
  using TimerId = std::uint64_t;

  EventLoop();  // throws std::system_error when epoll or eventfd cannot be made
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  void run();   // until stop(); the calling thread becomes the loop's thread
  void stop();  // any thread
  // Any thread; tasks run in order on the loop's thread. Tasks posted after the loop has ended are destroyed
  // unrun.
  void post(Task task);

  // The rest: loop thread only (or before run()).
  void add(int fd, std::uint32_t events, Handler handler);
  void modify(int fd, std::uint32_t events);
  void remove(
      int fd);  // safe inside a handler, also for other descriptors: no event reaches a removed handler
  TimerId at(Clock::time_point when, Task task);
  void cancel(TimerId id);
  [[nodiscard]] bool on_loop_thread() const;

 private:
  struct Watch;
  void drain_tasks();
  [[nodiscard]] int fire_timers();  // milliseconds until the next one, -1 for none

  Fd epoll_;
  Fd wake_;
  std::atomic<bool> stopping_{false};
  std::atomic<std::uint64_t> thread_{0};
  std::map<int, std::shared_ptr<Watch>> watches_;
  std::multimap<std::pair<Clock::time_point, TimerId>, Task> timers_;
  std::map<TimerId, Clock::time_point> timer_index_;
  TimerId next_timer_ = 1;
  std::mutex mutex_;
  std::vector<Task> tasks_;
  bool ended_ = false;
};

}  // namespace dfkv
