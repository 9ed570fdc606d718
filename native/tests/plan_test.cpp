// The simulator, against answers that are worked out by hand or by slower means.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "plan/cluster.h"
#include "plan/node_model.h"
#include "plan/replay.h"
#include "slab/eviction.h"

using namespace dfkv;
using namespace dfkv::plan;
using Requests = std::vector<std::vector<std::uint64_t>>;
using Hits = std::vector<std::uint32_t>;

namespace {

Trace trace_of(const Requests& requests) {
  std::vector<std::uint32_t> counts;
  std::vector<std::uint64_t> ids;
  for (const auto& request : requests) {
    counts.push_back(static_cast<std::uint32_t>(request.size()));
    ids.insert(ids.end(), request.begin(), request.end());
  }
  Trace trace;
  trace.append(counts, ids);
  return trace;
}

// Prefixes of a random tree: ids stand for whole prefixes.
Requests random_requests(std::mt19937_64& random, std::size_t count, std::uint64_t width, std::size_t depth) {
  Requests requests;
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<std::uint64_t> request;
    std::uint64_t id = 0;
    const std::size_t length = 1 + random() % depth;
    for (std::size_t at = 0; at < length; ++at) {
      id = id * (width + 1) + 1 + random() % width;
      request.push_back(id);
    }
    requests.push_back(std::move(request));
  }
  return requests;
}

ClusterOptions cluster_of(std::uint32_t nodes, std::string_view policy, std::uint32_t run_blocks = 1) {
  ClusterOptions options;
  options.nodes = nodes;
  options.policy = policy;
  options.run_blocks = run_blocks;
  return options;
}

std::uint64_t total(const Hits& hits) { return std::accumulate(hits.begin(), hits.end(), std::uint64_t{0}); }

// The most hits that any choice of what to keep can have, by trying all of them. Keeps whole prefixes only:
// nothing else can be a hit.
std::uint64_t most_hits(const Trace& trace, std::size_t request, std::uint64_t held, std::uint64_t capacity) {
  if (request == trace.requests()) return 0;
  const auto blocks = trace.request(request);
  std::uint64_t hits = 0;
  while (hits < blocks.size() && (held >> blocks[hits] & 1) != 0) ++hits;
  std::uint64_t now = held;
  for (const Block block : blocks) now |= std::uint64_t{1} << block;
  std::uint64_t best = 0;
  for (std::uint64_t kept = now;; kept = (kept - 1) & now) {
    if (static_cast<std::uint64_t>(std::popcount(kept)) ==
        std::min<std::uint64_t>(capacity, std::popcount(now))) {
      best = std::max(best, most_hits(trace, request + 1, kept, capacity));
    }
    if (kept == 0) break;
  }
  return hits + best;
}

}  // namespace

TEST_CASE("a trace is numbered, and ids that are no prefixes are noticed") {
  const Trace trace = trace_of({{7, 8, 9}, {}, {7, 8, 10}});
  CHECK(trace.requests() == 3);
  CHECK(trace.blocks() == 6);
  CHECK(trace.unique_blocks() == 4);
  CHECK(trace.conflicts() == 0);
  CHECK(trace.request(1).empty());
  CHECK(trace.id(trace.request(2)[2]) == 10);
  CHECK(trace.parent(trace.request(2)[2]) == trace.request(0)[1]);
  CHECK(trace_of({{1, 2}, {2}}).conflicts() == 1);
  Trace wrong;
  const std::vector<std::uint32_t> counts{2};
  const std::vector<std::uint64_t> ids{1};
  CHECK_THROWS_AS(wrong.append(counts, ids), std::invalid_argument);
}

TEST_CASE("hits end at the first miss") {
  // Three places. The second request evicts 1 (coldest, touched first), so the third misses at its head
  // though 2 and 3 are held.
  const Trace trace = trace_of({{1, 2, 3}, {4}, {1, 2, 3}});
  CHECK(replay(trace, "lru-ref", 3).hits == Hits{0, 0, 0});
  // Touched from the tail on, 3 is the one that goes.
  CHECK(replay(trace, "lru-tail", 3).hits == Hits{0, 0, 2});
  CHECK(replay(trace, "lru", 3).hits == Hits{0, 0, 2});
  CHECK(replay(trace, "belady", 3).hits == Hits{0, 0, 3});
  CHECK(replay(trace, "unbounded", 1).hits == Hits{0, 0, 3});
}

TEST_CASE("what is held behind a miss is no hit, for anybody") {
  const Trace trace = trace_of({{1}, {2, 1}});
  for (const auto name : replay_names()) {
    CAPTURE(name);
    CHECK(replay(trace, name, 3).hits == Hits{0, 0});
  }
}

TEST_CASE("lru-ref looks a block up after those before it have been inserted") {
  // One place: each block throws out the one before it.
  const Trace trace = trace_of({{1, 2}, {2, 1}, {1}});
  CHECK(replay(trace, "lru-ref", 1).hits == Hits{0, 1, 1});
  const auto result = replay(trace, "lru-ref", 1);
  CHECK(result.written_blocks == 3);
  CHECK(result.evicted_blocks == 2);
}

TEST_CASE("no policy beats the bound, all agree where there is room, and the counts add up") {
  const std::uint64_t seed = std::random_device{}();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 20; ++round) {
    const Trace trace = trace_of(random_requests(random, 200, 2 + random() % 4, 8));
    const Hits most = replay_unbounded(trace).hits;
    const std::uint64_t unique = trace.unique_blocks();
    for (const std::uint64_t capacity : {std::uint64_t{1}, unique / 20 + 1, unique / 4 + 1, unique}) {
      const std::uint64_t bound = replay(trace, "belady", capacity).hit_blocks;
      for (const auto name : replay_names()) {
        CAPTURE(name);
        CAPTURE(capacity);
        const auto result = replay(trace, name, capacity);
        REQUIRE(result.hits.size() == trace.requests());
        CHECK(result.hit_blocks == total(result.hits));
        CHECK(std::ranges::equal(result.hits, most, std::less_equal<>()));
        if (name == "unbounded") continue;
        CHECK(result.hit_blocks <= bound);
        CHECK(result.written_blocks - result.evicted_blocks <= capacity);
        CHECK(result.written_blocks >= unique);
        if (capacity == unique) {
          CHECK(result.hits == most);
          CHECK(result.evicted_blocks == 0);
        }
      }
    }
  }
}

TEST_CASE("the bound is what trying everything finds") {
  std::mt19937_64 random(11);
  for (int round = 0; round < 30; ++round) {
    const Trace trace = trace_of(random_requests(random, 5, 2, 3));
    if (trace.unique_blocks() > 9) continue;
    for (const std::uint64_t capacity : {1U, 2U, 3U}) {
      CAPTURE(round);
      CAPTURE(capacity);
      CHECK(replay(trace, "belady", capacity).hit_blocks == most_hits(trace, 0, 0, capacity));
    }
  }
}

TEST_CASE("what cannot be replayed is refused") {
  const Trace trace = trace_of({{1}});
  CHECK_THROWS_WITH_AS((void)replay(trace, "mru", 1), "there is no eviction policy \"mru\"",
                       std::invalid_argument);
  CHECK_THROWS_AS((void)replay(trace, "lru", 0), std::invalid_argument);
  CHECK_THROWS_AS((void)replay(trace, "belady", 0), std::invalid_argument);
  ClusterOptions options;
  options.policy = "lru";
  options.lost_node = 8;
  CHECK_THROWS_AS((void)replay_cluster(trace, options), std::invalid_argument);
  options.lost_node.reset();
  options.nodes = 0;
  CHECK_THROWS_AS((void)replay_cluster(trace, options), std::invalid_argument);
  options.nodes = 8;
  options.capacity_blocks = 7;
  CHECK_THROWS_AS((void)replay_cluster(trace, options), std::invalid_argument);
}

TEST_CASE("one node is a cluster of one") {
  std::mt19937_64 random(3);
  const Trace trace = trace_of(random_requests(random, 500, 3, 8));
  for (const auto name : eviction_policy_names()) {
    CAPTURE(name);
    const auto alone = replay(trace, name, 50);
    ClusterOptions options = cluster_of(1, name);
    options.capacity_blocks = 50;
    const auto cluster = replay_cluster(trace, options);
    CHECK(cluster.hits == alone.hits);
    CHECK(cluster.touched == trace.requests());
    CHECK(cluster.nodes.at(0).written_blocks == alone.written_blocks);
    CHECK(cluster.nodes.at(0).read_blocks == alone.hit_blocks);
  }
}

TEST_CASE("with room for everything the placement changes no hit, and runs stay together") {
  std::mt19937_64 random(5);
  const Trace trace = trace_of(random_requests(random, 300, 4, 16));
  const Hits most = replay_unbounded(trace).hits;
  std::uint64_t touched_before = ~std::uint64_t{0};
  for (const std::uint32_t run : {1U, 4U, 16U}) {
    ClusterOptions options = cluster_of(4, "adaptive-lru", run);
    const auto result = replay_cluster(trace, options);
    CHECK(result.hits == most);
    std::uint64_t held = 0;
    for (const auto& node : result.nodes) held += node.held_blocks;
    CHECK(held == trace.unique_blocks());
    CHECK(result.touched < touched_before);
    touched_before = result.touched;
    if (run == 16) CHECK(result.touched == trace.requests());  // no prompt is longer
    options.spread_blocks = 16;
    CHECK(replay_cluster(trace, options).touched ==
          replay_cluster(trace, cluster_of(4, "adaptive-lru")).touched);
  }
}

TEST_CASE("a lost node costs what it held, once") {
  // The same long prefix again and again.
  std::vector<std::uint64_t> prefix(64);
  std::iota(prefix.begin(), prefix.end(), std::uint64_t{1});
  const Trace trace = trace_of(Requests(10, prefix));
  ClusterOptions options = cluster_of(4, "lru");
  options.lost_node = 2;
  options.lost_at = 5;
  const auto result = replay_cluster(trace, options);
  for (std::size_t i = 0; i < 10; ++i) {
    CAPTURE(i);
    if (i == 0) {
      CHECK(result.hits[i] == 0);
    } else if (i == 5) {
      CHECK(result.hits[i] < 64);  // up to the first hole
    } else {
      CHECK(result.hits[i] == 64);
    }
  }
  CHECK(result.nodes[2].held_blocks > 0);
  std::uint64_t held = 0;
  for (const std::size_t node : {0U, 1U, 3U}) held += result.nodes[node].held_blocks;
  CHECK(held == 64);
  // Second copies of what has been read fill holes, whichever node goes.
  std::uint64_t hits_without = 0;
  std::uint64_t hits_with = 0;
  for (std::uint32_t node = 0; node < 4; ++node) {
    options.lost_node = node;
    options.copy_after_reads = 0;
    hits_without += replay_cluster(trace, options).hits[5];
    options.copy_after_reads = 1;
    options.copy_share = 0.9;
    const auto copied = replay_cluster(trace, options);
    hits_with += copied.hits[5];
    CHECK(copied.hits[6] == 64);
    for (std::uint32_t other = 0; other < 4; ++other)
      CHECK(copied.nodes[other].copy_blocks <= 14);  // 0.9 of 64 / 4
  }
  CHECK(hits_with > hits_without + 64);
}
