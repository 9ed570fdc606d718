// Slots of a slab store: linked to keys, evicted, given back. Everything here expects the mutex to be held
// and does no I/O.
//
// Which chunk goes: the one used longest ago among a sample of the class that needs a slot. An exact order
// would cost 8 bytes for each slot. From time to time, and where a class has nothing of its own, a slab of
// another class goes instead, when nothing in it has been used for longer than half of the age that objects
// reach in this class.
#include <algorithm>
#include <cassert>

#include "slab/slab_store.h"

namespace dfkv {

namespace {
constexpr int kSamples = 48;
constexpr int kSampleTries = 3 * kSamples;
constexpr int kSampleAttempts = 4;
constexpr int kRunsSampled = 16;
constexpr int kRunsSampledInNeed = 256;
constexpr std::uint32_t kEvictionsPerShift = 16;
}  // namespace

void SlabStore::link(SlotNumber slot, std::uint64_t tag, std::uint32_t owner) {
  const SlotRef ref = ref_of(slot);
  index_.insert(tag, slot);
  allocator_.set_owner(ref, owner);
  Space& space = spaces_[owner & 0xFFFF];
  ++space.objects;
  space.slot_bytes += allocator_.slot_bytes(ref);
  ++counts_.objects;
}

void SlabStore::unlink(SlotNumber slot) {
  const SlotRef ref = ref_of(slot);
  index_.erase(slot);
  const std::uint32_t owner = allocator_.owner_of(ref);
  Space& space = spaces_[owner & 0xFFFF];
  if (owner == owner_of(owner & 0xFFFF, space.generation)) {
    --space.objects;
    space.slot_bytes -= allocator_.slot_bytes(ref);
    --counts_.objects;
  }
}

void SlabStore::release(SlotNumber slot) {
  const SlotRef ref = ref_of(slot);
  const std::size_t size_class = allocator_.class_of(ref);
  allocator_.set_busy(ref, false);
  allocator_.release(ref);
  if (allocator_.slab_of(ref.slab) != SlabAllocator::kNone) return;
  index_.unbind(ref.slab);
  slab_ready_[ref.slab] = 0;
  auto& slabs = class_slabs_[size_class];
  *std::ranges::find(slabs, ref.slab) = slabs.back();
  slabs.pop_back();
}

void SlabStore::condemn(SlotNumber slot) {
  const auto pins = pins_.find(slot);
  if (pins != pins_.end()) {
    pins->second.condemned = true;
  } else {
    allocator_.set_busy(ref_of(slot), true);
  }
}

void SlabStore::settle(SlotNumber slot) {
  const auto pins = pins_.find(slot);
  if (pins != pins_.end()) {
    pins->second.freed = true;
  } else {
    release(slot);
  }
}

bool SlabStore::evictable(SlotRef ref) const {
  return allocator_.owner_of(ref) != SlabAllocator::kNoOwner && !allocator_.busy(ref) &&
         index_.node(number_of(ref)).tag != 0;
}

std::uint64_t SlabStore::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_;
}

bool SlabStore::choose_victims(std::size_t size_class, SlotList& victims) {
  const SlotNumber old = oldest_of(size_class);
  if (old == kNoSlot || ++evictions_ % kEvictionsPerShift == 0) {
    if (const auto run = older_run(size_class, old == kNoSlot ? 0 : age_of(old) / 2 + 1)) {
      clear_run(*run, victims);
      if (!victims.empty()) return true;
    }
  }
  return old != kNoSlot && evict_chunk(old, victims);
}

SlotNumber SlabStore::oldest_of(std::size_t size_class) {
  const auto& slabs = class_slabs_[size_class];
  if (slabs.empty()) return kNoSlot;
  const std::uint32_t slots = allocator_.slots_per_slab(size_class);
  // A chunk goes as a whole or not at all: one with a busy part elsewhere stays, and another sample is taken.
  for (int attempt = 0; attempt < kSampleAttempts; ++attempt) {
    SlotNumber oldest = kNoSlot;
    int seen = 0;
    for (int i = 0; i < kSampleTries && seen < kSamples; ++i) {
      const SlotRef ref{slabs[random() % slabs.size()], static_cast<std::uint32_t>(random() % slots)};
      if (!evictable(ref)) continue;
      ++seen;
      const SlotNumber slot = number_of(ref);
      if (oldest == kNoSlot || age_of(slot) > age_of(oldest)) oldest = slot;
    }
    if (oldest == kNoSlot) return kNoSlot;
    bool busy = false;
    index_.for_chunk(index_.node(oldest).tag,
                     [&](SlotNumber part) { busy = busy || allocator_.busy(ref_of(part)); });
    if (!busy) return oldest;
    // That counts as a use, so that it is not looked at again and again.
    index_.node(oldest).stamp = static_cast<std::uint32_t>(clock_);
  }
  return kNoSlot;
}

std::optional<SlabAllocator::Run> SlabStore::older_run(std::size_t size_class, std::uint32_t age) {
  const bool in_need = age == 0;
  const int tries = in_need ? kRunsSampledInNeed : kRunsSampled;
  std::optional<SlabAllocator::Run> best;
  std::uint64_t best_hottest = ~std::uint64_t{0};
  for (int i = 0; i < tries; ++i) {
    const auto extent = static_cast<std::uint32_t>(random() % geometry_.extent_count);
    const std::uint32_t slab = allocator_.slab_of(extent);
    if (slab != SlabAllocator::kNone && allocator_.class_of({slab, 0}) == size_class) continue;
    const auto run = allocator_.run_at(extent, size_class);
    if (!run) continue;
    const std::uint64_t hottest = allocator_.hottest_in(*run);
    if (hottest < best_hottest) {
      best = run;
      best_hottest = hottest;
    }
  }
  if (!best) return std::nullopt;
  if (!in_need && clock_ - best_hottest <= age) return std::nullopt;
  return best;
}

void SlabStore::clear_run(SlabAllocator::Run run, SlotList& victims) {
  for (std::uint32_t at = run.first; at < run.first + run.count; ++at) {
    if (allocator_.slab_of(at) != at) continue;
    const std::uint32_t slots = allocator_.slots_per_slab(allocator_.class_of({at, 0}));
    for (std::uint32_t slot = 0; slot < slots; ++slot) {
      // One chunk may have several parts here: they went with the first. A pinned part elsewhere keeps it.
      if (evictable({at, slot})) static_cast<void>(evict_chunk(number_of({at, slot}), victims));
    }
  }
}

bool SlabStore::evict_chunk(SlotNumber member, SlotList& victims) {
  const std::uint64_t tag = index_.node(member).tag;
  const std::size_t before = victims.size();
  bool busy = false;
  index_.for_chunk(tag, [&](SlotNumber part) {
    busy = busy || allocator_.busy(ref_of(part));
    victims.push_back(part);
  });
  if (busy) {
    victims.resize(before);
    return false;
  }
  for (std::size_t i = before; i < victims.size(); ++i) {
    ++counts_.evicted_objects;
    counts_.evicted_bytes += allocator_.slot_bytes(ref_of(victims[i]));
    unlink(victims[i]);
    condemn(victims[i]);
  }
  ghost_.insert(ghost_hash(tag));
  return true;
}

}  // namespace dfkv
