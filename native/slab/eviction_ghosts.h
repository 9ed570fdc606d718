// Chunks that a policy has evicted, remembered by fingerprint in the order of their going: about 50 bytes
// each. A fingerprint is remembered once. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "slab/eviction_list.h"
#include "slab/index_table.h"

namespace dfkv {

class GhostQueue {
 public:
  struct Ghost {
    std::uint64_t fingerprint = 0;
    std::uint64_t evicted_at = 0;  // in the owner's time
    std::uint8_t kind = 0;         // the owner's
  };

  // As the newest; what was known under the fingerprint is replaced.
  void push(const Ghost& ghost) {
    (void)take(ghost.fingerprint);
    if (free_.empty()) {
      free_.push_back(static_cast<std::uint32_t>(ghosts_.size()));
      ghosts_.emplace_back();
      links_.emplace_back();
    }
    const std::uint32_t at = free_.back();
    free_.pop_back();
    ghosts_[at] = ghost;
    order_.link_hottest(links_, at);
    index_.insert(ghost.fingerprint, at);
  }
  // Forgets and returns the one of this fingerprint.
  std::optional<Ghost> take(std::uint64_t fingerprint) {
    const std::uint32_t at = index_.find(fingerprint, [this, fingerprint](std::uint32_t ghost) {
      return ghosts_[ghost].fingerprint == fingerprint;
    });
    if (at == IndexTable::kNone) return std::nullopt;
    return drop(at);
  }
  // Precondition: size() > 0.
  Ghost take_oldest() { return drop(order_.coldest()); }

  [[nodiscard]] std::size_t size() const { return order_.size(); }
  // How many there are of each kind below `Kinds`, recounted.
  [[nodiscard]] std::vector<std::size_t> recount(std::size_t kinds) const {
    std::vector<std::size_t> counts(kinds);
    for (auto at = order_.coldest(); at != HandleList::kNone; at = links_[at].hotter)
      ++counts[ghosts_[at].kind];
    return counts;
  }
  [[nodiscard]] bool consistent() const {
    return index_.size() == order_.size() && ghosts_.size() == order_.size() + free_.size() &&
           order_.consistent(links_, [this](std::uint32_t at) {
             return index_.find(ghosts_[at].fingerprint, [at](std::uint32_t ghost) { return ghost == at; }) ==
                    at;
           });
  }

 private:
  Ghost drop(std::uint32_t at) {
    const Ghost ghost = ghosts_[at];
    order_.unlink(links_, at);
    index_.erase(ghost.fingerprint, at);
    free_.push_back(at);
    return ghost;
  }

  std::vector<Ghost> ghosts_;
  HandleList::Links links_;
  HandleList order_;  // oldest first
  std::vector<std::uint32_t> free_;
  IndexTable index_;
};

}  // namespace dfkv
