#include "net/ring.h"

#include <array>
#include <bit>
#include <stdexcept>
#include <string>

#include "wire/checksum.h"

namespace dfkv::client {

namespace {

constexpr std::uint32_t kLogSteps = 1024;
using LogTable = std::array<std::uint64_t, kLogSteps + 1>;

LogTable make_log_table() {
  LogTable table{};
  for (std::uint64_t i = 0; i < kLogSteps; ++i) {
    std::uint64_t x = (kLogSteps + i) << 21;
    std::uint64_t bits = 0;
    for (int step = 0; step < 32; ++step) {
      x = x * x >> 31;
      const bool one = x >= (1ULL << 32);
      if (one) x >>= 1;
      bits = bits << 1 | (one ? 1 : 0);
    }
    table[i] = bits;
  }
  table[kLogSteps] = 1ULL << 32;
  return table;
}

std::uint64_t cost_of(std::uint64_t h, const LogTable& logs) {
  const auto top = static_cast<unsigned>(63 - std::countl_zero(h));
  const std::uint64_t m = h << (63 - top);
  const std::uint64_t i = m >> 53 & (kLogSteps - 1);
  const std::uint64_t f = m >> 21 & 0xFFFFFFFFULL;
  const std::uint64_t log = (std::uint64_t{top} << 32) + logs[i] + ((logs[i + 1] - logs[i]) * f >> 32);
  return (64ULL << 32) - log;
}

struct Candidate {
  std::uint64_t seed;
  std::uint32_t weight;
  std::uint16_t position;
};

using Wide = unsigned __int128;

}  // namespace

Ring::Ring(std::span<const Member> members) {
  if (members.size() > kMaxMembers) {
    throw std::invalid_argument("a ring of " + std::to_string(members.size()) + " nodes; at most " +
                                std::to_string(kMaxMembers) + " are supported");
  }
  std::vector<Candidate> candidates;
  bool equal_weights = true;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (members[i].weight == 0) continue;
    const auto seed = xxh3_64(as_bytes(members[i].id.data(), members[i].id.size()));
    candidates.push_back({seed, members[i].weight, static_cast<std::uint16_t>(i)});
    equal_weights &= members[i].weight == candidates.front().weight;
  }
  if (candidates.empty()) return;

  static const LogTable logs = make_log_table();
  slots_.resize(kSlots);
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
    const std::uint64_t salt = mix(slot);
    const Candidate* best = &candidates.front();
    std::uint64_t best_hash = 0;
    std::uint64_t best_cost = 0;
    for (const auto& candidate : candidates) {
      std::uint64_t hash = mix(candidate.seed ^ salt);
      if (hash == 0) hash = 1;
      // The cost falls as the hash grows, so that equal weights need no logarithm.
      const std::uint64_t cost = equal_weights ? 0 : cost_of(hash, logs);
      bool better = &candidate == best;  // the first one
      if (!better) {
        const auto mine = static_cast<Wide>(cost) * best->weight;
        const auto other = static_cast<Wide>(best_cost) * candidate.weight;
        if (mine != other) {
          better = mine < other;
        } else if (hash != best_hash) {
          better = hash > best_hash;
        } else {
          better = members[candidate.position].id < members[best->position].id;
        }
      }
      if (better) {
        best = &candidate;
        best_hash = hash;
        best_cost = cost;
      }
    }
    slots_[slot] = best->position;
  }
}

namespace {
template <typename Weight>
Ring ring_of(const View& view, Weight weight) {
  std::vector<Ring::Member> members;
  members.reserve(view.nodes.size());
  for (const auto& node : view.nodes) members.push_back({node.id, weight(node)});
  return Ring(members);
}
}  // namespace

Ring read_ring(const View& view) {
  return ring_of(view, [](const ViewNode& node) {
    const bool readable = node.state == NodeState::kServing || node.state == NodeState::kDraining;
    return readable ? node.read_weight : 0U;
  });
}

Ring write_ring(const View& view) {
  return ring_of(
      view, [](const ViewNode& node) { return node.state == NodeState::kServing ? node.write_weight : 0U; });
}

}  // namespace dfkv::client
