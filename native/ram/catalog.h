// What the RAM store holds and where: chunks, their parts, slots, the order of eviction. It knows offsets,
// not memory, and reads no clock. Not thread-safe: RamStore locks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "slab/allocator.h"
#include "slab/eviction.h"
#include "slab/ghost.h"
#include "slab/index_table.h"
#include "slab/pool.h"
#include "wire/identity.h"
#include "wire/status.h"

namespace dfkv {

enum class SlotState : std::uint8_t {
  kFilling,    // being written; nobody can find it
  kLive,       // found by its key
  kCondemned,  // evicted, removed or replaced while pinned; the last unpin frees it
};

struct CatalogOptions {
  std::uint64_t capacity_bytes = 0;
  std::uint64_t max_object_bytes = 64 * 1024 * 1024;
  double max_filling_fraction = 0.5;  // of the capacity that unfinished PUTs may hold
  double max_leased_fraction = 0.5;   // of the capacity that leases may keep from eviction
  // Bits of the key hash that the index uses. Tests narrow it, so that every lookup meets colliding keys.
  std::uint64_t index_hash_mask = ~std::uint64_t{0};
  std::unique_ptr<EvictionPolicy> policy;  // null: kDefaultEvictionPolicy
};

class Catalog {
 public:
  using ObjectId = std::uint32_t;
  using ChunkId = std::uint32_t;
  using NamespaceIndex = std::uint32_t;
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  struct Object {
    Part part = 0;
    std::uint64_t checksum = 0;
    SlotRef slot;
    std::uint32_t length = 0;
    ChunkId chunk = kNone;  // while live
    ObjectId next = kNone;  // parts of one chunk
    ObjectId previous = kNone;
    std::uint32_t pins = 0;    // by reads and leases together
    std::uint32_t leases = 0;  // of those, by leases
    SlotState state = SlotState::kFilling;
    bool allocated = false;  // false: the number is not in use
  };
  // Objects and payload of the current generation; stale chunks, which an erase left behind, are not counted.
  struct Usage {
    std::uint64_t objects = 0;
    std::uint64_t stored_bytes = 0;
    std::uint32_t generation = 0;
  };
  struct Counts {
    std::uint64_t stored_bytes = 0, objects = 0, filling = 0, filling_bytes = 0, condemned = 0;
    std::uint64_t pins = 0;  // by reads
    std::uint64_t lease_pins = 0, leased_bytes = 0;
    std::uint64_t evicted_objects = 0, evicted_bytes = 0, quarantined = 0;
  };
  struct Fill {
    Status status = Status::kOk;
    ObjectId object = kNone;
    std::uint32_t generation = 0;  // of the namespace when it began
  };

  explicit Catalog(CatalogOptions options);

  // ---- reading
  [[nodiscard]] ChunkId find_chunk(NamespaceIndex ns, const ChunkKey& key);
  [[nodiscard]] ObjectId find_part(ChunkId chunk, Part part) const;
  [[nodiscard]] ObjectId find(NamespaceIndex ns, const ObjectKey& key);
  [[nodiscard]] Status miss_reason(const ChunkKey& key) const;  // kMissEvicted or kMissNotFound
  [[nodiscard]] const Object& object(ObjectId id) const { return objects_[id]; }
  [[nodiscard]] std::uint64_t offset_of(ObjectId id) const { return allocator_.offset_of(objects_[id].slot); }
  [[nodiscard]] std::uint64_t slot_bytes(ObjectId id) const {
    return allocator_.slot_bytes(objects_[id].slot);
  }
  [[nodiscard]] ObjectId first_part(ChunkId chunk) const { return chunks_[chunk].first; }
  // One batch was read, in the order of the prefix.
  void touch(std::span<const ChunkId> batch);
  // One batch was written, or found written already.
  void stored(std::span<const ChunkId> batch);

  // ---- pins. A pinned object is neither moved, nor changed, nor given to another.
  void pin(ObjectId id);
  void unpin(ObjectId id);
  // False: the leases would hold more than max_leased_fraction.
  [[nodiscard]] bool pin_for_lease(ObjectId id);
  void unpin_for_lease(ObjectId id);

  // ---- writing
  // Takes a slot, evicting what it must. kAgainNoMemory: everything that would have to go is in use. length >
  // 0.
  [[nodiscard]] Fill begin_fill(NamespaceIndex ns, std::uint32_t length);
  void abandon(ObjectId id);
  // Makes a filled object visible. kAlready: the key is stored and `replace` is not set; kAgainBusy: the
  // namespace was erased meanwhile. In both cases the slot is freed.
  [[nodiscard]] Status publish(ObjectId id, NamespaceIndex ns, std::uint32_t generation, const ObjectKey& key,
                               Route route, std::uint64_t checksum, std::uint64_t recompute_us, bool replace);
  [[nodiscard]] bool remove(NamespaceIndex ns, const ObjectKey& key);  // kAllParts: the chunk
  void quarantine(NamespaceIndex ns, const ObjectKey& key);

  // ---- namespaces
  [[nodiscard]] Usage& usage(NamespaceIndex ns);
  [[nodiscard]] Usage usage_of(NamespaceIndex ns) const {
    return ns < namespaces_.size() ? namespaces_[ns].usage : Usage{};
  }
  // Everything of the namespace stops being visible, in O(1). Returns how many objects that are.
  std::uint64_t begin_erase(NamespaceIndex ns);
  // Frees up to `limit` erased chunks. False: none is left.
  [[nodiscard]] bool continue_erase(NamespaceIndex ns, std::size_t limit);

  [[nodiscard]] const Counts& counts() const { return counts_; }
  [[nodiscard]] std::uint64_t capacity_bytes() const { return allocator_.geometry().capacity_bytes(); }
  [[nodiscard]] std::uint64_t used_bytes() const { return allocator_.used_bytes(); }
  [[nodiscard]] std::uint32_t chunks() const { return chunks_.live(); }
  // Recounts everything. Returns what is inconsistent, empty when nothing is.
  [[nodiscard]] std::vector<std::string> violations() const;

 private:
  struct Chunk {
    ChunkKey key;
    Route route = 0;
    std::uint64_t slot_bytes = 0;
    std::uint64_t recompute_us = 0;
    std::uint64_t classes[2] = {0, 0};  // which size classes its parts have had: says no cheaply
    ObjectId first = kNone;
    std::uint32_t parts = 0;
    std::uint32_t pins = 0;  // of all its parts
    NamespaceIndex ns = kNone;
    std::uint32_t generation = 0;
    ChunkId ns_next = kNone;  // chunks of one namespace, oldest first
    ChunkId ns_previous = kNone;
    bool allocated = false;
  };
  struct Namespace {
    Usage usage;
    ChunkId first = kNone;
    ChunkId last = kNone;
  };

  [[nodiscard]] std::uint64_t hash_of(const ChunkKey& key) const;
  [[nodiscard]] std::uint64_t hash_of(const ObjectKey& key) const;
  [[nodiscard]] std::optional<SlotRef> take_slot(std::size_t size_class, ObjectId owner);
  [[nodiscard]] bool make_room(std::size_t size_class);
  [[nodiscard]] bool clear_run(SlabAllocator::Run run);
  [[nodiscard]] bool has_class(const Chunk& chunk, std::size_t size_class) const;
  [[nodiscard]] ChunkId add_chunk(NamespaceIndex ns, const ChunkKey& key, Route route);
  void link_part(ChunkId chunk, ObjectId id);
  void unlink_part(ObjectId id);  // from its chunk and the index; the chunk goes with its last part
  void discard(ObjectId id);      // unlinks, then frees or condemns
  void drop_chunk(ChunkId chunk, Departure departure);
  void free_object(ObjectId id);
  void add_pin(ObjectId id);
  void drop_pin(ObjectId id);
  void heat(std::span<const ChunkId> batch);
  [[nodiscard]] ChunkTraits traits(const Chunk& chunk) const;

  CatalogOptions options_;
  std::uint64_t max_filling_bytes_;
  std::uint64_t max_leased_bytes_;
  std::uint64_t seed_[2];  // random: crafted block ids must not pile up in one place of the index
  SlabAllocator allocator_;
  std::vector<SlabAllocator::Owner> cleared_;  // by clear_run()
  std::unique_ptr<EvictionPolicy> policy_;
  IndexTable chunk_index_;
  IndexTable object_index_;
  Pool<Object> objects_;
  Pool<Chunk> chunks_;
  std::vector<Namespace> namespaces_;
  GhostFilter ghost_;
  std::uint64_t stamp_ = 0;  // counts uses
  Counts counts_;
};

}  // namespace dfkv
