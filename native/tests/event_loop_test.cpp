#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "net/event_loop.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/epoll.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

using namespace dfkv;
using namespace std::chrono_literals;

namespace {

struct Pipe {
  Fd read;
  Fd write;
  Pipe() {
    int fds[2];
    REQUIRE(::pipe2(fds, O_NONBLOCK | O_CLOEXEC) == 0);
    read = Fd(fds[0]);
    write = Fd(fds[1]);
  }
  void poke() const { REQUIRE(::write(write.get(), "x", 1) == 1); }
  void drain() const {
    char sink[64];
    while (::read(read.get(), sink, sizeof sink) > 0) {
    }
  }
};

}  // namespace

TEST_CASE("tasks of any thread run in order on the loop's thread") {
  EventLoop loop;
  std::vector<int> order;
  std::thread thread([&loop] { loop.run(); });
  for (int i = 0; i < 1000; ++i) {
    loop.post([&order, &loop, i] {
      CHECK(loop.on_loop_thread());
      order.push_back(i);
    });
  }
  loop.post([&loop] { loop.stop(); });
  thread.join();
  REQUIRE(order.size() == 1000);
  for (int i = 0; i < 1000; ++i) CHECK(order[static_cast<std::size_t>(i)] == i);
  CHECK_FALSE(loop.on_loop_thread());
}

TEST_CASE("a task posted after the end is destroyed unrun") {
  EventLoop loop;
  loop.post([&loop] { loop.stop(); });
  loop.run();
  const auto token = std::make_shared<int>(0);
  loop.post([token] { FAIL("ran"); });
  CHECK(token.use_count() == 1);
}

TEST_CASE("timers fire in the order of their times, cancelled ones never") {
  EventLoop loop;
  std::vector<int> order;
  const auto now = Clock::now();
  loop.at(now + 30ms, [&] {
    order.push_back(3);
    loop.stop();
  });
  loop.at(now + 10ms, [&] { order.push_back(1); });
  const auto cancelled = loop.at(now + 15ms, [&] { order.push_back(99); });
  loop.at(now + 20ms, [&] {
    order.push_back(2);
    CHECK(Clock::now() >= now + 20ms);
  });
  loop.at(now + 5ms, [&] { loop.cancel(cancelled); });
  loop.run();
  CHECK(order == std::vector<int>{1, 2, 3});
  loop.cancel(cancelled);  // unknown by now: nothing happens
}

TEST_CASE("no event reaches a handler that was removed in the same round") {
  EventLoop loop;
  Pipe first;
  Pipe second;
  int calls = 0;
  const auto remove_both = [&](std::uint32_t) {
    ++calls;
    loop.remove(first.read.get());
    loop.remove(second.read.get());
    loop.post([&loop] { loop.stop(); });
  };
  loop.add(first.read.get(), EPOLLIN, remove_both);
  loop.add(second.read.get(), EPOLLIN, remove_both);
  first.poke();
  second.poke();
  loop.run();
  CHECK(calls == 1);
}

TEST_CASE("a handler may remove itself and what it owns") {
  EventLoop loop;
  Pipe pipe;
  auto owned = std::make_shared<int>(7);
  std::weak_ptr<int> watched = owned;
  int seen = 0;
  loop.add(pipe.read.get(), EPOLLIN, [&, owned = std::move(owned)](std::uint32_t) {
    loop.remove(pipe.read.get());
    seen = *owned;  // still there
    loop.stop();
  });
  pipe.poke();
  loop.run();
  CHECK(seen == 7);
  CHECK(watched.expired());
}

TEST_CASE("events asked for can be changed") {
  EventLoop loop;
  Pipe pipe;
  int calls = 0;
  loop.add(pipe.read.get(), 0, [&](std::uint32_t) {
    ++calls;
    pipe.drain();
    loop.stop();
  });
  pipe.poke();
  loop.at(Clock::now() + 20ms, [&] {
    CHECK(calls == 0);
    loop.modify(pipe.read.get(), EPOLLIN);
  });
  loop.run();
  CHECK(calls == 1);
}

TEST_CASE("stop from another thread ends a loop that waits") {
  EventLoop loop;
  std::thread thread([&loop] { loop.run(); });
  std::this_thread::sleep_for(20ms);
  const auto began = Clock::now();
  loop.stop();
  thread.join();
  CHECK(Clock::now() - began < 2s);
}

namespace {

struct RunningLoop {
  EventLoop loop;
  std::thread thread{[this] { loop.run(); }};
  RunningLoop() { settle(); }
  // One whose loop has a descriptor that guests may watch.
  explicit RunningLoop(const Pipe& pipe) {
    loop.post([&] {
      loop.add(
          pipe.read.get(), EPOLLIN, [](std::uint32_t) {}, EventLoop::For::kGuestsToo);
    });
    settle();
  }
  ~RunningLoop() {
    loop.stop();
    thread.join();
  }
  // Until the loop's thread has done what was posted before.
  void settle() {
    std::atomic<bool> done{false};
    loop.post([&done] { done = true; });
    while (!done) std::this_thread::yield();
  }
};

}  // namespace

TEST_CASE("a guest does what was posted before, then its own work, and nothing when the loop does not run") {
  EventLoop idle;
  const auto at_once = [](EventLoop& loop, const EventLoop::Task& work) {
    return loop.try_join_in(
        work, [] { return true; }, Clock::now() + 10s);
  };
  CHECK_FALSE(at_once(idle, [] { FAIL("ran"); }));
  const Pipe pipe;
  std::vector<int> order;
  std::atomic<bool> hold{true};
  std::atomic<bool> held{false};
  RunningLoop running(pipe);
  running.loop.post([&] {
    held = true;
    while (hold) std::this_thread::yield();
  });
  while (!held) std::this_thread::yield();
  CHECK_FALSE(at_once(running.loop, [] { FAIL("ran beside the loop's thread"); }));
  for (int i = 0; i < 3; ++i) running.loop.post([&order, i] { order.push_back(i); });
  hold = false;
  while (!at_once(running.loop, [&] { order.push_back(3); })) std::this_thread::yield();
  CHECK(order == std::vector<int>{0, 1, 2, 3});
}

TEST_CASE("a guest handles events of shared descriptors, and the loop's thread does when no guest is there") {
  const Pipe pipe;
  std::vector<std::thread::id> who;
  std::atomic<int> seen{0};
  RunningLoop running;  // its thread ends before what its handlers refer to goes
  running.loop.post([&] {
    running.loop.add(
        pipe.read.get(), EPOLLIN,
        [&](std::uint32_t) {
          pipe.drain();
          who.push_back(std::this_thread::get_id());
          ++seen;
        },
        EventLoop::For::kGuestsToo);
  });
  running.settle();
  pipe.poke();
  while (seen < 1) std::this_thread::yield();
  std::thread poker([&] {
    std::this_thread::sleep_for(50ms);
    pipe.poke();
  });
  running.loop.join_in([&] { return seen == 2; }, Clock::now() + 10s);
  CHECK(seen == 2);
  poker.join();
  pipe.poke();
  while (seen < 3) std::this_thread::yield();
  CHECK(who[0] != std::this_thread::get_id());
  CHECK(who[1] == std::this_thread::get_id());
  CHECK(who[2] == who[0]);
}

TEST_CASE("a guest leaves at its time, when it is nudged, and when the loop ends") {
  const Pipe pipe;
  std::atomic<bool> done{false};
  const auto running = std::make_unique<RunningLoop>(pipe);
  const auto start = Clock::now();
  running->loop.join_in([] { return false; }, start + 50ms);
  CHECK(Clock::now() - start >= 50ms);
  CHECK(Clock::now() - start < 5s);

  std::thread other([&] {
    std::this_thread::sleep_for(50ms);
    running->loop.post([&] {
      done = true;
      running->loop.nudge_guest();
    });
  });
  running->loop.join_in([&] { return done.load(); }, Clock::now() + 60s);
  CHECK(done);
  CHECK(Clock::now() - start < 30s);
  other.join();

  std::thread ender([&] {
    std::this_thread::sleep_for(50ms);
    running->loop.stop();
  });
  running->loop.join_in([] { return false; }, Clock::now() + 60s);
  CHECK(Clock::now() - start < 30s);
  ender.join();
}

TEST_CASE("a timer set by a guest fires in time although the loop's thread sleeps") {
  const Pipe pipe;
  std::atomic<bool> fired{false};
  RunningLoop running(pipe);
  std::this_thread::sleep_for(50ms);  // its thread has no timer and sleeps
  const auto start = Clock::now();
  const auto set = [&] {
    running.loop.at(Clock::now() + 50ms, [&] {
      fired = true;
      running.loop.nudge_guest();
    });
  };
  while (!running.loop.try_join_in(
      set, [&] { return fired.load(); }, start + 30s))
    std::this_thread::yield();
  CHECK(fired);
  CHECK(Clock::now() - start < 10s);
}

TEST_CASE("a second guest goes away at once") {
  const Pipe pipe;
  std::atomic<bool> leave{false};
  std::atomic<bool> fired{false};
  RunningLoop running(pipe);
  std::thread first([&] { running.loop.join_in([&] { return leave.load(); }, Clock::now() + 60s); });
  std::this_thread::sleep_for(50ms);
  const auto start = Clock::now();
  running.loop.join_in([] { return false; }, start + 10s);
  CHECK(Clock::now() - start < 5s);
  running.loop.post([&] {
    running.loop.at(Clock::now() + 50ms, [&] {
      fired = true;
      leave = true;
      running.loop.nudge_guest();
    });
  });
  first.join();
  CHECK(fired);
  CHECK(Clock::now() - start < 20s);
}

TEST_CASE("guests, tasks and descriptors that come and go, all at once") {
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> handled{0};
  RunningLoop running;
  std::vector<std::thread> guests;
  for (int i = 0; i < 3; ++i) {
    guests.emplace_back([&] {
      while (!stop) {
        const auto before = handled.load();
        const auto over = [&] { return handled != before || stop; };
        if (!running.loop.try_join_in([] {}, over, Clock::now() + 5ms)) {
          running.loop.join_in(over, Clock::now() + 5ms);
        }
      }
    });
  }
  for (int round = 0; round < 300; ++round) {
    const auto pipe = std::make_shared<Pipe>();
    std::atomic<bool> gone{false};
    running.loop.post([&, pipe] {
      running.loop.add(
          pipe->read.get(), EPOLLIN,
          [&, pipe](std::uint32_t) {
            ++handled;
            running.loop.remove(pipe->read.get());  // its number is used again by the next one
            gone = true;
          },
          EventLoop::For::kGuestsToo);
    });
    pipe->poke();
    const auto until = Clock::now() + 20s;
    while (!gone && Clock::now() < until) std::this_thread::yield();
    REQUIRE(gone);
  }
  stop = true;
  for (auto& guest : guests) guest.join();
  CHECK(handled == 300);
}
