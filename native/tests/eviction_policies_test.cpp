// What every policy owes its owner, and what each of them is for.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "slab/eviction.h"
#include "slab/eviction_ghosts.h"

using namespace dfkv;
using Handle = EvictionPolicy::Handle;

namespace {

const auto take_any = [](Handle) { return Verdict::kTake; };

ChunkTraits chunk_named(std::uint64_t name) { return {name * 0x9E3779B97F4A7C15U + 1, 1, 0}; }

// A store of so many chunks, which are named by numbers.
class Store {
 public:
  Store(std::string_view policy, std::size_t capacity)
      : policy_(make_eviction_policy(policy)), capacity_(capacity) {}

  [[nodiscard]] bool holds(std::uint64_t name) const { return handles_.contains(name); }
  [[nodiscard]] EvictionPolicy& policy() { return *policy_; }

  void write(std::uint64_t name) {
    if (handles_.size() == capacity_) evict();
    Handle handle = 0;
    while (names_.contains(handle)) ++handle;
    handles_[name] = handle;
    names_[handle] = name;
    policy_->insert(handle, chunk_named(name));
    policy_->stored(std::vector<Handle>{handle});
  }
  void read(const std::vector<std::uint64_t>& names) {
    std::vector<Handle> batch;
    for (const auto name : names) batch.push_back(handles_.at(name));
    policy_->touch(batch);
  }
  // Reads what is there, writes what is not. True: it was there.
  bool ask(std::uint64_t name) {
    const bool hit = holds(name);
    if (hit) {
      read({name});
    } else {
      write(name);
    }
    return hit;
  }
  void evict() {
    const auto victim = policy_->victim(1, take_any);
    REQUIRE(victim.has_value());
    remove(names_.at(*victim), Departure::kEvicted);
  }
  void remove(std::uint64_t name, Departure departure) {
    policy_->remove(handles_.at(name), departure);
    names_.erase(handles_.at(name));
    handles_.erase(name);
  }

 private:
  std::unique_ptr<EvictionPolicy> policy_;
  std::size_t capacity_;
  std::map<std::uint64_t, Handle> handles_;
  std::map<Handle, std::uint64_t> names_;
};

double hit_ratio(Store& store, const std::vector<std::uint64_t>& asked) {
  const auto hits = std::ranges::count_if(asked, [&store](std::uint64_t name) { return store.ask(name); });
  return static_cast<double>(hits) / static_cast<double>(asked.size());
}

// A few chunks that are wanted every now and then, between many that nobody wants again.
std::vector<std::uint64_t> wanted_among_scans(std::size_t wanted, std::size_t scanned, int rounds) {
  std::vector<std::uint64_t> asked;
  std::uint64_t fresh = 1'000'000;
  for (int round = 0; round < rounds; ++round) {
    for (std::uint64_t name = 0; name < wanted; ++name) asked.push_back(name);
    for (std::size_t i = 0; i < scanned; ++i) asked.push_back(fresh++);
  }
  return asked;
}

}  // namespace

TEST_CASE("policies are found by name, and the default is one of them") {
  for (const auto name : eviction_policy_names()) {
    CAPTURE(name);
    CHECK(make_eviction_policy(name) != nullptr);
  }
  CHECK(make_eviction_policy(kDefaultEvictionPolicy) != nullptr);
  CHECK(make_eviction_policy("mru") == nullptr);
}

TEST_CASE("a search offers every chunk, each of them once, and ends") {
  for (const auto name : eviction_policy_names()) {
    CAPTURE(name);
    const auto policy = make_eviction_policy(name);
    constexpr Handle kChunks = 300;
    for (Handle chunk = 0; chunk < kChunks; ++chunk) policy->insert(chunk, chunk_named(chunk));
    std::vector<Handle> batch(kChunks / 2);
    for (Handle i = 0; i < batch.size(); ++i) batch[i] = 2 * i;
    policy->touch(batch);
    for (const auto refusal : {Verdict::kSkip, Verdict::kInUse}) {
      std::multiset<Handle> offered;
      const auto refuse = [&](Handle chunk) {
        offered.insert(chunk);
        return refusal;
      };
      CHECK_FALSE(policy->victim(kChunks, refuse));
      const std::set<Handle> different(offered.begin(), offered.end());
      CHECK(different.size() == kChunks);
      if (refusal == Verdict::kSkip) CHECK(offered.size() == kChunks);
      CHECK(policy->consistent());
    }
    std::size_t asked = 0;
    CHECK_FALSE(policy->victim(7, [&asked](Handle) {
      ++asked;
      return Verdict::kSkip;
    }));
    CHECK(asked == 7);
    asked = 0;
    CHECK_FALSE(policy->victim(kChunks, [&asked](Handle) {
      ++asked;
      return Verdict::kStop;
    }));
    CHECK(asked == 1);
  }
}

TEST_CASE("only the one that may go is taken, wherever it is") {
  for (const auto name : eviction_policy_names()) {
    CAPTURE(name);
    const auto policy = make_eviction_policy(name);
    for (Handle chunk = 0; chunk < 200; ++chunk) policy->insert(chunk, chunk_named(chunk));
    policy->touch(std::vector<Handle>{17, 18, 19});
    for (const Handle only : {Handle{0}, Handle{18}, Handle{101}, Handle{199}}) {
      CAPTURE(only);
      const auto judge = [only](Handle chunk) { return chunk == only ? Verdict::kTake : Verdict::kSkip; };
      CHECK(policy->victim(200, judge) == only);
      policy->remove(only, Departure::kEvicted);
    }
    CHECK(policy->size() == 196);
    CHECK(policy->consistent());
  }
}

TEST_CASE("random use keeps every policy consistent") {
  const std::uint64_t seed = std::random_device{}();
  MESSAGE("seed " << seed);
  for (const auto name : eviction_policy_names()) {
    CAPTURE(name);
    std::mt19937_64 random(seed);
    const auto policy = make_eviction_policy(name);
    std::vector<Handle> held;
    std::vector<Handle> spare(96);
    for (Handle i = 0; i < spare.size(); ++i) spare[i] = i;
    const auto drop = [&](std::size_t at, Departure departure) {
      policy->remove(held[at], departure);
      spare.push_back(held[at]);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(at));
    };
    for (int step = 0; step < 20000; ++step) {
      switch (random() % 5) {
        case 0:
        case 1: {
          if (spare.empty()) break;
          std::swap(spare[random() % spare.size()], spare.back());
          // Few names: chunks come back while they are remembered, and two may look alike.
          policy->insert(spare.back(), chunk_named(random() % 200));
          policy->update(spare.back(), chunk_named(random() % 200));
          held.push_back(spare.back());
          spare.pop_back();
          break;
        }
        case 2: {
          if (held.empty()) break;
          std::vector<Handle> batch;
          for (std::size_t i = 0; i < 1 + random() % 8; ++i) batch.push_back(held[random() % held.size()]);
          if (random() % 2 == 0) {
            policy->touch(batch);
          } else {
            policy->stored(batch);
          }
          break;
        }
        case 3: {
          const auto judge = [&](Handle) {
            const auto draw = random() % 8;
            return draw == 0 ? Verdict::kInUse : draw == 1 ? Verdict::kSkip : Verdict::kTake;
          };
          const auto victim = policy->victim(1 + random() % 16, judge);
          if (!victim) break;
          const auto at = std::ranges::find(held, *victim);
          REQUIRE(at != held.end());
          drop(static_cast<std::size_t>(at - held.begin()), Departure::kEvicted);
          break;
        }
        default:
          if (!held.empty() && random() % 4 == 0) drop(random() % held.size(), Departure::kRemoved);
      }
      REQUIRE(policy->size() == held.size());
      if (step % 64 == 0) REQUIRE(policy->consistent());
    }
    while (!held.empty()) drop(held.size() - 1, Departure::kRemoved);
    CHECK(policy->consistent());
    CHECK_FALSE(policy->victim(10, take_any));
  }
}

TEST_CASE("adaptive-lru without a reason to do otherwise is LRU") {
  // Nothing is read twice, and what was evicted does not come back: there is nothing to learn.
  Store lru("lru", 50);
  Store adaptive("adaptive-lru", 50);
  std::mt19937_64 random(7);
  for (std::uint64_t name = 0; name < 2000; ++name) {
    for (Store* store : {&lru, &adaptive}) store->write(name);
    REQUIRE(lru.holds(name / 2) == adaptive.holds(name / 2));
    for (std::uint64_t old = name > 60 ? name - 60 : 0; old <= name; ++old)
      REQUIRE(lru.holds(old) == adaptive.holds(old));
  }
}

TEST_CASE("of one batch the tail goes before the head") {
  for (const auto name : {"lru", "adaptive-lru", "w-tinylfu"}) {
    CAPTURE(name);
    const auto policy = make_eviction_policy(name);
    std::vector<Handle> prefix;
    for (Handle chunk = 0; chunk < 10; ++chunk) {
      policy->insert(chunk, chunk_named(chunk));
      prefix.push_back(chunk);
    }
    policy->touch(prefix);
    std::vector<Handle> order;
    while (const auto victim = policy->victim(1, take_any)) {
      order.push_back(*victim);
      policy->remove(*victim, Departure::kEvicted);
    }
    // W-TinyLFU keeps the last one written in its window.
    if (order.back() == 9) order.pop_back();
    CHECK(std::ranges::is_sorted(order, std::greater<>()));
  }
}

TEST_CASE("adaptive-lru learns to keep what is wanted again from scans that LRU lets sweep it out") {
  const auto asked = wanted_among_scans(40, 100, 200);
  Store lru("lru", 100);
  Store adaptive("adaptive-lru", 100);
  CHECK(hit_ratio(lru, asked) == 0);
  // 40 of 140 can be hits.
  CHECK(hit_ratio(adaptive, asked) > 0.8 * 40 / 140);
  CHECK(adaptive.policy().consistent());
}

TEST_CASE("adaptive-lru unlearns when the traffic changes") {
  Store adaptive("adaptive-lru", 100);
  (void)hit_ratio(adaptive, wanted_among_scans(40, 100, 200));
  // Now each chunk is wanted twice, the second time after 80 others: LRU hits each of them, a long lead none.
  std::vector<std::uint64_t> asked;
  for (std::uint64_t round = 0; round < 100; ++round) {
    for (int again = 0; again < 2; ++again) {
      for (std::uint64_t i = 0; i < 80; ++i) asked.push_back(5'000'000 + round * 80 + i);
    }
  }
  CHECK(hit_ratio(adaptive, asked) > 0.35);  // of 0.5
}

TEST_CASE("what was stored and never read is no proof of reuse, how often it may be stored") {
  Store adaptive("adaptive-lru", 100);
  const auto wanted = wanted_among_scans(40, 100, 200);
  (void)hit_ratio(adaptive, wanted);
  std::vector<Handle> unread;
  for (std::uint64_t name = 9'000'000; name < 9'000'030; ++name) adaptive.write(name);
  for (int i = 0; i < 60; ++i) adaptive.evict();
  std::size_t kept = 0;
  for (std::uint64_t name = 0; name < 40; ++name) kept += adaptive.holds(name) ? 1 : 0;
  CHECK(kept == 40);
}

TEST_CASE("each of the others keeps a small working set through a scan") {
  for (const auto name : {"s3-fifo", "sieve", "w-tinylfu"}) {
    CAPTURE(name);
    Store store(name, 100);
    for (int round = 0; round < 5; ++round) {
      for (std::uint64_t chunk = 0; chunk < 30; ++chunk) store.ask(chunk);
    }
    for (std::uint64_t scan = 1000; scan < 1120; ++scan) store.ask(scan);
    std::size_t kept = 0;
    for (std::uint64_t chunk = 0; chunk < 30; ++chunk) kept += store.holds(chunk) ? 1 : 0;
    CHECK(kept == 30);
  }
}

TEST_CASE("ghosts are remembered once, in their order, and forgotten by name or by age") {
  GhostQueue ghosts;
  for (std::uint64_t name = 1; name <= 5; ++name) ghosts.push({name, name * 10, 0});
  ghosts.push({2, 99, 1});  // again: now the newest
  CHECK(ghosts.size() == 5);
  CHECK(ghosts.take(3)->evicted_at == 30);
  CHECK_FALSE(ghosts.take(3));
  CHECK(ghosts.consistent());
  CHECK(ghosts.recount(2) == std::vector<std::size_t>{3, 1});
  std::vector<std::uint64_t> order;
  while (ghosts.size() > 0) order.push_back(ghosts.take_oldest().fingerprint);
  CHECK(order == std::vector<std::uint64_t>{1, 4, 5, 2});
  CHECK(ghosts.consistent());
}
