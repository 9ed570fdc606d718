// The ring: shares follow weights, changes move little, and the slots are those of the documented arithmetic.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "net/ring.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "golden.h"

using namespace dfkv;
using dfkv::client::Ring;

namespace {

struct Nodes {
  std::vector<std::string> ids;
  std::vector<std::uint32_t> weights;

  [[nodiscard]] Ring ring(const Ring& before = {}) const {
    std::vector<Ring::Member> members;
    for (std::size_t i = 0; i < ids.size(); ++i) members.push_back({ids[i], weights[i]});
    return Ring(members, before);
  }
};

// The inverse of an odd number modulo 2^64.
constexpr std::uint64_t inverse(std::uint64_t odd) {
  std::uint64_t x = odd;
  for (int step = 0; step < 6; ++step) x *= 2 - odd * x;
  return x;
}

// A route for a slot: mix() is a bijection.
Route route_to(std::uint32_t slot) {
  std::uint64_t x = std::uint64_t{slot} << (64 - Ring::kSlotBits);
  x ^= x >> 31 ^ x >> 62;
  x *= inverse(0x94D049BB133111EBULL);
  x ^= x >> 27 ^ x >> 54;
  x *= inverse(0xBF58476D1CE4E5B9ULL);
  return x ^ x >> 30 ^ x >> 60;
}

const std::vector<Route>& routes() {
  static const auto all = [] {
    std::vector<Route> made(Ring::kSlots);
    for (std::uint32_t slot = 0; slot < Ring::kSlots; ++slot) made[slot] = route_to(slot);
    return made;
  }();
  return all;
}

// Routes whose owner differs, by name.
std::uint32_t moved(const Nodes& before, const Ring& old_ring, const Nodes& after, const Ring& new_ring) {
  std::uint32_t count = 0;
  for (const auto route : routes()) {
    if (before.ids[old_ring.owner(route)] != after.ids[new_ring.owner(route)]) ++count;
  }
  return count;
}

bool same_slots(const Ring& a, const Ring& b) {
  return std::ranges::all_of(routes(), [&](Route route) { return a.owner(route) == b.owner(route); });
}

Nodes cluster(std::size_t nodes, const std::vector<std::uint32_t>& weights) {
  Nodes made;
  for (std::size_t i = 0; i < nodes; ++i) {
    made.ids.push_back("cache-" + std::to_string(i) + ".rack-" + std::to_string(i % 7));
    made.weights.push_back(weights[i % weights.size()]);
  }
  return made;
}

double total(const Nodes& nodes) { return std::accumulate(nodes.weights.begin(), nodes.weights.end(), 0.0); }

}  // namespace

TEST_CASE("routes of slots") {
  for (const std::uint32_t slot : {0U, 1U, 77777U, Ring::kSlots - 1})
    CHECK(Ring::slot_of(route_to(slot)) == slot);
}

TEST_CASE("golden owners") {
  for (const auto& row : golden::rows("ring.txt")) {
    CAPTURE(row[0]);
    Nodes nodes;
    for (const auto& node : golden::split(row[1], ',')) {
      const auto colon = node.find(':');
      nodes.ids.push_back(node.substr(0, colon));
      nodes.weights.push_back(static_cast<std::uint32_t>(golden::number(node.substr(colon + 1))));
    }
    const auto ring = nodes.ring();
    const auto owners = golden::split(row[2], ',');
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < owners.size(); ++i) {
      if (ring.owner(i * 0x9E3779B97F4A7C15ULL) != golden::number(owners[i])) ++wrong;
    }
    CHECK(owners.size() == 256);
    CHECK(wrong == 0);
  }
}

TEST_CASE("the load of every node is within 5 % of its weight, from 8 to 64 nodes") {
  for (const std::size_t nodes : {8, 24, 64}) {
    for (const auto& weights : std::vector<std::vector<std::uint32_t>>{{100}, {100, 150, 75, 200}}) {
      const auto made = cluster(nodes, weights);
      const auto count = made.ring().counts();
      double worst = 0;
      for (std::size_t i = 0; i < nodes; ++i) {
        const double expected = made.weights[i] / total(made) * Ring::kSlots;
        worst = std::max(worst, std::abs(count[i] / expected - 1));
      }
      CAPTURE(nodes);
      CAPTURE(weights.size());
      CHECK(worst < 0.05);
    }
  }
}

TEST_CASE("a change moves what it must, and at most a fifth more") {
  for (const std::size_t nodes : {8, 64}) {
    const auto before = cluster(nodes, {100, 200, 150});
    const auto old_ring = before.ring();
    // One leaves, one joins, one grows, one shrinks.
    auto left = before;
    left.ids.erase(left.ids.begin() + 4);
    left.weights.erase(left.weights.begin() + 4);
    auto joined = before;
    joined.ids.emplace_back("late");
    joined.weights.push_back(120);
    auto grown = before;
    grown.weights[5] += 100;
    auto shrunk = before;
    shrunk.weights[5] -= 100;
    CAPTURE(nodes);
    for (const auto& after : {left, joined, grown, shrunk}) {
      double share = 0;
      for (std::size_t i = 0; i < before.ids.size(); ++i) {
        const auto at = std::ranges::find(after.ids, before.ids[i]) - after.ids.begin();
        const double now = at < static_cast<std::ptrdiff_t>(after.ids.size())
                               ? after.weights[static_cast<std::size_t>(at)] / total(after)
                               : 0;
        share += std::max(0.0, before.weights[i] / total(before) - now);
      }
      CHECK(moved(before, old_ring, after, after.ring(old_ring)) < 1.2 * share * Ring::kSlots);
    }
  }
}

TEST_CASE("a ring made from an earlier one is the ring made anew") {
  const auto before = cluster(12, {100, 200, 0, 150});
  const auto old_ring = before.ring();
  std::mt19937_64 random(20260101);
  for (int round = 0; round < 12; ++round) {
    auto after = before;
    for (int change = 0; change <= round % 4; ++change) {
      const auto at = random() % after.ids.size();
      switch (random() % 4) {
        case 0:
          after.ids.erase(after.ids.begin() + static_cast<std::ptrdiff_t>(at));
          after.weights.erase(after.weights.begin() + static_cast<std::ptrdiff_t>(at));
          break;
        case 1:
          after.ids.insert(after.ids.begin() + static_cast<std::ptrdiff_t>(at),
                           "new-" + std::to_string(random()));
          after.weights.insert(after.weights.begin() + static_cast<std::ptrdiff_t>(at), 130);
          break;
        default:
          after.weights[at] = static_cast<std::uint32_t>(random() % 4 * 70);
      }
    }
    CAPTURE(round);
    CHECK(same_slots(after.ring(old_ring), after.ring()));
  }
}

TEST_CASE("order of the nodes and scale of the weights do not matter") {
  const Nodes a{{"n1", "n2", "n3"}, {1, 1, 1}};
  const Nodes b{{"n3", "n1", "n2"}, {700, 700, 700}};
  const Nodes c{{"n1", "n2", "n3"}, {1, 2, 3}};
  const Nodes d{{"n3", "n2", "n1"}, {4294967295U / 3 * 3, 4294967295U / 3 * 2, 4294967295U / 3}};
  const auto ra = a.ring();
  const auto rb = b.ring();
  const auto rc = c.ring();
  const auto rd = d.ring();
  CHECK(moved(a, ra, b, rb) == 0);
  CHECK(moved(c, rc, d, rd) == 0);
}

TEST_CASE("weight 0 owns nothing; no weight at all is an empty ring") {
  const Nodes nodes{{"a", "b"}, {0, 5}};
  CHECK(nodes.ring().counts()[0] == 0);
  CHECK(Nodes{{"a", "b"}, {0, 0}}.ring().empty());
  CHECK(Ring().empty());
}

TEST_CASE("rings of a view") {
  View view;
  view.nodes.resize(4);
  const NodeState states[] = {NodeState::kServing, NodeState::kDraining, NodeState::kJoining,
                              NodeState::kGone};
  for (std::size_t i = 0; i < 4; ++i) {
    view.nodes[i].id = "node-" + std::to_string(i);
    view.nodes[i].state = states[i];
  }
  const auto read = client::read_ring(view);
  const auto write = client::write_ring(view);
  const auto readers = read.counts();
  CHECK(readers[0] > 0);
  CHECK(readers[1] > 0);
  CHECK(readers[2] + readers[3] == 0);
  CHECK(write.counts()[0] == Ring::kSlots);
  view.nodes[0].write_weight = 0;
  CHECK(client::write_ring(view).empty());
}
