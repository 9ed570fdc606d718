#include "plan/trace.h"

#include <numeric>
#include <stdexcept>
#include <string>

#include "net/ring.h"

namespace dfkv::plan {

namespace {
// Neighbouring ids come far apart, and 0 does not stay 0.
std::uint64_t hash_of(std::uint64_t id) { return client::Ring::mix(id + 0x9E3779B97F4A7C15U); }
}  // namespace

std::uint64_t Trace::key(Block block) const { return hash_of(ids_[block]); }

void Trace::append(std::span<const std::uint32_t> counts, std::span<const std::uint64_t> ids) {
  const auto announced = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
  if (announced != ids.size()) {
    throw std::invalid_argument("the requests have " + std::to_string(announced) + " blocks and " +
                                std::to_string(ids.size()) + " ids were given");
  }
  ends_.reserve(ends_.size() + counts.size());
  for (const std::uint32_t count : counts) {
    Block parent = kNoBlock;
    for (const std::uint64_t id : ids.first(count)) {
      parent = number_of(id, parent);
      blocks_.push_back(parent);
    }
    ids = ids.subspan(count);
    ends_.push_back(blocks_.size());
  }
}

Block Trace::number_of(std::uint64_t id, Block parent) {
  const std::uint64_t hash = hash_of(id);
  const Block known = numbers_.find(hash, [this, id](Block block) { return ids_[block] == id; });
  if (known != IndexTable::kNone) {
    if (parents_[known] != parent) ++conflicts_;
    return known;
  }
  if (ids_.size() >= kNoBlock - 1) throw std::length_error("a trace of more than 4 billion different blocks");
  const auto number = static_cast<Block>(ids_.size());
  ids_.push_back(id);
  parents_.push_back(parent);
  numbers_.insert(hash, number);
  return number;
}

}  // namespace dfkv::plan
