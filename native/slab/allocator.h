// Slots of size classes inside an arena of extents. Pure bookkeeping: it never touches the memory that it
// hands out.
//
// A *slab* is a run of extents bound to one class, cut into slots of that class. For most classes the run is
// one extent; a class whose slots would leave more than an eighth of an extent unused, or that are larger
// than an extent, takes the shortest run that wastes less. A slab whose last slot is freed goes back to the
// common pool, so that classes can shift. Not thread-safe: its owner locks.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "slab/size_class.h"

namespace dfkv {

struct SlabGeometry {
  std::uint64_t extent_bytes = 0;
  std::uint32_t extent_count = 0;

  // Extents of 256 KiB to 32 MiB, 64 of them or more, so that small arenas also serve several classes.
  // Throws std::invalid_argument when the capacity is below kMinCapacityBytes.
  static SlabGeometry for_capacity(std::uint64_t capacity_bytes);
  [[nodiscard]] std::uint64_t capacity_bytes() const { return extent_bytes * extent_count; }
};
inline constexpr std::uint64_t kMinCapacityBytes = 1024 * 1024;

struct SlotRef {
  std::uint32_t slab = 0;  // number of its first extent
  std::uint32_t slot = 0;
  bool operator==(const SlotRef&) const = default;
};

class SlabAllocator {
 public:
  using Owner = std::uint32_t;  // what the caller keeps in the slot; any value but kNoOwner
  static constexpr Owner kNoOwner = ~Owner{0};
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  struct Run {  // whole slabs and free extents that, once empty, hold a slab of the class asked for
    std::uint32_t first = 0;
    std::uint32_t count = 0;
  };

  explicit SlabAllocator(SlabGeometry geometry);

  // A free slot of the class: from a slab that has one, else from a newly bound slab. nullopt: something must
  // go first.
  [[nodiscard]] std::optional<SlotRef> allocate(std::size_t size_class, Owner owner);
  void release(SlotRef ref);
  // Binds the slab that starts at extent `first` as it was in an earlier life: one owner for each slot,
  // kNoOwner for a free one, at least one of them not free. False: it does not fit there.
  [[nodiscard]] bool restore(std::uint32_t first, std::size_t size_class, std::span<const Owner> owners);

  // A busy slot (pinned, filling, condemned) keeps its slab out of coldest_runs().
  void set_busy(SlotRef ref, bool busy);
  // The stamp of the latest use of any object in the slab. Stamps only grow.
  void heat(SlotRef ref, std::uint64_t stamp);
  // Up to `limit` runs without busy slots that would hold a slab of the class, the one whose hottest object
  // is coldest first. They stand until the next call.
  [[nodiscard]] std::span<const Run> coldest_runs(std::size_t size_class, std::size_t limit);
  // Replaces what is in `out`.
  void owners_in(Run run, std::vector<Owner>& out) const;
  // The run that holds a slab of the class at about `extent`: at a multiple of the slab's length, or at the
  // end. nullopt: the class is too large, or a busy slot is in it.
  [[nodiscard]] std::optional<Run> run_at(std::uint32_t extent, std::size_t size_class) const;

  // The stamp of the latest use of any object in the run.
  [[nodiscard]] std::uint64_t hottest_in(Run run) const;

  [[nodiscard]] std::uint64_t offset_of(SlotRef ref) const;  // bytes from the start of the arena
  [[nodiscard]] std::uint64_t slot_bytes(SlotRef ref) const {
    return slot_bytes_of(slabs_[ref.slab].size_class);
  }
  [[nodiscard]] std::size_t class_of(SlotRef ref) const { return slabs_[ref.slab].size_class; }
  [[nodiscard]] Owner owner_of(SlotRef ref) const {  // kNoOwner: free
    return slabs_[ref.slab].used_slots[ref.slot] ? slabs_[ref.slab].owners[ref.slot] : kNoOwner;
  }
  void set_owner(SlotRef ref, Owner owner) { slabs_[ref.slab].owners[ref.slot] = owner; }
  [[nodiscard]] bool busy(SlotRef ref) const { return slabs_[ref.slab].busy_slots[ref.slot]; }
  // The first extent of the slab that an extent belongs to; kNone when it is free.
  [[nodiscard]] std::uint32_t slab_of(std::uint32_t extent) const { return slab_of_[extent]; }
  [[nodiscard]] bool fits(std::size_t size_class) const {
    return shapes_[size_class].extents <= geometry_.extent_count;
  }
  [[nodiscard]] const SlabGeometry& geometry() const { return geometry_; }
  [[nodiscard]] std::uint64_t used_bytes() const { return used_bytes_; }  // whole slots
  [[nodiscard]] std::uint32_t free_extents() const { return free_extents_; }
  [[nodiscard]] std::uint32_t slabs_of(std::size_t size_class) const { return slab_counts_[size_class]; }
  // Extents and slots per slab of the class.
  [[nodiscard]] std::uint32_t extents_per_slab(std::size_t size_class) const {
    return shapes_[size_class].extents;
  }
  [[nodiscard]] std::uint32_t slots_per_slab(std::size_t size_class) const {
    return shapes_[size_class].slots;
  }

  // Recounts everything. Returns what is inconsistent, empty when nothing is.
  [[nodiscard]] std::vector<std::string> violations() const;

 private:
  struct Shape {
    std::uint32_t extents = 0;
    std::uint32_t slots = 0;
  };
  struct Slab {  // meaningful at the first extent of a bound run
    std::size_t size_class = 0;
    std::uint32_t extents = 0;
    std::uint32_t used = 0;
    std::uint32_t busy = 0;
    std::uint64_t hottest = 0;
    std::vector<Owner> owners;         // per slot; of a free one, the next free slot
    std::vector<bool> used_slots;      // per slot
    std::vector<bool> busy_slots;      // per slot
    std::uint32_t first_free = kNone;  // the slot freed last is used first, while it is in cache
    std::uint32_t next = kNone;        // list of the class's slabs with a free slot
    std::uint32_t previous = kNone;
    bool listed = false;
  };

  struct Candidate {  // for coldest_runs()
    std::uint64_t hottest = 0;
    std::uint64_t used_bytes = 0;
    Run run;
  };

  [[nodiscard]] Shape shape_for(std::uint64_t slot_bytes) const;
  [[nodiscard]] std::uint32_t find_free_run(std::uint32_t extents) const;
  void bind(std::uint32_t first, std::size_t size_class);
  void unbind(std::uint32_t first);
  void list_add(std::uint32_t slab);
  void list_remove(std::uint32_t slab);

  SlabGeometry geometry_;
  std::array<Shape, kSizeClasses> shapes_;
  std::array<std::uint32_t, kSizeClasses> partial_;  // head of the list of slabs with a free slot
  std::array<std::uint32_t, kSizeClasses> slab_counts_{};
  std::vector<Slab> slabs_;             // one per extent
  std::vector<std::uint32_t> slab_of_;  // per extent: the first extent of its slab, kNone when free
  std::vector<Candidate> candidates_;   // kept from call to call, so that none of them allocates
  std::vector<Run> runs_;
  std::uint32_t free_extents_ = 0;
  std::uint64_t used_bytes_ = 0;
};

}  // namespace dfkv
