// What must hold at any time in a slab store, recounted.
#include <string>
#include <vector>

#include "slab/slab_store.h"

namespace dfkv {

std::vector<std::string> SlabStore::violations(bool at_rest) const {
  const std::lock_guard lock(mutex_);
  auto found = allocator_.violations();
  const auto expect = [&found](bool holds, const std::string& what) {
    if (!holds) found.push_back(what);
  };
  std::uint64_t live_bytes = 0;
  std::uint64_t quarantined = 0;
  std::size_t linked = 0;
  std::size_t taken = 0;
  std::vector<std::uint64_t> objects(spaces_.size());
  for (std::size_t size_class = 0; size_class < kSizeClasses; ++size_class) {
    expect(class_slabs_[size_class].size() == allocator_.slabs_of(size_class),
           "slabs of class " + std::to_string(size_class) + " are miscounted");
    for (const std::uint32_t slab : class_slabs_[size_class]) {
      for (std::uint32_t i = 0; i < allocator_.slots_per_slab(size_class); ++i) {
        const SlotRef ref{slab, i};
        const std::uint32_t owner = allocator_.owner_of(ref);
        const SlotNumber slot = number_of(ref);
        const bool is_linked = index_.node(slot).tag != 0;
        if (owner == SlabAllocator::kNoOwner) {
          expect(!is_linked, "slot " + std::to_string(slot) + " is free and linked");
          continue;
        }
        ++taken;
        if (owner == kQuarantinedOwner) {
          ++quarantined;
          continue;
        }
        if (!is_linked) {
          expect(allocator_.busy(ref), "slot " + std::to_string(slot) + " is neither live nor in use");
          continue;
        }
        ++linked;
        live_bytes += allocator_.slot_bytes(ref);
        if (owner == owner_of(owner & 0xFFFF, spaces_[owner & 0xFFFF].generation)) ++objects[owner & 0xFFFF];
        expect(index_.find(index_.node(slot).tag) == slot, "slot " + std::to_string(slot) + " is not found");
      }
    }
  }
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < spaces_.size(); ++i) {
    expect(objects[i] == spaces_[i].objects, "namespace " + std::to_string(i) + " is miscounted");
    sum += objects[i];
  }
  expect(sum == counts_.objects, "objects are miscounted");
  expect(linked == index_.size(), "the index does not hold every live slot once");
  expect(quarantined == counts_.quarantined, "quarantined slots are miscounted");
  if (at_rest) {
    expect(pins_.empty() && counts_.pins == 0, std::to_string(pins_.size()) + " slots are pinned at rest");
    expect(pending_.empty() && filling_ == 0, "writes are under way at rest");
    expect(stuck_.empty(), "records could not be freed");
    expect(taken == linked + quarantined + stuck_.size(), "a slot is taken and not live at rest");
    expect(live_bytes + counts_.quarantined_bytes == allocator_.used_bytes(),
           "used bytes are not those of the live slots");
  }
  return found;
}

}  // namespace dfkv
