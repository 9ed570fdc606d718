#include "ram/catalog.h"

#include <algorithm>
#include <cassert>
#include <functional>
#include <random>
#include <stdexcept>

namespace dfkv {

namespace {

constexpr std::size_t kWindow = 1024;  // chunks looked at before a run is cleared
constexpr std::size_t kRunsTried = 8;
constexpr std::size_t kLastResort = 65536;  // chunks looked at before giving up
constexpr std::uint32_t kShortPartList = 8;
constexpr std::uint64_t kBytesPerGhost = 64 * 1024;

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

CatalogOptions checked(CatalogOptions options) {
  if (options.max_object_bytes == 0 || options.max_object_bytes > kMaxSlotBytes) {
    throw std::invalid_argument("max_object_bytes is " + std::to_string(options.max_object_bytes) +
                                "; choose 1 to " + std::to_string(kMaxSlotBytes));
  }
  for (const double fraction : {options.max_leased_fraction, options.max_filling_fraction}) {
    if (!(fraction >= 0 && fraction <= 1)) {
      throw std::invalid_argument("a fraction of the capacity is " + std::to_string(fraction) +
                                  "; choose 0 to 1");
    }
  }
  if (!options.policy) options.policy = make_eviction_policy(kDefaultEvictionPolicy);
  return options;
}

}  // namespace

Catalog::Catalog(CatalogOptions options)
    : options_(checked(std::move(options))),
      allocator_(SlabGeometry::for_capacity(options_.capacity_bytes)),
      policy_(std::move(options_.policy)),
      ghost_(std::clamp<std::uint64_t>(options_.capacity_bytes / kBytesPerGhost, 4096, 4 << 20)) {
  const auto capacity = static_cast<double>(allocator_.geometry().capacity_bytes());
  max_filling_bytes_ = static_cast<std::uint64_t>(capacity * options_.max_filling_fraction);
  max_leased_bytes_ = static_cast<std::uint64_t>(capacity * options_.max_leased_fraction);
  std::random_device random;
  for (std::uint64_t& seed : seed_) seed = (std::uint64_t{random()} << 32 | random()) | 1;
}

std::uint64_t Catalog::hash_of(const ChunkKey& key) const {
  const std::byte* const ns = key.ns.bytes.data();
  const std::byte* const block = key.block.bytes.data();
  const std::uint64_t space =
      mix(load_le<std::uint64_t>(ns) ^ seed_[0], load_le<std::uint64_t>(ns + 8) ^ seed_[1]);
  const std::uint64_t hash =
      mix(load_le<std::uint64_t>(block) ^ space, load_le<std::uint64_t>(block + 8) ^ seed_[1]);
  return mix(hash ^ seed_[0], 0x9E3779B97F4A7C15U) & options_.index_hash_mask;
}

std::uint64_t Catalog::hash_of(const ObjectKey& key) const {
  return mix(hash_of(ChunkKey{key.ns, key.block}) ^ seed_[1], key.part ^ seed_[0]) & options_.index_hash_mask;
}

// ---- reading
// --------------------------------------------------------------------------------------------------------

Catalog::ChunkId Catalog::find_chunk(NamespaceIndex ns, const ChunkKey& key) {
  const ChunkId chunk =
      chunk_index_.find(hash_of(key), [&](std::uint32_t id) { return chunks_[id].key == key; });
  if (chunk == kNone) return kNone;
  if (chunks_[chunk].generation != usage(ns).generation) {
    drop_chunk(chunk, Departure::kRemoved);
    return kNone;
  }
  return chunk;
}

Catalog::ObjectId Catalog::find_part(ChunkId id, Part part) const {
  const Chunk& chunk = chunks_[id];
  if (chunk.parts > kShortPartList) {
    return object_index_.find(
        hash_of(ObjectKey{chunk.key.ns, chunk.key.block, part}),
        [&](std::uint32_t object) { return objects_[object].chunk == id && objects_[object].part == part; });
  }
  ObjectId object = chunk.first;
  while (object != kNone && objects_[object].part != part) object = objects_[object].next;
  return object;
}

Catalog::ObjectId Catalog::find(NamespaceIndex ns, const ObjectKey& key) {
  const ObjectId id = object_index_.find(hash_of(key), [&](std::uint32_t candidate) {
    const Object& object = objects_[candidate];
    return object.part == key.part && chunks_[object.chunk].key == ChunkKey{key.ns, key.block};
  });
  if (id == kNone) return kNone;
  const ChunkId chunk = objects_[id].chunk;
  if (chunks_[chunk].generation != usage(ns).generation) {
    drop_chunk(chunk, Departure::kRemoved);
    return kNone;
  }
  return id;
}

Status Catalog::miss_reason(const ChunkKey& key) const {
  return ghost_.contains(hash_of(key)) ? Status::kMissEvicted : Status::kMissNotFound;
}

void Catalog::touch(std::span<const ChunkId> batch) {
  policy_->touch(batch);
  heat(batch);
}

void Catalog::stored(std::span<const ChunkId> batch) {
  policy_->stored(batch);
  heat(batch);
}

void Catalog::heat(std::span<const ChunkId> batch) {
  ++stamp_;
  for (const ChunkId chunk : batch) {
    for (ObjectId id = chunks_[chunk].first; id != kNone; id = objects_[id].next) {
      allocator_.heat(objects_[id].slot, stamp_);
    }
  }
}

// ---- pins
// -----------------------------------------------------------------------------------------------------------

void Catalog::add_pin(ObjectId id) {
  Object& object = objects_[id];
  if (object.pins++ == 0) allocator_.set_busy(object.slot, true);
  if (object.chunk != kNone) ++chunks_[object.chunk].pins;
}

void Catalog::drop_pin(ObjectId id) {
  Object& object = objects_[id];
  assert(object.pins > 0);
  if (object.chunk != kNone) --chunks_[object.chunk].pins;
  if (--object.pins != 0) return;
  if (object.state == SlotState::kCondemned) {
    --counts_.condemned;
    free_object(id);
  } else {
    allocator_.set_busy(object.slot, false);
  }
}

void Catalog::pin(ObjectId id) {
  ++counts_.pins;
  add_pin(id);
}

void Catalog::unpin(ObjectId id) {
  assert(counts_.pins > 0);
  --counts_.pins;
  drop_pin(id);
}

bool Catalog::pin_for_lease(ObjectId id) {
  Object& object = objects_[id];
  if (object.leases == 0) {
    const std::uint64_t bytes = allocator_.slot_bytes(object.slot);
    if (counts_.leased_bytes + bytes > max_leased_bytes_) return false;
    counts_.leased_bytes += bytes;
  }
  ++object.leases;
  ++counts_.lease_pins;
  add_pin(id);
  return true;
}

void Catalog::unpin_for_lease(ObjectId id) {
  Object& object = objects_[id];
  assert(object.leases > 0);
  --counts_.lease_pins;
  if (--object.leases == 0) counts_.leased_bytes -= allocator_.slot_bytes(object.slot);
  drop_pin(id);
}

// ---- writing
// --------------------------------------------------------------------------------------------------------

Catalog::Fill Catalog::begin_fill(NamespaceIndex ns, std::uint32_t length) {
  if (length > options_.max_object_bytes) return {Status::kRefusedTooLarge};
  const std::size_t size_class = size_class_of(length);
  if (!allocator_.fits(size_class)) return {Status::kRefusedTooLarge};
  const std::uint64_t bytes = slot_bytes_of(size_class);
  if (counts_.filling > 0 && counts_.filling_bytes + bytes > max_filling_bytes_)
    return {Status::kAgainNoMemory};
  const ObjectId id = objects_.take();
  const auto slot = take_slot(size_class, id);
  if (!slot) {
    objects_.give_back(id);
    return {Status::kAgainNoMemory};
  }
  allocator_.set_busy(*slot, true);
  Object& object = objects_[id];
  object.slot = *slot;
  object.length = length;
  object.allocated = true;
  ++counts_.filling;
  counts_.filling_bytes += bytes;
  return {Status::kOk, id, usage(ns).generation};
}

void Catalog::abandon(ObjectId id) {
  assert(objects_[id].state == SlotState::kFilling);
  --counts_.filling;
  counts_.filling_bytes -= allocator_.slot_bytes(objects_[id].slot);
  free_object(id);
}

Status Catalog::publish(ObjectId id, NamespaceIndex ns, std::uint32_t generation, const ObjectKey& key,
                        Route route, std::uint64_t checksum, std::uint64_t recompute_us, bool replace) {
  if (usage(ns).generation != generation) {
    abandon(id);
    return Status::kAgainBusy;
  }
  const ObjectId old = find(ns, key);
  if (old != kNone && !replace) {
    abandon(id);
    return Status::kAlready;
  }
  const ChunkKey chunk_key{key.ns, key.block};
  ChunkId chunk = find_chunk(ns, chunk_key);
  if (chunk == kNone) chunk = add_chunk(ns, chunk_key, route);
  chunks_[chunk].recompute_us = std::max(chunks_[chunk].recompute_us, recompute_us);
  Object& object = objects_[id];
  object.part = key.part;
  object.checksum = checksum;
  object.state = SlotState::kLive;
  --counts_.filling;
  counts_.filling_bytes -= allocator_.slot_bytes(object.slot);
  allocator_.set_busy(object.slot, false);
  link_part(chunk, id);  // before the old one goes, so that the chunk never has no part
  if (old != kNone) discard(old);
  policy_->update(chunk, traits(chunks_[chunk]));
  // Of all parts only the new one: chunks may have hundreds, and each is published on its own.
  policy_->stored(std::span(&chunk, 1));
  allocator_.heat(object.slot, ++stamp_);
  return Status::kOk;
}

bool Catalog::remove(NamespaceIndex ns, const ObjectKey& key) {
  if (key.part == kAllParts) {
    const ChunkId chunk = find_chunk(ns, {key.ns, key.block});
    if (chunk == kNone) return false;
    drop_chunk(chunk, Departure::kRemoved);
    return true;
  }
  const ObjectId id = find(ns, key);
  if (id == kNone) return false;
  discard(id);
  return true;
}

void Catalog::quarantine(NamespaceIndex ns, const ObjectKey& key) {
  if (remove(ns, key)) ++counts_.quarantined;
}

// ---- namespaces
// -----------------------------------------------------------------------------------------------------

Catalog::Usage& Catalog::usage(NamespaceIndex ns) {
  if (ns >= namespaces_.size()) namespaces_.resize(ns + 1);
  return namespaces_[ns].usage;
}

std::uint64_t Catalog::begin_erase(NamespaceIndex ns) {
  Usage& now = usage(ns);
  const std::uint64_t objects = now.objects;
  now = {0, 0, now.generation + 1};
  return objects;
}

bool Catalog::continue_erase(NamespaceIndex ns, std::size_t limit) {
  const std::uint32_t generation = usage(ns).generation;
  for (std::size_t i = 0; i < limit; ++i) {
    const ChunkId chunk = namespaces_[ns].first;
    if (chunk == kNone || chunks_[chunk].generation == generation) return false;
    drop_chunk(chunk, Departure::kRemoved);
  }
  return true;
}

// ---- slots and eviction
// ---------------------------------------------------------------------------------------------

std::optional<SlotRef> Catalog::take_slot(std::size_t size_class, ObjectId owner) {
  auto slot = allocator_.allocate(size_class, owner);
  if (!slot && make_room(size_class)) slot = allocator_.allocate(size_class, owner);
  return slot;
}

// Among the coldest chunks, one that has a slot of this class costs least. Where there is none among as many
// bytes as a slab holds, the class has too little of the arena for what it is used for: another one gives up
// the run of extents that was used longest ago.
bool Catalog::make_room(std::size_t size_class) {
  std::uint64_t colder_bytes = 0;
  std::uint64_t window_bytes = allocator_.extents_per_slab(size_class) * allocator_.geometry().extent_bytes;
  const auto of_class = [this, size_class, &colder_bytes, &window_bytes](ChunkId id) {
    const Chunk& chunk = chunks_[id];
    if (chunk.pins != 0) return Verdict::kInUse;
    if (has_class(chunk, size_class)) return Verdict::kTake;
    colder_bytes += chunk.slot_bytes;
    return colder_bytes < window_bytes ? Verdict::kSkip : Verdict::kStop;
  };
  if (const auto chunk = policy_->victim(kWindow, std::cref(of_class))) {
    drop_chunk(*chunk, Departure::kEvicted);
    return true;
  }
  for (const auto run : allocator_.coldest_runs(size_class, kRunsTried)) {
    if (clear_run(run)) return true;
  }
  window_bytes = ~std::uint64_t{0};
  if (const auto chunk = policy_->victim(kLastResort, std::cref(of_class))) {
    drop_chunk(*chunk, Departure::kEvicted);
    return true;
  }
  return false;
}

bool Catalog::clear_run(SlabAllocator::Run run) {
  allocator_.owners_in(run, cleared_);
  // A slot that is free of pins may belong to a chunk with a pinned part elsewhere; then the chunk stays.
  for (const ObjectId id : cleared_) {
    if (chunks_[objects_[id].chunk].pins != 0) return false;
  }
  for (const ObjectId id : cleared_) {
    // One chunk may have several parts here: they went with the first.
    if (objects_[id].allocated) drop_chunk(objects_[id].chunk, Departure::kEvicted);
  }
  return true;
}

bool Catalog::has_class(const Chunk& chunk, std::size_t size_class) const {
  if ((chunk.classes[size_class / 64] >> (size_class % 64) & 1) == 0) return false;
  for (ObjectId id = chunk.first; id != kNone; id = objects_[id].next) {
    if (allocator_.class_of(objects_[id].slot) == size_class) return true;
  }
  return false;
}

}  // namespace dfkv
