#include "net/ring.h"

#include <array>
#include <bit>
#include <map>
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

std::uint64_t cost_of(std::uint64_t h) {
  static const LogTable logs = make_log_table();
  const auto top = static_cast<unsigned>(63 - std::countl_zero(h | 1));  // h is never 0
  const std::uint64_t m = h << (63 - top);
  const std::uint64_t i = m >> 53 & (kLogSteps - 1);
  const std::uint64_t f = m >> 21 & 0xFFFFFFFFULL;
  const std::uint64_t log = (std::uint64_t{top} << 32) + logs[i] + ((logs[i + 1] - logs[i]) * f >> 32);
  return (64ULL << 32) - log;
}

using Wide = unsigned __int128;

}  // namespace

// The comparison of two nodes for one slot. Positions are those of the ring's nodes.
class Ring::Contest {
 public:
  explicit Contest(const std::vector<Node>& nodes) : nodes_(nodes) {
    std::map<std::uint32_t, Group> groups;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i].weight == 0) continue;
      auto& group = groups[nodes[i].weight];
      group.positions.push_back(static_cast<std::uint16_t>(i));
      group.seeds.push_back(nodes[i].seed);
    }
    for (auto& [weight, group] : groups) groups_.push_back(std::move(group));
  }

  [[nodiscard]] bool empty() const { return groups_.empty(); }

  // Among nodes of one weight the largest hash has the smallest cost, so that logarithms are few.
  [[nodiscard]] std::uint16_t winner(std::uint64_t salt) const {
    std::uint16_t best = 0;
    std::uint64_t best_hash = 0;
    for (const auto& group : groups_) {
      std::uint64_t top = 0;
      std::size_t at = 0;
      for (std::size_t i = 0; i < group.seeds.size(); ++i) {
        const std::uint64_t hash = hash_of(group.seeds[i], salt);
        if (hash < top) continue;
        if (hash == top && nodes_[group.positions[at]].id < nodes_[group.positions[i]].id) continue;
        top = hash;
        at = i;
      }
      if (best_hash == 0 || beats(group.positions[at], top, best, best_hash)) {
        best = group.positions[at];
        best_hash = top;
      }
    }
    return best;
  }

  // The better of an owner and of others that may take its place.
  [[nodiscard]] std::uint16_t defend(std::uint64_t salt, std::uint16_t owner,
                                     std::span<const std::uint16_t> rivals) const {
    std::uint64_t hash = hash_of(nodes_[owner].seed, salt);
    for (const auto rival : rivals) {
      const std::uint64_t theirs = hash_of(nodes_[rival].seed, salt);
      if (rival == owner || !beats(rival, theirs, owner, hash)) continue;
      owner = rival;
      hash = theirs;
    }
    return owner;
  }

 private:
  struct Group {
    std::vector<std::uint16_t> positions;
    std::vector<std::uint64_t> seeds;
  };

  static std::uint64_t hash_of(std::uint64_t seed, std::uint64_t salt) {
    const std::uint64_t hash = mix(seed ^ salt);
    return hash == 0 ? 1 : hash;
  }

  [[nodiscard]] bool beats(std::uint16_t a, std::uint64_t a_hash, std::uint16_t b,
                           std::uint64_t b_hash) const {
    const Node& mine = nodes_[a];
    const Node& other = nodes_[b];
    if (mine.weight != other.weight) {
      const auto left = static_cast<Wide>(cost_of(a_hash)) * other.weight;
      const auto right = static_cast<Wide>(cost_of(b_hash)) * mine.weight;
      if (left != right) return left < right;
    }
    return a_hash != b_hash ? a_hash > b_hash : mine.id < other.id;
  }

  const std::vector<Node>& nodes_;
  std::vector<Group> groups_;
};

Ring::Ring(std::span<const Member> members) {
  take_members(members);
  fill();
}

Ring::Ring(std::span<const Member> members, const Ring& before) {
  take_members(members);
  if (before.empty()) {
    fill();
  } else {
    fill_from(before);
  }
}

std::vector<std::uint32_t> Ring::counts() const {
  std::vector<std::uint32_t> counts(nodes_.size());
  if (slots_ != nullptr) {
    for (const auto owner : *slots_) ++counts[owner];
  }
  return counts;
}

void Ring::take_members(std::span<const Member> members) {
  if (members.size() > kMaxMembers) {
    throw std::invalid_argument("a ring of " + std::to_string(members.size()) + " nodes; at most " +
                                std::to_string(kMaxMembers) + " are supported");
  }
  nodes_.reserve(members.size());
  for (const auto& member : members) {
    nodes_.push_back(
        {std::string(member.id), xxh3_64(as_bytes(member.id.data(), member.id.size())), member.weight});
  }
}

void Ring::fill() {
  const Contest contest(nodes_);
  if (contest.empty()) return;
  auto slots = std::make_shared<Slots>(kSlots);
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) (*slots)[slot] = contest.winner(mix(slot));
  slots_ = std::move(slots);
}

void Ring::fill_from(const Ring& before) {
  constexpr std::uint16_t kNone = UINT16_MAX;
  static_assert(kMaxMembers < kNone);
  std::map<std::string_view, std::uint16_t> places;
  for (std::size_t i = 0; i < nodes_.size(); ++i) places.emplace(nodes_[i].id, static_cast<std::uint16_t>(i));

  // Owners that still defend their slots, and nodes that may win what they could not before.
  std::vector<std::uint16_t> keeps(before.nodes_.size(), kNone);
  std::vector<bool> known(nodes_.size());
  std::vector<std::uint16_t> rivals;
  bool same = nodes_.size() == before.nodes_.size();
  for (std::size_t i = 0; i < before.nodes_.size(); ++i) {
    const auto& old = before.nodes_[i];
    const auto found = places.find(old.id);
    if (found == places.end()) {
      same = false;
      continue;
    }
    const auto position = found->second;
    known[position] = true;
    const auto weight = nodes_[position].weight;
    if (weight != 0 && weight >= old.weight) keeps[i] = position;
    if (weight > old.weight) rivals.push_back(position);
    same = same && position == i && weight == old.weight;
  }
  if (same) {
    slots_ = before.slots_;
    return;
  }
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    if (!known[i] && nodes_[i].weight != 0) rivals.push_back(static_cast<std::uint16_t>(i));
  }

  const Contest contest(nodes_);
  if (contest.empty()) return;
  auto slots = std::make_shared<Slots>(kSlots);
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
    const auto owner = keeps[(*before.slots_)[slot]];
    const auto salt = mix(slot);
    (*slots)[slot] = owner == kNone ? contest.winner(salt) : contest.defend(salt, owner, rivals);
  }
  slots_ = std::move(slots);
}

namespace {
template <typename Weight>
Ring ring_of(const View& view, const Ring& before, Weight weight) {
  std::vector<Ring::Member> members;
  members.reserve(view.nodes.size());
  for (const auto& node : view.nodes) members.push_back({node.id, weight(node)});
  return Ring(members, before);
}
}  // namespace

Ring read_ring(const View& view, const Ring& before) {
  return ring_of(view, before, [](const ViewNode& node) {
    const bool readable = node.state == NodeState::kServing || node.state == NodeState::kDraining;
    return readable ? node.read_weight : 0U;
  });
}

Ring write_ring(const View& view, const Ring& before) {
  return ring_of(view, before, [](const ViewNode& node) {
    return node.state == NodeState::kServing ? node.write_weight : 0U;
  });
}

}  // namespace dfkv::client
