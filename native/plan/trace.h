// A trace as the simulator replays it: for each request the blocks of its prompt, in the order of the prefix.
// An id stands for its whole prefix. Not thread-safe while it grows; replays only read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "slab/index_table.h"

namespace dfkv::plan {

using Block = std::uint32_t;  // ids are renumbered from 0 in the order of their first use
inline constexpr Block kNoBlock = ~Block{0};

class Trace {
 public:
  // Requests in their order: `counts[i]` blocks each, their ids one after another in `ids`. Throws
  // std::invalid_argument when the numbers do not add up, std::length_error past 2^32 - 2 different ids.
  void append(std::span<const std::uint32_t> counts, std::span<const std::uint64_t> ids);

  [[nodiscard]] std::size_t requests() const { return ends_.size(); }
  [[nodiscard]] std::uint64_t blocks() const { return blocks_.size(); }
  [[nodiscard]] std::size_t unique_blocks() const { return ids_.size(); }
  // Blocks that follow different blocks in different requests. Not 0: the ids do not stand for whole
  // prefixes.
  [[nodiscard]] std::uint64_t conflicts() const { return conflicts_; }

  [[nodiscard]] std::span<const Block> request(std::size_t index) const {
    const std::size_t begin = index == 0 ? 0 : ends_[index - 1];
    return std::span(blocks_).subspan(begin, ends_[index] - begin);
  }
  [[nodiscard]] std::uint64_t id(Block block) const { return ids_[block]; }
  // The block before it where it was first seen; kNoBlock at the head.
  [[nodiscard]] Block parent(Block block) const { return parents_[block]; }
  // Stands in for the hash that is a block's key.
  [[nodiscard]] std::uint64_t key(Block block) const;

 private:
  Block number_of(std::uint64_t id, Block parent);

  std::vector<Block> blocks_;
  std::vector<std::uint64_t> ends_;  // per request, in blocks_
  std::vector<std::uint64_t> ids_;
  std::vector<Block> parents_;
  IndexTable numbers_;
  std::uint64_t conflicts_ = 0;
};

}  // namespace dfkv::plan
