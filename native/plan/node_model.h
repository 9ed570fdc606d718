// What a node's store does with blocks of equal size, as far as hits go: which blocks it holds, and the calls
// that its eviction policy gets, in the order in which the RAM store makes them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "plan/trace.h"
#include "slab/eviction.h"

namespace dfkv::plan {

class NodeModel {
 public:
  // Throws std::invalid_argument for an unknown policy and a capacity of 0.
  NodeModel(const Trace& trace, std::string_view policy, std::uint64_t capacity_blocks);

  [[nodiscard]] bool holds(Block block) const { return handles_[block] != kNone; }
  // Leading blocks that are held.
  [[nodiscard]] std::size_t prefix(std::span<const Block> batch) const;
  // Every block is held.
  void read(std::span<const Block> batch);
  // Blocks that are held already cost nothing; the others take places, one after another.
  void write(std::span<const Block> batch);
  void remove(Block block);  // held

  [[nodiscard]] std::uint64_t size() const { return policy_->size(); }
  [[nodiscard]] std::uint64_t written() const { return written_; }
  [[nodiscard]] std::uint64_t evicted() const { return evicted_; }
  [[nodiscard]] bool consistent() const;

 private:
  using Handle = EvictionPolicy::Handle;
  static constexpr Handle kNone = ~Handle{0};

  void add(Block block);
  void drop(Block block, Departure departure);

  const Trace& trace_;
  const std::uint64_t capacity_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<Handle> handles_;  // per block
  std::vector<Block> blocks_;    // per handle
  std::vector<Handle> spare_;
  std::vector<Handle> batch_;
  std::uint64_t written_ = 0;
  std::uint64_t evicted_ = 0;
};

}  // namespace dfkv::plan
