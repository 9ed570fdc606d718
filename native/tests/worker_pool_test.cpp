#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "slab/worker_pool.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <memory>

using namespace dfkv;

TEST_CASE("one worker runs tasks in the order given, and all of them before it ends") {
  std::vector<int> order;
  {
    WorkerPool pool("test", 1);
    for (int i = 0; i < 1000; ++i) pool.post([&order, i] { order.push_back(i); });
  }
  REQUIRE(order.size() == 1000);
  for (int i = 0; i < 1000; ++i) CHECK(order[static_cast<std::size_t>(i)] == i);
}

TEST_CASE("what a task holds goes with it, on whichever thread") {
  const auto held = std::make_shared<int>(1);
  {
    WorkerPool pool("test", 3);
    for (int i = 0; i < 100; ++i) pool.post([held] { CHECK(*held == 1); });
  }
  CHECK(held.use_count() == 1);
}

// Workers that fall asleep while others are woken: the next task must not lie there until one more comes.
TEST_CASE("no task waits for the next") {
  WorkerPool pool("test", 4);
  std::atomic<int> left{0};
  std::uint64_t random = 88172645463325252U;
  int late = 0;
  for (int burst = 0; burst < 60'000 && late == 0; ++burst) {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    const int tasks = 1 + static_cast<int>(random % 9);
    left += tasks;
    for (int i = 0; i < tasks; ++i) pool.post([&left] { --left; });
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (left != 0 && late == 0) {
      std::this_thread::yield();
      if (std::chrono::steady_clock::now() > deadline) ++late;
    }
  }
  CHECK(late == 0);
}
