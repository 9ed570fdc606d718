#include "net/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <thread>

namespace dfkv {

namespace {
std::uint64_t this_thread() { return std::hash<std::thread::id>{}(std::this_thread::get_id()) | 1; }

Fd checked(int fd, const char* what) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
  return Fd(fd);
}
}  // namespace

struct EventLoop::Watch {
  int fd;
  Handler handler;
  bool removed = false;
};

EventLoop::EventLoop()
    : epoll_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wake_(checked(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
  add(wake_.get(), EPOLLIN, [this](std::uint32_t) {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto got = ::read(wake_.get(), &count, sizeof count);
  });
}

EventLoop::~EventLoop() = default;

void EventLoop::run() {
  thread_.store(this_thread(), std::memory_order_release);
  std::array<epoll_event, 64> events;
  while (!stopping_.load(std::memory_order_acquire)) {
    drain_tasks();
    const int timeout_ms = fire_timers();  // a task posted from here on writes to wake_
    if (stopping_.load(std::memory_order_acquire)) break;
    const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), timeout_ms);
    // A handler may remove other descriptors: hold every watch of this round, and skip the removed ones.
    std::array<std::shared_ptr<Watch>, 64> ready;
    for (int i = 0; i < count; ++i) {
      if (const auto it = watches_.find(events[i].data.fd); it != watches_.end()) ready[i] = it->second;
    }
    for (int i = 0; i < count; ++i) {
      if (ready[i] && !ready[i]->removed) ready[i]->handler(events[i].events);
    }
    drain_tasks();
  }
  std::vector<Task> left;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    left.swap(tasks_);
  }
  thread_.store(0, std::memory_order_release);
}

void EventLoop::stop() {
  stopping_.store(true, std::memory_order_release);
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto sent = ::write(wake_.get(), &one, sizeof one);
}

void EventLoop::post(Task task) {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    if (ended_) return;
    first = tasks_.empty();
    tasks_.push_back(std::move(task));
  }
  if (first) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto sent = ::write(wake_.get(), &one, sizeof one);
  }
}

void EventLoop::drain_tasks() {
  std::vector<Task> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (auto& task : tasks) task();
}

void EventLoop::add(int fd, std::uint32_t events, Handler handler) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  }
  watches_[fd] = std::make_shared<Watch>(Watch{fd, std::move(handler)});
}

void EventLoop::modify(int fd, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::remove(int fd) {
  const auto it = watches_.find(fd);
  if (it == watches_.end()) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  it->second->removed = true;
  watches_.erase(it);
}

EventLoop::TimerId EventLoop::at(Clock::time_point when, Task task) {
  const TimerId id = next_timer_++;
  timers_.emplace(std::make_pair(when, id), std::move(task));
  timer_index_.emplace(id, when);
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
      return static_cast<int>(std::min<long long>(wait_ms, 60'000));
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
