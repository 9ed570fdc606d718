// One thread's epoll loop with timers and cross-thread tasks. Server reactors and the client's I/O threads
// are built on it. Another thread may take a turn as a guest: what is said below of the loop's thread then
// holds for it, and the loop's thread waits.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "net/fd.h"
#include "slab/callback.h"

namespace dfkv {

using Clock = std::chrono::steady_clock;

class EventLoop {
 public:
  // Called with the epoll event mask, on the loop's thread. Must not throw.
  using Handler = std::function<void(std::uint32_t events)>;
  using Task = Callback<void()>;
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

  // Guests: any thread but the loop's. A short exchange then needs no wake-up of the loop's thread.
  //
  // Handles the events of shared descriptors on the calling thread until done(), which is asked after each
  // round of them, or `until`. Returns at once when another guest does that already, or the loop does not
  // run.
  void join_in(const std::function<bool()>& done, Clock::time_point until);
  // First runs the tasks posted so far, then `work`, while nobody else watches the shared descriptors; then
  // as join_in(). False, and nothing has happened: somebody else is at work, or the loop does not run.
  [[nodiscard]] bool try_join_in(const Task& work, const std::function<bool()>& done,
                                 Clock::time_point until);

  // The rest: loop thread only (or before run()).
  enum class For : std::uint8_t { kLoop, kGuestsToo };
  void add(int fd, std::uint32_t events, Handler handler, For whom = For::kLoop);
  void modify(int fd, std::uint32_t events);
  void remove(
      int fd);  // safe inside a handler, also for other descriptors: no event reaches a removed handler
  TimerId at(Clock::time_point when, Task task);
  void cancel(TimerId id);
  // What a guest waits for may have happened on another thread than its own.
  void nudge_guest();
  [[nodiscard]] bool on_loop_thread() const;

 private:
  struct Watch;
  void share();  // makes what guests need
  [[nodiscard]] bool open_to_guests() const;
  void be_guest(std::unique_lock<std::mutex>& turn, const Task& work, const std::function<bool()>& done,
                Clock::time_point until);
  void handle(std::span<const epoll_event> events);
  void wake();
  void drain_tasks();
  [[nodiscard]] int fire_timers();  // milliseconds until the next one, -1 for none

  // Held by whoever is at work; let go of while it waits for events.
  std::mutex turn_;
  bool running_ = false;
  Clock::time_point sleeps_until_ = Clock::time_point::min();  // the loop's thread; min: it is awake

  Fd epoll_;
  Fd wake_;
  Fd shared_;  // an epoll inside epoll_, which is taken out of it while a guest watches
  Fd guest_wake_;
  std::thread::id guest_;  // none: default
  std::atomic<bool> stopping_{false};
  std::atomic<std::uint64_t> thread_{0};
  std::map<int, std::shared_ptr<Watch>> watches_;
  std::uint32_t next_serial_ = 1;  // of watches
  std::multimap<std::pair<Clock::time_point, TimerId>, Task> timers_;
  std::map<TimerId, Clock::time_point> timer_index_;
  TimerId next_timer_ = 1;
  std::mutex mutex_;
  std::vector<Task> tasks_;
  std::vector<Task> batch_;  // being run; kept from round to round, so that none of them allocates
  bool ended_ = false;
};

}  // namespace dfkv
