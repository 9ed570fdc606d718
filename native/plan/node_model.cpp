#include "plan/node_model.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace dfkv::plan {

NodeModel::NodeModel(const Trace& trace, std::string_view policy, std::uint64_t capacity_blocks)
    : trace_(trace),
      capacity_(capacity_blocks),
      policy_(make_eviction_policy(policy)),
      handles_(trace.unique_blocks(), kNone) {
  if (!policy_) throw std::invalid_argument("there is no eviction policy \"" + std::string(policy) + '"');
  if (capacity_ == 0) throw std::invalid_argument("a capacity of 0 blocks holds nothing; give 1 or more");
}

std::size_t NodeModel::prefix(std::span<const Block> batch) const {
  return static_cast<std::size_t>(std::ranges::find_if(batch, [this](Block block) { return !holds(block); }) -
                                  batch.begin());
}

void NodeModel::read(std::span<const Block> batch) {
  if (batch.empty()) return;
  batch_.clear();
  for (const Block block : batch) batch_.push_back(handles_[block]);
  policy_->touch(batch_);
}

void NodeModel::write(std::span<const Block> batch) {
  for (const Block block : batch) {
    if (!holds(block)) add(block);
    policy_->stored(std::span(&handles_[block], 1));
  }
  batch_.clear();
  for (const Block block : batch) {
    if (holds(block)) batch_.push_back(handles_[block]);  // a small store has evicted some of them again
  }
  policy_->stored(batch_);
}

void NodeModel::remove(Block block) { drop(block, Departure::kRemoved); }

void NodeModel::add(Block block) {
  if (policy_->size() == capacity_) {
    const auto victim = policy_->victim(1, [](Handle) { return Verdict::kTake; });
    drop(blocks_[*victim], Departure::kEvicted);
    ++evicted_;
  }
  if (spare_.empty()) {
    spare_.push_back(static_cast<Handle>(blocks_.size()));
    blocks_.push_back(kNoBlock);
  }
  const Handle handle = spare_.back();
  spare_.pop_back();
  handles_[block] = handle;
  blocks_[handle] = block;
  policy_->insert(handle, {trace_.key(block), 1, 0});
  ++written_;
}

void NodeModel::drop(Block block, Departure departure) {
  const Handle handle = handles_[block];
  policy_->remove(handle, departure);
  handles_[block] = kNone;
  spare_.push_back(handle);
}

bool NodeModel::consistent() const {
  const auto held = static_cast<std::uint64_t>(
      std::ranges::count_if(handles_, [](Handle handle) { return handle != kNone; }));
  return policy_->consistent() && policy_->size() == held && held <= capacity_ && written_ >= held;
}

}  // namespace dfkv::plan
