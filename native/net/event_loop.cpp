#include "net/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <span>
#include <system_error>
#include <thread>

namespace dfkv {

namespace {

constexpr long long kLongestSleep_ms = 60'000;

std::uint64_t this_thread() { return std::hash<std::thread::id>{}(std::this_thread::get_id()) | 1; }

void drain_eventfd(const Fd& fd) {
  std::uint64_t count = 0;
  [[maybe_unused]] const auto got = ::read(fd.get(), &count, sizeof count);
}

void signal_eventfd(const Fd& fd) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto sent = ::write(fd.get(), &one, sizeof one);
}

// A descriptor's number is soon used again: an event that was fetched before must not reach its next owner.
std::uint64_t tag(int fd, std::uint32_t serial) {
  return static_cast<std::uint64_t>(serial) << 32 | static_cast<std::uint32_t>(fd);
}

constexpr std::size_t kEventsPerRound = 64;
using Events = std::array<epoll_event, kEventsPerRound>;

std::span<const epoll_event> fetch(const Fd& epoll, Events& events, int timeout_ms) {
  const int count = ::epoll_wait(epoll.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
  return std::span(events).first(static_cast<std::size_t>(std::max(count, 0)));
}

Fd checked(int fd, const char* what) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
  return Fd(fd);
}
}  // namespace

struct EventLoop::Watch {
  int fd;
  int epoll;
  std::uint32_t serial;
  Handler handler;
  bool removed = false;
};

EventLoop::EventLoop()
    : epoll_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wake_(checked(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
  add(wake_.get(), EPOLLIN, [this](std::uint32_t) { drain_eventfd(wake_); });
}

EventLoop::~EventLoop() = default;

void EventLoop::run() {
  thread_.store(this_thread(), std::memory_order_release);
  Events events;
  std::unique_lock turn(turn_);
  running_ = true;
  while (!stopping_.load(std::memory_order_acquire)) {
    drain_tasks();
    const int timeout_ms = fire_timers();  // a task posted from here on writes to wake_
    if (stopping_.load(std::memory_order_acquire)) break;
    sleeps_until_ = timers_.empty() ? Clock::time_point::max() : timers_.begin()->first.first;
    turn.unlock();
    const auto ready = fetch(epoll_, events, timeout_ms);
    turn.lock();
    sleeps_until_ = Clock::time_point::min();
    handle(ready);
    drain_tasks();
  }
  running_ = false;
  nudge_guest();
  turn.unlock();
  std::vector<Task> left;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    left.swap(tasks_);
  }
  thread_.store(0, std::memory_order_release);
}

void EventLoop::handle(std::span<const epoll_event> events) {
  // A handler may remove other descriptors: hold every watch of this round, and skip the removed ones.
  std::array<std::shared_ptr<Watch>, kEventsPerRound> ready;
  for (std::size_t i = 0; i < events.size(); ++i) {
    const auto it = watches_.find(static_cast<int>(events[i].data.u64 & UINT32_MAX));
    if (it == watches_.end() || tag(it->first, it->second->serial) != events[i].data.u64) continue;
    ready[i] = it->second;
  }
  for (std::size_t i = 0; i < events.size(); ++i) {
    if (ready[i] && !ready[i]->removed) ready[i]->handler(events[i].events);
  }
}

bool EventLoop::open_to_guests() const { return running_ && shared_ && guest_ == std::thread::id(); }

void EventLoop::join_in(const std::function<bool()>& done, Clock::time_point until) {
  std::unique_lock turn(turn_);
  if (open_to_guests()) be_guest(turn, {}, done, until);
}

bool EventLoop::try_join_in(const Task& work, const std::function<bool()>& done, Clock::time_point until) {
  std::unique_lock turn(turn_, std::try_to_lock);
  if (!turn || !open_to_guests()) return false;
  be_guest(turn, work, done, until);
  return true;
}

void EventLoop::be_guest(std::unique_lock<std::mutex>& turn, const Task& work,
                         const std::function<bool()>& done, Clock::time_point until) {
  guest_ = std::this_thread::get_id();
  modify(shared_.get(), 0);  // before the work: what answers it wakes this thread alone
  if (work) {
    drain_tasks();
    work();
  }
  Events events;
  while (running_ && !done()) {
    const auto left_ms = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    if (left_ms <= 0) break;
    turn.unlock();
    const auto ready =
        fetch(shared_, events, static_cast<int>(std::min<long long>(left_ms, kLongestSleep_ms)));
    turn.lock();
    if (running_) handle(ready);
  }
  guest_ = {};
  if (running_) modify(shared_.get(), EPOLLIN);
}

void EventLoop::nudge_guest() {
  if (guest_ != std::thread::id() && guest_ != std::this_thread::get_id()) signal_eventfd(guest_wake_);
}

void EventLoop::share() {
  shared_ = checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
  guest_wake_ = checked(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
  add(shared_.get(), EPOLLIN, [this](std::uint32_t) {
    Events events;
    handle(fetch(shared_, events, 0));
  });
  add(
      guest_wake_.get(), EPOLLIN, [this](std::uint32_t) { drain_eventfd(guest_wake_); }, For::kGuestsToo);
}

void EventLoop::wake() { signal_eventfd(wake_); }

void EventLoop::stop() {
  stopping_.store(true, std::memory_order_release);
  wake();
}

void EventLoop::post(Task task) {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    if (ended_) return;
    first = tasks_.empty();
    tasks_.push_back(std::move(task));
  }
  if (first) wake();
}

void EventLoop::drain_tasks() {
  {
    const std::lock_guard lock(mutex_);
    batch_.swap(tasks_);
  }
  for (const Task& task : batch_) task();
  batch_.clear();
}

void EventLoop::add(int fd, std::uint32_t events, Handler handler, For whom) {
  if (whom == For::kGuestsToo && !shared_) share();
  const int epoll = whom == For::kGuestsToo ? shared_.get() : epoll_.get();
  const std::uint32_t serial = next_serial_++;
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag(fd, serial);
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  }
  watches_[fd] = std::make_shared<Watch>(Watch{fd, epoll, serial, std::move(handler)});
}

void EventLoop::modify(int fd, std::uint32_t events) {
  const auto it = watches_.find(fd);
  if (it == watches_.end()) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag(fd, it->second->serial);
  ::epoll_ctl(it->second->epoll, EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::remove(int fd) {
  const auto it = watches_.find(fd);
  if (it == watches_.end()) return;
  ::epoll_ctl(it->second->epoll, EPOLL_CTL_DEL, fd, nullptr);
  it->second->removed = true;
  watches_.erase(it);
}

EventLoop::TimerId EventLoop::at(Clock::time_point when, Task task) {
  const TimerId id = next_timer_++;
  timers_.emplace(std::make_pair(when, id), std::move(task));
  timer_index_.emplace(id, when);
  if (when < sleeps_until_) wake();
  return id;
}

void EventLoop::cancel(TimerId id) {
  const auto it = timer_index_.find(id);
  if (it == timer_index_.end()) return;
  timers_.erase(std::make_pair(it->second, id));
  timer_index_.erase(it);
}

int EventLoop::fire_timers() {
  while (!timers_.empty()) {
    const auto now = Clock::now();
    const auto first = timers_.begin();
    const auto when = first->first.first;
    if (when > now) {
      const auto wait_ms = std::chrono::ceil<std::chrono::milliseconds>(when - now).count();
      return static_cast<int>(std::min<long long>(wait_ms, kLongestSleep_ms));
    }
    Task task = std::move(first->second);
    timer_index_.erase(first->first.second);
    timers_.erase(first);
    task();
  }
  return -1;
}

bool EventLoop::on_loop_thread() const { return thread_.load(std::memory_order_acquire) == this_thread(); }

}  // namespace dfkv
