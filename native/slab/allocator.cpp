#include "slab/allocator.h"

#include <algorithm>
#include <cassert>
#include <stdexcept>

namespace dfkv {

namespace {
constexpr std::uint64_t kMinExtentBytes = 256 * 1024;
constexpr std::uint64_t kMaxExtentBytes = 32 * 1024 * 1024;
constexpr std::uint64_t kTargetExtents = 1024;  // a class that is rarely used holds half of one for nothing
constexpr std::uint32_t kMaxExtraExtents = 7;   // how far a run may grow to waste less
}  // namespace

SlabGeometry SlabGeometry::for_capacity(std::uint64_t capacity_bytes) {
  if (capacity_bytes < kMinCapacityBytes) {
    throw std::invalid_argument("a store of " + std::to_string(capacity_bytes) +
                                " bytes was asked for; give it at least " +
                                std::to_string(kMinCapacityBytes));
  }
  SlabGeometry geometry;
  geometry.extent_bytes =
      std::clamp(std::bit_floor(capacity_bytes / kTargetExtents), kMinExtentBytes, kMaxExtentBytes);
  const std::uint64_t count = capacity_bytes / geometry.extent_bytes;
  if (count > std::uint64_t{1} << 24) {
    throw std::invalid_argument("a store of " + std::to_string(capacity_bytes) +
                                " bytes has too many extents");
  }
  geometry.extent_count = static_cast<std::uint32_t>(count);
  return geometry;
}

SlabAllocator::SlabAllocator(SlabGeometry geometry)
    : geometry_(geometry),
      slabs_(geometry.extent_count),
      slab_of_(geometry.extent_count, kNone),
      free_extents_(geometry.extent_count) {
  partial_.fill(kNone);
  for (std::size_t i = 0; i < kSizeClasses; ++i) shapes_[i] = shape_for(slot_bytes_of(i));
}

SlabAllocator::Shape SlabAllocator::shape_for(std::uint64_t slot_bytes) const {
  const std::uint64_t extent = geometry_.extent_bytes;
  const auto shortest = static_cast<std::uint32_t>((slot_bytes + extent - 1) / extent);
  // Longer runs are harder to clear, so small arenas take the waste instead.
  const std::uint32_t longest =
      std::max(shortest, std::min(shortest + kMaxExtraExtents, geometry_.extent_count / 8));
  Shape best;
  double best_waste = 2;
  for (std::uint32_t extents = shortest; extents <= longest; ++extents) {
    const std::uint64_t run = extents * extent;
    const double waste = static_cast<double>(run % slot_bytes) / static_cast<double>(run);
    if (waste < best_waste) {
      best = {extents, static_cast<std::uint32_t>(run / slot_bytes)};
      best_waste = waste;
    }
    if (best_waste <= 0.125) break;
  }
  return best;
}

std::optional<SlotRef> SlabAllocator::allocate(std::size_t size_class, Owner owner) {
  std::uint32_t first = partial_[size_class];
  if (first == kNone) {
    first = find_free_run(shapes_[size_class].extents);
    if (first == kNone) return std::nullopt;
    bind(first, size_class);
  }
  Slab& slab = slabs_[first];
  const std::uint32_t slot = slab.first_free;
  assert(!slab.used_slots[slot] && owner != kNoOwner);
  slab.first_free = slab.owners[slot];
  slab.owners[slot] = owner;
  slab.used_slots[slot] = true;
  ++slab.used;
  used_bytes_ += slot_bytes_of(size_class);
  if (slab.first_free == kNone) list_remove(first);
  return SlotRef{first, slot};
}

void SlabAllocator::release(SlotRef ref) {
  Slab& slab = slabs_[ref.slab];
  assert(slab.extents != 0 && slab.used_slots[ref.slot] && !slab.busy_slots[ref.slot]);
  slab.used_slots[ref.slot] = false;
  slab.owners[ref.slot] = slab.first_free;
  slab.first_free = ref.slot;
  --slab.used;
  used_bytes_ -= slot_bytes_of(slab.size_class);
  if (slab.used == 0) {
    unbind(ref.slab);
  } else if (!slab.listed) {
    list_add(ref.slab);
  }
}

bool SlabAllocator::restore(std::uint32_t first, std::size_t size_class, std::span<const Owner> owners) {
  const Shape shape = shapes_[size_class];
  if (owners.size() != shape.slots || shape.extents > geometry_.extent_count ||
      first > geometry_.extent_count - shape.extents) {
    return false;
  }
  for (std::uint32_t at = first; at < first + shape.extents; ++at) {
    if (slab_of_[at] != kNone) return false;
  }
  bind(first, size_class);
  Slab& slab = slabs_[first];
  slab.first_free = kNone;
  for (std::uint32_t slot = shape.slots; slot-- > 0;) {
    if (owners[slot] == kNoOwner) {
      slab.owners[slot] = slab.first_free;
      slab.first_free = slot;
      continue;
    }
    slab.owners[slot] = owners[slot];
    slab.used_slots[slot] = true;
    ++slab.used;
    used_bytes_ += slot_bytes_of(size_class);
  }
  assert(slab.used > 0);
  if (slab.first_free == kNone) list_remove(first);
  return true;
}

void SlabAllocator::set_busy(SlotRef ref, bool busy) {
  Slab& slab = slabs_[ref.slab];
  if (slab.busy_slots[ref.slot] == busy) return;
  slab.busy_slots[ref.slot] = busy;
  if (busy) {
    ++slab.busy;
  } else {
    --slab.busy;
  }
}

void SlabAllocator::heat(SlotRef ref, std::uint64_t stamp) {
  Slab& slab = slabs_[ref.slab];
  slab.hottest = std::max(slab.hottest, stamp);
}

std::uint32_t SlabAllocator::find_free_run(std::uint32_t extents) const {
  if (extents > free_extents_) return kNone;
  // Side by side from a multiple of their length on, slabs of one class leave no gaps that none of them fits
  // into.
  for (std::uint32_t first = 0; first + extents <= geometry_.extent_count; first += extents) {
    std::uint32_t at = first;
    while (at < first + extents && slab_of_[at] == kNone) ++at;
    if (at == first + extents) return first;
  }
  std::uint32_t length = 0;
  for (std::uint32_t i = 0; i < geometry_.extent_count; ++i) {
    length = slab_of_[i] == kNone ? length + 1 : 0;
    if (length == extents) return i + 1 - extents;
  }
  return kNone;
}

std::span<const SlabAllocator::Run> SlabAllocator::coldest_runs(std::size_t size_class, std::size_t limit) {
  candidates_.clear();
  const std::uint32_t wanted = shapes_[size_class].extents;
  runs_.clear();
  if (wanted > geometry_.extent_count) return runs_;
  const std::uint32_t last = geometry_.extent_count - wanted;
  // At multiples of the length of a slab, and at the end.
  for (std::uint32_t next = 0; next < last + wanted; next += wanted) {
    const std::uint32_t window = std::min(next, last);
    // Slabs are cleared whole: the run starts at one's first extent and ends at one's last.
    const std::uint32_t start = slab_of_[window] == kNone ? window : slab_of_[window];
    Candidate candidate{0, 0, {start, 0}};
    bool busy = false;
    std::uint32_t at = start;
    while (at < window + wanted) {
      if (slab_of_[at] == kNone) {
        ++at;
        continue;
      }
      const Slab& slab = slabs_[at];
      busy = busy || slab.busy != 0;
      candidate.hottest = std::max(candidate.hottest, slab.hottest);
      candidate.used_bytes += slab.used * slot_bytes_of(slab.size_class);
      at += slab.extents;
    }
    candidate.run.count = at - start;
    if (!busy) candidates_.push_back(candidate);
  }
  const std::size_t kept = std::min(limit, candidates_.size());
  std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(kept),
                    candidates_.end(), [](const Candidate& x, const Candidate& y) {
                      return x.hottest != y.hottest ? x.hottest < y.hottest : x.used_bytes < y.used_bytes;
                    });
  for (std::size_t i = 0; i < kept; ++i) runs_.push_back(candidates_[i].run);
  return runs_;
}

std::optional<SlabAllocator::Run> SlabAllocator::run_at(std::uint32_t extent, std::size_t size_class) const {
  const std::uint32_t wanted = shapes_[size_class].extents;
  if (wanted > geometry_.extent_count) return std::nullopt;
  const std::uint32_t window = std::min(extent / wanted * wanted, geometry_.extent_count - wanted);
  const std::uint32_t start = slab_of_[window] == kNone ? window : slab_of_[window];
  std::uint32_t at = start;
  while (at < window + wanted) {
    if (slab_of_[at] == kNone) {
      ++at;
      continue;
    }
    if (slabs_[at].busy != 0) return std::nullopt;
    at += slabs_[at].extents;
  }
  return Run{start, at - start};
}

void SlabAllocator::owners_in(Run run, std::vector<Owner>& out) const {
  out.clear();
  for (std::uint32_t at = run.first; at < run.first + run.count;) {
    if (slab_of_[at] == kNone) {
      ++at;
      continue;
    }
    const Slab& slab = slabs_[slab_of_[at]];
    for (std::size_t slot = 0; slot < slab.owners.size(); ++slot) {
      if (slab.used_slots[slot]) out.push_back(slab.owners[slot]);
    }
    at = slab_of_[at] + slab.extents;
  }
}

std::uint64_t SlabAllocator::hottest_in(Run run) const {
  std::uint64_t hottest = 0;
  for (std::uint32_t at = run.first; at < run.first + run.count;) {
    if (slab_of_[at] == kNone) {
      ++at;
      continue;
    }
    hottest = std::max(hottest, slabs_[slab_of_[at]].hottest);
    at = slab_of_[at] + slabs_[slab_of_[at]].extents;
  }
  return hottest;
}

std::uint64_t SlabAllocator::offset_of(SlotRef ref) const {
  return ref.slab * geometry_.extent_bytes + ref.slot * slot_bytes(ref);
}

void SlabAllocator::bind(std::uint32_t first, std::size_t size_class) {
  const Shape shape = shapes_[size_class];
  Slab& slab = slabs_[first];
  slab.size_class = size_class;
  slab.extents = shape.extents;
  slab.used = 0;
  slab.busy = 0;
  slab.hottest = 0;
  slab.owners.resize(shape.slots);
  for (std::uint32_t i = 0; i < shape.slots; ++i) slab.owners[i] = i + 1 < shape.slots ? i + 1 : kNone;
  slab.first_free = 0;
  slab.used_slots.assign(shape.slots, false);
  slab.busy_slots.assign(shape.slots, false);
  std::fill_n(slab_of_.begin() + first, shape.extents, first);
  free_extents_ -= shape.extents;
  ++slab_counts_[size_class];
  list_add(first);
}

void SlabAllocator::unbind(std::uint32_t first) {
  Slab& slab = slabs_[first];
  assert(slab.busy == 0);
  if (slab.listed) list_remove(first);
  std::fill_n(slab_of_.begin() + first, slab.extents, kNone);
  free_extents_ += slab.extents;
  --slab_counts_[slab.size_class];
  slab.extents = 0;
  slab.hottest = 0;
}

void SlabAllocator::list_add(std::uint32_t index) {
  Slab& slab = slabs_[index];
  std::uint32_t& head = partial_[slab.size_class];
  slab.previous = kNone;
  slab.next = head;
  if (head != kNone) slabs_[head].previous = index;
  head = index;
  slab.listed = true;
}

void SlabAllocator::list_remove(std::uint32_t index) {
  Slab& slab = slabs_[index];
  if (slab.previous != kNone) {
    slabs_[slab.previous].next = slab.next;
  } else {
    partial_[slab.size_class] = slab.next;
  }
  if (slab.next != kNone) slabs_[slab.next].previous = slab.previous;
  slab.listed = false;
}

std::vector<std::string> SlabAllocator::violations() const {
  std::vector<std::string> found;
  const auto expect = [&found](bool holds, const char* what, std::uint32_t at) {
    if (!holds) found.push_back(std::string(what) + " at extent " + std::to_string(at));
  };
  std::uint64_t used_bytes = 0;
  std::uint32_t free_extents = 0;
  for (std::uint32_t at = 0; at < geometry_.extent_count;) {
    if (slab_of_[at] == kNone) {
      ++free_extents;
      ++at;
      continue;
    }
    const Slab& slab = slabs_[at];
    expect(slab_of_[at] == at && slab.extents != 0, "a slab does not start where it says", at);
    if (slab.extents == 0) break;
    const auto used = std::ranges::count(slab.used_slots, true);
    const auto busy = std::ranges::count(slab.busy_slots, true);
    std::size_t free = 0;
    for (std::uint32_t slot = slab.first_free; slot != kNone && free <= slab.owners.size(); ++free) {
      expect(!slab.used_slots[slot], "a used slot is listed as free", at);
      slot = slab.owners[slot];
    }
    expect(static_cast<std::uint32_t>(used) == slab.used && used > 0, "used slots are miscounted", at);
    expect(static_cast<std::uint32_t>(busy) == slab.busy, "busy slots are miscounted", at);
    expect(free + slab.used == slab.owners.size(), "free slots are miscounted", at);
    expect(slab.listed == (slab.first_free != kNone),
           "a slab with free slots is not listed, or a full one is", at);
    expect(slab.owners.size() * slot_bytes_of(slab.size_class) <= slab.extents * geometry_.extent_bytes,
           "slots reach beyond the slab", at);
    used_bytes += slab.used * slot_bytes_of(slab.size_class);
    at += slab.extents;
  }
  expect(used_bytes == used_bytes_, "used bytes are miscounted", 0);
  expect(free_extents == free_extents_, "free extents are miscounted", 0);
  return found;
}

}  // namespace dfkv
