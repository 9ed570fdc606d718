// Which slots of a slab store hold which keys: hash chains through one node for each slot, 16 bytes each, and
// 2 to 4 bytes a slot for the heads of the chains. It keeps no keys, only a 64-bit tag of each: 40 bits of
// the chunk (with its namespace) and 24 of the part. The record in the table has the whole key, and every
// read compares it.
//
// All parts of a chunk are in one chain. Not thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace dfkv {

// Slots are numbered by their record: extent of the slab times records of an extent, plus slot of the slab.
using SlotNumber = std::uint32_t;
inline constexpr SlotNumber kNoSlot = ~SlotNumber{0};

class SlotIndex {
 public:
  struct Node {
    std::uint64_t tag = 0;  // 0: not in the index
    SlotNumber next = kNoSlot;
    std::uint32_t stamp = 0;  // of the latest use
  };
  static constexpr unsigned kPartBits = 24;

  // record_shift: log2 of the records of an extent.
  SlotIndex(std::uint32_t extents, unsigned record_shift)
      : shift_(record_shift), mask_((std::uint32_t{1} << record_shift) - 1), slabs_(extents) {}

  void bind(std::uint32_t slab, std::uint32_t slots) {
    const auto spare = std::ranges::find_if(spares_, [slots](const std::vector<Node>& nodes) {
      return nodes.capacity() >= slots && nodes.capacity() <= slots + slots / 8;
    });
    if (spare != spares_.end()) {
      slabs_[slab] = std::move(*spare);
      spares_.erase(spare);
    }
    slabs_[slab].assign(slots, Node{});
  }
  void unbind(std::uint32_t slab) {  // precondition: none of its slots is in the index
    if (spares_.size() == kMaxSpares) spares_.erase(spares_.begin());
    spares_.push_back(std::exchange(slabs_[slab], {}));
  }
  [[nodiscard]] bool bound(std::uint32_t slab) const { return !slabs_[slab].empty(); }

  [[nodiscard]] Node& node(SlotNumber slot) { return slabs_[slot >> shift_][slot & mask_]; }
  [[nodiscard]] const Node& node(SlotNumber slot) const { return slabs_[slot >> shift_][slot & mask_]; }

  [[nodiscard]] static bool same_chunk(std::uint64_t a, std::uint64_t b) {
    return ((a ^ b) >> kPartBits) == 0;
  }

  // The slot whose tag this is, or kNoSlot.
  [[nodiscard]] SlotNumber find(std::uint64_t tag) const {
    SlotNumber slot = first(tag);
    while (slot != kNoSlot && node(slot).tag != tag) slot = node(slot).next;
    return slot;
  }
  // Every slot of the chunk that `tag` is of. `visit` must not change the index.
  template <typename Visit>
  void for_chunk(std::uint64_t tag, Visit&& visit) const {
    for (SlotNumber slot = first(tag); slot != kNoSlot; slot = node(slot).next) {
      if (same_chunk(node(slot).tag, tag)) visit(slot);
    }
  }

  // Preconditions: the slot is not in the index; the tag is neither 0 nor in it.
  void insert(std::uint64_t tag, SlotNumber slot) {
    Segment& segment = segments_[segment_of(tag)];
    if (segment.count >= segment.heads.size() * 2) grow(segment);
    node(slot).tag = tag;
    push(segment, slot);
    ++segment.count;
    ++size_;
  }
  // Precondition: the slot is in the index.
  void erase(SlotNumber slot) {
    Node& gone = node(slot);
    Segment& segment = segments_[segment_of(gone.tag)];
    SlotNumber* link = &head(segment, gone.tag);
    while (*link != slot) link = &node(*link).next;
    *link = gone.next;
    gone.tag = 0;
    gone.next = kNoSlot;
    --segment.count;
    --size_;
  }
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  static constexpr std::size_t kSegments = 64;
  static constexpr std::size_t kFirstHeads = 16;
  static constexpr std::size_t kMaxSpares = 64;
  struct Segment {
    std::vector<SlotNumber> heads;
    std::size_t count = 0;
  };

  static std::size_t segment_of(std::uint64_t tag) { return tag >> 58; }
  static std::size_t head_of(const Segment& segment, std::uint64_t tag) {
    return (tag >> kPartBits) & (segment.heads.size() - 1);
  }
  static SlotNumber& head(Segment& segment, std::uint64_t tag) {
    return segment.heads[head_of(segment, tag)];
  }
  [[nodiscard]] SlotNumber first(std::uint64_t tag) const {
    const Segment& segment = segments_[segment_of(tag)];
    return segment.heads.empty() ? kNoSlot : segment.heads[head_of(segment, tag)];
  }
  void push(Segment& segment, SlotNumber slot) {
    SlotNumber& chain = head(segment, node(slot).tag);
    node(slot).next = chain;
    chain = slot;
  }
  void grow(Segment& segment) {
    std::vector<SlotNumber> old(segment.heads.empty() ? kFirstHeads : segment.heads.size() * 2, kNoSlot);
    old.swap(segment.heads);
    for (SlotNumber slot : old) {
      while (slot != kNoSlot) {
        const SlotNumber next = node(slot).next;
        push(segment, slot);
        slot = next;
      }
    }
  }

  const unsigned shift_;
  const std::uint32_t mask_;
  std::vector<std::vector<Node>> slabs_;
  // Of slabs that were unbound: extents that change hands allocate little.
  std::vector<std::vector<Node>> spares_;
  std::array<Segment, kSegments> segments_;
  std::size_t size_ = 0;
};

}  // namespace dfkv
