// Finding and pinning slots: for reads, and for leases within their share.
#include <algorithm>

#include "slab/slab_store.h"

namespace dfkv {

namespace {
constexpr std::size_t kTouchSlice = 256;
}  // namespace

bool SlabStore::holds(const ObjectKey& key) const {
  const std::lock_guard lock(mutex_);
  const auto tag = tag_of(key);
  return tag && index_.find(*tag) != kNoSlot;
}

bool SlabStore::evicted_lately(const ChunkKey& key) const {
  const std::lock_guard lock(mutex_);
  const auto tag = tag_of({key.ns, key.block, 0});
  return tag && ghost_.contains(ghost_hash(*tag));
}

bool SlabStore::current(SlotNumber slot, const ObjectKey& key) const {
  const std::lock_guard lock(mutex_);
  const auto tag = tag_of(key);
  return tag && index_.find(*tag) == slot;
}

std::optional<SlotNumber> SlabStore::pin(const ObjectKey& key) {
  const std::lock_guard lock(mutex_);
  const auto tag = tag_of(key);
  const SlotNumber slot = tag ? index_.find(*tag) : kNoSlot;
  if (slot == kNoSlot) return std::nullopt;
  ++pins_[slot].reads;
  ++counts_.pins;
  allocator_.set_busy(ref_of(slot), true);
  return slot;
}

void SlabStore::unpin(SlotNumber slot) {
  const std::lock_guard lock(mutex_);
  --counts_.pins;
  --pins_.at(slot).reads;
  drop_pins(slot);
}

std::optional<SlotNumber> SlabStore::pin_for_lease(const ObjectKey& key) {
  const std::lock_guard lock(mutex_);
  const auto tag = tag_of(key);
  const SlotNumber slot = tag ? index_.find(*tag) : kNoSlot;
  if (slot == kNoSlot) return std::nullopt;
  const std::uint64_t bytes = allocator_.slot_bytes(ref_of(slot));
  Pins& pins = pins_[slot];
  if (pins.leases == 0) {
    const auto most = static_cast<std::uint64_t>(static_cast<double>(counts_.capacity_bytes) *
                                                 options_.max_leased_fraction);
    if (counts_.leased_bytes + bytes > most) {
      if (pins.reads == 0) pins_.erase(slot);
      return std::nullopt;
    }
    counts_.leased_bytes += bytes;
  }
  ++pins.leases;
  allocator_.set_busy(ref_of(slot), true);
  return slot;
}

void SlabStore::unpin_for_lease(SlotNumber slot) {
  const std::lock_guard lock(mutex_);
  Pins& pins = pins_.at(slot);
  if (--pins.leases == 0) counts_.leased_bytes -= allocator_.slot_bytes(ref_of(slot));
  drop_pins(slot);
}

void SlabStore::drop_pins(SlotNumber slot) {
  const Pins pins = pins_.at(slot);
  if (pins.reads != 0 || pins.leases != 0) return;
  pins_.erase(slot);
  if (!pins.condemned) {
    allocator_.set_busy(ref_of(slot), false);
  } else if (pins.freed) {
    release(slot);
  }
}

void SlabStore::touch(const NamespaceId& ns, std::span<const BlockId> batch) {
  for (std::size_t end = batch.size(); end > 0;) {
    const std::size_t begin = end - std::min(end, kTouchSlice);
    const std::lock_guard lock(mutex_);
    const auto space = space_index_.find(ns);
    if (space == space_index_.end()) return;
    while (end > begin) {
      const std::uint64_t tag = chunk_tag(ns, spaces_[space->second].generation, batch[--end]);
      ++clock_;
      index_.for_chunk(tag, [this](SlotNumber slot) {
        index_.node(slot).stamp = static_cast<std::uint32_t>(clock_);
        allocator_.heat(ref_of(slot), clock_);
      });
    }
  }
}

}  // namespace dfkv
