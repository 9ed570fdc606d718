#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "net/event_loop.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/epoll.h>

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
