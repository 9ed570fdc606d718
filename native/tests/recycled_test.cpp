#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "slab/recycled.h"

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "counted_new.h"
#include "slab/callback.h"

using namespace dfkv;
using namespace dfkv::test;

#ifdef DFKV_NOT_COUNTED
constexpr bool kCounted = false;
#else
constexpr bool kCounted = true;
#endif

namespace {

struct Base {
  virtual ~Base() = default;
};
struct Small final : Base, Recycled<Small> {
  explicit Small(int number) : number(number) {}
  int number;
};

}  // namespace

TEST_CASE("what was given back serves the next of its size") {
  for (const std::size_t bytes : {1, 16, 64, 65, 80, 81, 100, 128, 129, 1000, 4096, 4097, 65535, 65536}) {
    CAPTURE(bytes);
    void* const first = RecycledMemory::take(bytes);
    void* const second = RecycledMemory::take(bytes);
    CHECK(first != second);
    std::memset(first, 1, bytes);  // all of it is there
    std::memset(second, 2, bytes);
    RecycledMemory::give_back(first, bytes);
    CHECK(RecycledMemory::take(bytes) == first);
    RecycledMemory::give_back(first, bytes);
    RecycledMemory::give_back(second, bytes);
  }
}

TEST_CASE("what is large is allocated, and freed") {
  const std::size_t bytes = RecycledMemory::kMaxBytes + 1;
  const std::uint64_t before = allocations();
  for (int i = 0; i < 3; ++i) RecycledMemory::give_back(RecycledMemory::take(bytes), bytes);
  if (kCounted) CHECK(allocations() - before == 3);
}

TEST_CASE("objects, shared ones and containers allocate nothing the second time") {
  const auto use = [] {
    const std::unique_ptr<Base> owned = std::make_unique<Small>(1);
    const std::shared_ptr<std::array<int, 20>> made = recycled_shared<std::array<int, 20>>();
    const std::shared_ptr<Base> shared = recycled_shared(std::unique_ptr<Base>(std::make_unique<Small>(2)));
    RecycledVector<int> numbers;
    for (int i = 0; i < 1000; ++i) numbers.push_back(i);
    RecycledSet<int> ordered(numbers.begin(), numbers.end());
    CHECK(ordered.size() == 1000);
    CHECK(made.use_count() + shared.use_count() == 2);
  };
  use();
  const std::uint64_t before = allocations();
  use();
  CHECK(allocations() == before);
}

TEST_CASE("a callback is moved, called and destroyed once, and allocates nothing the second time") {
  const auto token = std::make_shared<int>(7);
  const auto use = [&token] {
    std::array<std::uint64_t, 20> more{};
    more[19] = 5;
    Callback<std::uint64_t(std::unique_ptr<int>)> first =
        [token, more, owned = std::make_unique<Small>(1)](std::unique_ptr<int> given) {
          return more[19] + static_cast<std::uint64_t>(*token + owned->number) + (given ? 100 : 0);
        };
    Callback<std::uint64_t(std::unique_ptr<int>)> second = std::move(first);
    CHECK(!first);
    CHECK(static_cast<bool>(second));
    CHECK(token.use_count() == 2);
    CHECK(second(nullptr) == 13);
    // One in another, as callbacks are handed on.
    Callback<void()> outer = [inner = std::move(second)] { CHECK(inner(nullptr) == 13); };
    outer();
    outer = nullptr;
    CHECK(token.use_count() == 1);
  };
  use();
  const std::uint64_t before = allocations();
  use();
  CHECK(allocations() == before);
  Callback<std::uint64_t(std::unique_ptr<int>)> none;
  CHECK(!none);
}

TEST_CASE("threads give back what others took") {
  struct Shelf {
    std::mutex mutex;
    std::array<std::shared_ptr<std::string>, 64> items;
  } shelf;
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&shelf, &wrong, thread] {
        for (std::size_t i = 0; i < 20'000; ++i) {
          const std::size_t at = (i * 7 + static_cast<std::size_t>(thread) * 13) % 64;
          auto item = recycled_shared<std::string>(at % 2 == 0 ? "even" : "odd");
          {
            const std::lock_guard lock(shelf.mutex);
            item.swap(shelf.items[at]);
          }
          if (item && *item != (at % 2 == 0 ? "even" : "odd")) ++wrong;
        }
      });
    }
  }
  CHECK(wrong == 0);
}
