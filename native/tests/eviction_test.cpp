#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "slab/eviction.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <list>
#include <random>
#include <vector>

using namespace dfkv;
using Handle = EvictionPolicy::Handle;

namespace {

const auto take_any = [](Handle) { return Verdict::kTake; };

std::vector<Handle> evict_all(EvictionPolicy& policy) {
  std::vector<Handle> order;
  while (const auto chunk = policy.victim(1, take_any)) {
    order.push_back(*chunk);
    policy.remove(*chunk, Departure::kEvicted);
  }
  return order;
}

}  // namespace

TEST_CASE("the least recently used chunk goes first") {
  const auto policy = make_lru_policy();
  for (Handle chunk = 0; chunk < 5; ++chunk) policy->insert(chunk, {});
  const std::vector<Handle> batch{1};
  policy->touch(batch);
  CHECK(policy->consistent());
  CHECK(evict_all(*policy) == std::vector<Handle>{0, 2, 3, 4, 1});
  CHECK(policy->size() == 0);
}

TEST_CASE("of one batch the tail goes before the head") {
  const auto policy = make_lru_policy();
  for (Handle chunk = 0; chunk < 6; ++chunk) policy->insert(chunk, {});
  const std::vector<Handle> prefix{2, 3, 4};  // head to tail
  policy->touch(prefix);
  CHECK(evict_all(*policy) == std::vector<Handle>{0, 1, 5, 4, 3, 2});
}

TEST_CASE("chunks in use are passed over, and are not met again at once") {
  const auto policy = make_lru_policy();
  for (Handle chunk = 0; chunk < 4; ++chunk) policy->insert(chunk, {});
  std::vector<Handle> asked;
  const auto judge = [&asked](Handle chunk) {
    asked.push_back(chunk);
    return chunk < 2 ? Verdict::kInUse : Verdict::kTake;
  };
  CHECK(policy->victim(1, judge) == Handle{2});
  policy->remove(2, Departure::kEvicted);
  asked.clear();
  CHECK(policy->victim(1, judge) == Handle{3});
  CHECK(asked == std::vector<Handle>{3});
  policy->remove(3, Departure::kEvicted);
  CHECK_FALSE(policy->victim(10, judge));  // ends though everything is in use
  CHECK(policy->consistent());
}

TEST_CASE("the search is bounded and keeps the places of what it skips") {
  const auto policy = make_lru_policy();
  for (Handle chunk = 0; chunk < 10; ++chunk) policy->insert(chunk, {});
  const auto only_seven = [](Handle chunk) { return chunk == 7 ? Verdict::kTake : Verdict::kSkip; };
  CHECK_FALSE(policy->victim(7, only_seven));
  CHECK(policy->victim(8, only_seven) == Handle{7});
  CHECK_FALSE(policy->victim(10, [](Handle chunk) { return chunk == 3 ? Verdict::kStop : Verdict::kSkip; }));
  CHECK(evict_all(*policy) == std::vector<Handle>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
}

TEST_CASE("random use agrees with a plain list") {
  const std::uint64_t seed = std::random_device{}();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  const auto policy = make_lru_policy();
  std::list<Handle> model;  // coldest first
  std::vector<Handle> spare(64);
  for (Handle i = 0; i < spare.size(); ++i) spare[i] = i;
  for (int step = 0; step < 20000; ++step) {
    const auto some = [&] {
      return *std::next(model.begin(), static_cast<std::ptrdiff_t>(random() % model.size()));
    };
    switch (random() % 4) {
      case 0:
        if (spare.empty()) break;
        policy->insert(spare.back(), {});
        model.push_back(spare.back());
        spare.pop_back();
        break;
      case 1: {
        if (model.empty()) break;
        const std::vector<Handle> batch{some(), some()};
        policy->touch(batch);
        for (const Handle chunk : {batch[1], batch[0]}) {
          model.remove(chunk);
          model.push_back(chunk);
        }
        break;
      }
      case 2: {
        const auto chunk = policy->victim(1, take_any);
        REQUIRE(chunk.has_value() == !model.empty());
        if (!chunk) break;
        REQUIRE(*chunk == model.front());
        policy->remove(*chunk, Departure::kEvicted);
        model.pop_front();
        spare.push_back(*chunk);
        break;
      }
      default: {
        if (model.empty()) break;
        const Handle chunk = some();
        policy->remove(chunk, Departure::kRemoved);
        model.remove(chunk);
        spare.push_back(chunk);
      }
    }
    REQUIRE(policy->size() == model.size());
  }
  CHECK(policy->consistent());
}
