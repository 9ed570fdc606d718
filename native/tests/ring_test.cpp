// The ring: shares follow weights, changes move little, and the slots are those of the documented arithmetic.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "net/ring.h"

#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

using namespace dfkv;
using dfkv::client::Ring;

namespace {

struct Nodes {
  std::vector<std::string> ids;
  std::vector<std::uint32_t> weights;

  [[nodiscard]] Ring ring() const {
    std::vector<Ring::Member> members;
    for (std::size_t i = 0; i < ids.size(); ++i) members.push_back({ids[i], weights[i]});
    return Ring(members);
  }
};

// A route for every slot: mix() is a bijection, so that some route leads to each.
std::vector<Route> routes() {
  std::vector<Route> all(Ring::kSlots);
  std::vector<bool> have(Ring::kSlots);
  std::size_t found = 0;
  for (Route route = 0; found < all.size(); ++route) {
    const auto slot = Ring::slot_of(route);
    if (have[slot]) continue;
    have[slot] = true;
    all[slot] = route;
    ++found;
  }
  return all;
}

std::map<std::string, std::uint32_t> shares(const Nodes& nodes) {
  const auto ring = nodes.ring();
  std::map<std::string, std::uint32_t> count;
  for (const auto route : routes()) ++count[nodes.ids[ring.owner(route)]];
  return count;
}

}  // namespace

TEST_CASE("shares follow weights") {
  const Nodes nodes{{"a", "b", "c", "d"}, {100, 100, 200, 400}};
  const auto count = shares(nodes);
  const double total = Ring::kSlots;
  for (std::size_t i = 0; i < 4; ++i) {
    const double expected = nodes.weights[i] / 800.0;
    const double sigma = std::sqrt(expected * (1 - expected) / total);
    CHECK(std::abs(count.at(nodes.ids[i]) / total - expected) < 4 * sigma);
  }
}

TEST_CASE("a node that leaves gives its slots away and moves no other") {
  const Nodes before{{"a", "b", "c", "d", "e"}, {100, 50, 100, 70, 100}};
  const Nodes after{{"a", "b", "d", "e"}, {100, 50, 70, 100}};
  const auto old_ring = before.ring();
  const auto new_ring = after.ring();
  for (const auto route : routes()) {
    const auto& owner = before.ids[old_ring.owner(route)];
    if (owner != "c") CHECK(after.ids[new_ring.owner(route)] == owner);
  }
}

TEST_CASE("a larger weight only takes slots") {
  const Nodes before{{"a", "b", "c"}, {100, 100, 100}};
  const Nodes after{{"a", "b", "c"}, {100, 150, 100}};
  const auto old_ring = before.ring();
  const auto new_ring = after.ring();
  std::uint32_t moved = 0;
  for (const auto route : routes()) {
    const auto from = old_ring.owner(route);
    const auto to = new_ring.owner(route);
    if (from == to) continue;
    ++moved;
    CHECK(to == 1);
  }
  // From 1/3 to 1.5/3.5 of the slots.
  CHECK(moved == doctest::Approx(Ring::kSlots * (1.5 / 3.5 - 1.0 / 3)).epsilon(0.15));
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
  for (const auto route : routes()) {
    CHECK(a.ids[ra.owner(route)] == b.ids[rb.owner(route)]);
    CHECK(c.ids[rc.owner(route)] == d.ids[rd.owner(route)]);
  }
}

TEST_CASE("weight 0 owns nothing; no weight at all is an empty ring") {
  const Nodes nodes{{"a", "b"}, {0, 5}};
  CHECK(shares(nodes).count("a") == 0);
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
  std::map<std::uint32_t, int> readers;
  for (const auto route : routes()) {
    ++readers[read.owner(route)];
    CHECK(write.owner(route) == 0);
  }
  CHECK(readers.size() == 2);
  CHECK(readers[0] > 0);
  CHECK(readers[1] > 0);
  view.nodes[0].write_weight = 0;
  CHECK(client::write_ring(view).empty());
}
