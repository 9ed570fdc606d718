// Namespaces of a slab store, and the names of objects in its index.
#include <utility>

#include "slab/slab_store.h"

namespace dfkv {

namespace {
constexpr std::uint32_t kMaxSpaces = 0xFFFF;

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}
}  // namespace

std::uint32_t SlabStore::owner_of(std::uint32_t space, std::uint32_t generation) {
  return (generation & 0x7FFF) << 16 | space;
}

std::uint64_t SlabStore::ghost_hash(std::uint64_t tag) {
  return mix(tag >> SlotIndex::kPartBits, 0x9E3779B97F4A7C15U);
}

// The generation is part of it: erasing a namespace makes everything in it unreachable at once.
std::uint64_t SlabStore::chunk_tag(const NamespaceId& ns, std::uint32_t generation,
                                   const BlockId& block) const {
  const std::byte* const space = ns.bytes.data();
  const std::byte* const id = block.bytes.data();
  const std::uint64_t first =
      mix(load_le<std::uint64_t>(space) ^ seed_[0], load_le<std::uint64_t>(space + 8) ^ seed_[1]);
  const std::uint64_t second =
      mix(load_le<std::uint64_t>(id) ^ first ^ generation, load_le<std::uint64_t>(id + 8) ^ seed_[1]);
  return mix(second ^ seed_[0], 0x9E3779B97F4A7C15U);
}

std::uint64_t SlabStore::tag_of(std::uint64_t chunk, Part part) const {
  constexpr std::uint64_t kPartMask = (std::uint64_t{1} << SlotIndex::kPartBits) - 1;
  const std::uint64_t tag = (chunk & ~kPartMask) | (mix(chunk ^ seed_[1], part ^ seed_[0]) & kPartMask);
  return tag == 0 ? kPartMask : tag;
}

std::optional<std::uint64_t> SlabStore::tag_of(const ObjectKey& key) const {
  const auto space = space_index_.find(key.ns);
  if (space == space_index_.end()) return std::nullopt;
  return tag_of(chunk_tag(key.ns, spaces_[space->second].generation, key.block), key.part);
}

std::uint32_t SlabStore::add_space(const NamespaceInfo& info, std::uint32_t generation) {
  const auto index = static_cast<std::uint32_t>(spaces_.size());
  Space space;
  space.info = info;
  space.generation = generation;
  spaces_.push_back(std::move(space));
  space_index_.emplace(info.id, index);
  return index;
}

void SlabStore::put_namespace(const NamespaceInfo& info) {
  const std::lock_guard lock(mutex_);
  const auto known = space_index_.find(info.id);
  if (known == space_index_.end()) {
    if (spaces_.size() >= kMaxSpaces) return;  // its objects stay in memory
    static_cast<void>(add_space(info, 0));
    ++spaces_version_;
    return;
  }
  NamespaceInfo& old = spaces_[known->second].info;
  old.last_used_s = info.last_used_s;  // saved with the next change
  if (old.label == info.label) return;
  old.label = info.label;
  ++spaces_version_;
}

std::vector<NamespaceInfo> SlabStore::namespaces() const {
  const std::lock_guard lock(mutex_);
  std::vector<NamespaceInfo> out;
  out.reserve(spaces_.size());
  for (const Space& space : spaces_) {
    out.push_back(space.info);
    out.back().objects = space.objects;
    out.back().stored_bytes = space.slot_bytes;
  }
  return out;
}

std::uint64_t SlabStore::erase(const NamespaceId& ns) {
  const std::lock_guard lock(mutex_);
  const auto known = space_index_.find(ns);
  if (known == space_index_.end()) return 0;
  Space& space = spaces_[known->second];
  const std::uint64_t objects = space.objects;
  counts_.objects -= objects;
  space.objects = space.slot_bytes = 0;
  ++space.generation;
  space.stale = space.stale || objects != 0;
  ++spaces_version_;
  return objects;
}

}  // namespace dfkv
