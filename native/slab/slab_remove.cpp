// Removing objects, one by one or as what an erased namespace has left.
#include <algorithm>
#include <cerrno>

#include "slab/slab_store.h"

namespace dfkv {

SlabStore::Removal SlabStore::begin_remove(const ObjectKey& key) {
  Removal removal;
  const std::lock_guard lock(mutex_);
  const auto tag = tag_of(key);
  if (!tag) return removal;
  if (key.part == kAllParts) {
    index_.for_chunk(*tag, [&removal](SlotNumber slot) { removal.slots.push_back(slot); });
  } else if (const SlotNumber slot = index_.find(*tag); slot != kNoSlot) {
    removal.slots.push_back(slot);
  }
  for (const SlotNumber slot : removal.slots) {
    unlink(slot);
    condemn(slot);
  }
  for (const auto& pending : pending_) {
    if (key.part == kAllParts ? !SlotIndex::same_chunk(pending->tag, *tag) : pending->tag != *tag) continue;
    pending->cancelled = true;
    removal.writes.push_back(pending);
  }
  return removal;
}

int SlabStore::finish(const Removal& removal) {
  Lock lock(mutex_);
  const int error = free_records(lock, removal.slots);
  const std::uint64_t begun = frees_begun_;
  changed_.wait(lock, [this, &removal, begun] {
    return (frees_.empty() || frees_.front() > begun) &&
           std::ranges::all_of(removal.writes, [](const auto& pending) { return pending->done; });
  });
  if (error != 0) return error;
  // Any of these may be what was removed: its record would be believed after a crash.
  return stuck_.empty() ? 0 : EIO;
}

bool SlabStore::sweep() {
  constexpr std::size_t kSlotsPerSweep = 512;
  SlotList gone;
  Lock lock(mutex_);
  if (!stuck_.empty() && may_write()) {
    std::vector<SlotNumber> again;
    again.swap(stuck_);
    static_cast<void>(free_records(lock, again));
  }
  const auto space = std::ranges::find_if(spaces_, &Space::stale);
  if (space == spaces_.end() || !may_write()) return false;
  const auto index = static_cast<std::uint32_t>(space - spaces_.begin());
  const std::uint32_t owner = owner_of(index, space->generation);
  bool left = false;
  for (std::size_t size_class = 0; size_class < kSizeClasses && !left; ++size_class) {
    for (const std::uint32_t slab : class_slabs_[size_class]) {
      for (std::uint32_t i = 0; i < allocator_.slots_per_slab(size_class); ++i) {
        const SlotRef ref{slab, i};
        const std::uint32_t found = allocator_.owner_of(ref);
        if (found == SlabAllocator::kNoOwner || (found & 0xFFFF) != index || found == owner ||
            index_.node(number_of(ref)).tag == 0) {
          continue;
        }
        left = left || gone.size() >= kSlotsPerSweep;
        if (left) break;
        gone.push_back(number_of(ref));
      }
      if (left) break;
    }
  }
  for (const SlotNumber slot : gone) {
    unlink(slot);
    condemn(slot);
  }
  if (!left) spaces_[index].stale = false;
  static_cast<void>(free_records(lock, gone));
  return left || std::ranges::any_of(spaces_, &Space::stale);
}

}  // namespace dfkv
