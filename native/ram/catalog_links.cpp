// How chunks, parts, slots and indexes hang together, and the check that they do.
#include <algorithm>
#include <cassert>

#include "ram/catalog.h"

namespace dfkv {

Catalog::ChunkId Catalog::add_chunk(NamespaceIndex ns, const ChunkKey& key, Route route) {
  const ChunkId id = chunks_.take();
  Chunk& chunk = chunks_[id];
  chunk.key = key;
  chunk.route = route;
  chunk.ns = ns;
  chunk.generation = usage(ns).generation;
  chunk.allocated = true;
  Namespace& space = namespaces_[ns];
  chunk.ns_previous = space.last;
  (space.last == kNone ? space.first : chunks_[space.last].ns_next) = id;
  space.last = id;
  const std::uint64_t hash = hash_of(key);
  chunk_index_.insert(hash, id);
  ghost_.erase(hash);
  policy_->insert(id, traits(chunk));
  return id;
}

void Catalog::link_part(ChunkId chunk_id, ObjectId id) {
  Chunk& chunk = chunks_[chunk_id];
  Object& object = objects_[id];
  object.chunk = chunk_id;
  object.next = chunk.first;
  if (chunk.first != kNone) objects_[chunk.first].previous = id;
  chunk.first = id;
  ++chunk.parts;
  chunk.pins += object.pins;
  chunk.slot_bytes += allocator_.slot_bytes(object.slot);
  const std::size_t size_class = allocator_.class_of(object.slot);
  chunk.classes[size_class / 64] |= std::uint64_t{1} << (size_class % 64);
  object_index_.insert(hash_of(ObjectKey{chunk.key.ns, chunk.key.block, object.part}), id);
  ++counts_.objects;
  counts_.stored_bytes += object.length;
  Usage& used = namespaces_[chunk.ns].usage;
  ++used.objects;
  used.stored_bytes += object.length;
}

void Catalog::unlink_part(ObjectId id) {
  Object& object = objects_[id];
  const ChunkId chunk_id = object.chunk;
  Chunk& chunk = chunks_[chunk_id];
  [[maybe_unused]] const bool indexed =
      object_index_.erase(hash_of(ObjectKey{chunk.key.ns, chunk.key.block, object.part}), id);
  assert(indexed);
  (object.previous == kNone ? chunk.first : objects_[object.previous].next) = object.next;
  if (object.next != kNone) objects_[object.next].previous = object.previous;
  object.chunk = object.next = object.previous = kNone;
  --chunk.parts;
  chunk.pins -= object.pins;
  chunk.slot_bytes -= allocator_.slot_bytes(object.slot);
  --counts_.objects;
  counts_.stored_bytes -= object.length;
  Usage& used = namespaces_[chunk.ns].usage;
  if (used.generation == chunk.generation) {
    --used.objects;
    used.stored_bytes -= object.length;
  }
}

void Catalog::discard(ObjectId id) {
  const ChunkId chunk = objects_[id].chunk;
  unlink_part(id);
  Object& object = objects_[id];
  if (object.pins == 0) {
    free_object(id);
  } else {
    object.state = SlotState::kCondemned;
    ++counts_.condemned;
  }
  if (chunks_[chunk].parts == 0) {
    drop_chunk(chunk, Departure::kRemoved);
  } else {
    policy_->update(chunk, traits(chunks_[chunk]));
  }
}

void Catalog::drop_chunk(ChunkId id, Departure departure) {
  Chunk& chunk = chunks_[id];
  policy_->remove(id, departure);
  while (chunk.first != kNone) {
    const ObjectId object = chunk.first;
    if (departure == Departure::kEvicted) {
      ++counts_.evicted_objects;
      counts_.evicted_bytes += objects_[object].length;
    }
    unlink_part(object);
    if (objects_[object].pins == 0) {
      free_object(object);
    } else {
      objects_[object].state = SlotState::kCondemned;
      ++counts_.condemned;
    }
  }
  const std::uint64_t hash = hash_of(chunk.key);
  [[maybe_unused]] const bool indexed = chunk_index_.erase(hash, id);
  assert(indexed);
  if (departure == Departure::kEvicted) ghost_.insert(hash);
  Namespace& space = namespaces_[chunk.ns];
  (chunk.ns_previous == kNone ? space.first : chunks_[chunk.ns_previous].ns_next) = chunk.ns_next;
  (chunk.ns_next == kNone ? space.last : chunks_[chunk.ns_next].ns_previous) = chunk.ns_previous;
  chunk.allocated = false;
  chunks_.give_back(id);
}

void Catalog::free_object(ObjectId id) {
  Object& object = objects_[id];
  assert(object.allocated && object.pins == 0 && object.leases == 0 && object.chunk == kNone);
  allocator_.set_busy(object.slot, false);
  allocator_.release(object.slot);
  object.allocated = false;
  objects_.give_back(id);
}

ChunkTraits Catalog::traits(const Chunk& chunk) const {
  return {hash_of(chunk.key), chunk.slot_bytes, chunk.recompute_us};
}

std::vector<std::string> Catalog::violations() const {
  std::vector<std::string> found = allocator_.violations();
  const auto expect = [&found](bool holds, const std::string& what) {
    if (!holds) found.push_back(what);
  };
  Counts sum;
  std::uint64_t slot_bytes = 0;
  std::uint32_t numbers = 0;
  for (ObjectId id = 0; id < objects_.end(); ++id) {
    const Object& object = objects_[id];
    if (!object.allocated) continue;
    const std::string name = "object " + std::to_string(id);
    ++numbers;
    slot_bytes += allocator_.slot_bytes(object.slot);
    expect(allocator_.owner_of(object.slot) == id, name + " does not own its slot");
    expect(object.length <= allocator_.slot_bytes(object.slot), name + " is longer than its slot");
    expect(object.pins >= object.leases, name + " has more leases than pins");
    sum.pins += object.pins - object.leases;
    sum.lease_pins += object.leases;
    if (object.leases != 0) sum.leased_bytes += allocator_.slot_bytes(object.slot);
    expect((object.chunk != kNone) == (object.state == SlotState::kLive),
           name + " is live without chunk, or the reverse");
    switch (object.state) {
      case SlotState::kFilling:
        ++sum.filling;
        sum.filling_bytes += allocator_.slot_bytes(object.slot);
        break;
      case SlotState::kLive:
        ++sum.objects;
        sum.stored_bytes += object.length;
        break;
      case SlotState::kCondemned:
        ++sum.condemned;
        expect(object.pins > 0, name + " is condemned and not pinned");
        break;
    }
  }
  expect(numbers == objects_.live(), "object numbers leak");
  expect(slot_bytes == allocator_.used_bytes(), "used bytes are not the sum of the slots");
  expect(sum.objects == counts_.objects && sum.objects == object_index_.size(), "objects are miscounted");
  expect(sum.stored_bytes == counts_.stored_bytes, "stored bytes are miscounted");
  expect(sum.pins == counts_.pins && sum.lease_pins == counts_.lease_pins, "pins are miscounted");
  expect(sum.leased_bytes == counts_.leased_bytes, "leased bytes are miscounted");
  expect(sum.filling == counts_.filling && sum.filling_bytes == counts_.filling_bytes,
         "fillings are miscounted");
  expect(sum.condemned == counts_.condemned, "condemned slots are miscounted");
  expect(policy_->consistent() && policy_->size() == chunks_.live(),
         "the eviction policy does not hold every chunk once");
  expect(chunk_index_.size() == chunks_.live(), "the index does not hold every chunk once");

  std::vector<Usage> usage(namespaces_.size());
  for (ChunkId id = 0; id < chunks_.end(); ++id) {
    const Chunk& chunk = chunks_[id];
    if (!chunk.allocated) continue;
    const std::string name = "chunk " + std::to_string(id);
    std::uint32_t parts = 0;
    std::uint32_t pins = 0;
    std::uint64_t bytes = 0;
    std::uint64_t stored = 0;
    for (ObjectId part = chunk.first; part != kNone && parts <= chunk.parts; part = objects_[part].next) {
      expect(objects_[part].chunk == id, name + " lists a part of another chunk");
      expect(find_part(id, objects_[part].part) == part, name + " has a part that is not found, or twice");
      ++parts;
      pins += objects_[part].pins;
      bytes += allocator_.slot_bytes(objects_[part].slot);
      stored += objects_[part].length;
    }
    expect(parts == chunk.parts && parts > 0, name + " miscounts its parts");
    expect(pins == chunk.pins, name + " miscounts its pins");
    expect(bytes == chunk.slot_bytes, name + " miscounts its bytes");
    expect(chunk_index_.find(hash_of(chunk.key), [id](std::uint32_t at) { return at == id; }) == id,
           name + " is not in the index");
    if (chunk.generation == namespaces_[chunk.ns].usage.generation) {
      usage[chunk.ns].objects += parts;
      usage[chunk.ns].stored_bytes += stored;
    }
  }
  for (std::size_t i = 0; i < usage.size(); ++i) {
    expect(usage[i].objects == namespaces_[i].usage.objects &&
               usage[i].stored_bytes == namespaces_[i].usage.stored_bytes,
           "namespace " + std::to_string(i) + " is miscounted");
  }
  return found;
}

}  // namespace dfkv
