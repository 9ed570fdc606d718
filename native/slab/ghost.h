// Remembers the fingerprints of chunks that were evicted, so that a miss can say why. Bounded and best
// effort: old entries are overwritten, and one miss in about a hundred million is explained wrongly. Not
// thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

namespace dfkv {

class GhostFilter {
 public:
  explicit GhostFilter(std::size_t entries)
      : sets_(std::bit_ceil(std::max<std::size_t>(entries / kWays, 1))) {}

  void insert(std::uint64_t hash) {
    if (contains(hash)) return;
    Set& set = set_of(hash);
    set.tags[set.next] = tag_of(hash);
    set.next = (set.next + 1) % kWays;
  }
  void erase(std::uint64_t hash) {
    for (std::uint32_t& tag : set_of(hash).tags) {
      if (tag == tag_of(hash)) tag = 0;
    }
  }
  [[nodiscard]] bool contains(std::uint64_t hash) const {
    return std::ranges::find(set_of(hash).tags, tag_of(hash)) != set_of(hash).tags.end();
  }

 private:
  static constexpr std::uint32_t kWays = 7;
  struct Set {
    std::array<std::uint32_t, kWays> tags{};  // 0: empty
    std::uint32_t next = 0;
  };

  static std::uint32_t tag_of(std::uint64_t hash) { return static_cast<std::uint32_t>(hash >> 32) | 1; }
  [[nodiscard]] Set& set_of(std::uint64_t hash) { return sets_[hash & (sets_.size() - 1)]; }
  [[nodiscard]] const Set& set_of(std::uint64_t hash) const { return sets_[hash & (sets_.size() - 1)]; }

  std::vector<Set> sets_;
};

}  // namespace dfkv
