// A hash table from a 64-bit hash to 32-bit values, 8 bytes an entry, in segments that grow one at a time so
// that no growth holds its owner's lock for long. It keeps no keys: the caller compares the full key of every
// candidate. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace dfkv {

class IndexTable {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  // The first value under `hash` that `matches` accepts, or kNone.
  template <typename Matches>
  [[nodiscard]] std::uint32_t find(std::uint64_t hash, Matches&& matches) const {
    const Segment& segment = segments_[segment_of(hash)];
    if (segment.entries.empty()) return kNone;
    const std::uint32_t tag = tag_of(hash);
    const std::size_t mask = segment.entries.size() - 1;
    for (std::size_t at = tag & mask; segment.entries[at].value != kNone; at = (at + 1) & mask) {
      if (segment.entries[at].tag == tag && matches(segment.entries[at].value))
        return segment.entries[at].value;
    }
    return kNone;
  }

  // Precondition: the pair is not in the table; value is not kNone.
  void insert(std::uint64_t hash, std::uint32_t value) {
    Segment& segment = segments_[segment_of(hash)];
    if ((segment.count + 1) * 4 > segment.entries.size() * 3) grow(segment);
    place(segment, {tag_of(hash), value});
    ++segment.count;
    ++size_;
  }

  // False: the pair is not in the table.
  bool erase(std::uint64_t hash, std::uint32_t value) {
    Segment& segment = segments_[segment_of(hash)];
    if (segment.entries.empty()) return false;
    const std::size_t mask = segment.entries.size() - 1;
    std::size_t at = tag_of(hash) & mask;
    while (segment.entries[at].value != value) {
      if (segment.entries[at].value == kNone) return false;
      at = (at + 1) & mask;
    }
    // Pull back what was pushed past its own place, so that no probe ends too early.
    for (std::size_t next = (at + 1) & mask; segment.entries[next].value != kNone; next = (next + 1) & mask) {
      const std::size_t home = segment.entries[next].tag & mask;
      if (((next - home) & mask) >= ((next - at) & mask)) {
        segment.entries[at] = segment.entries[next];
        at = next;
      }
    }
    segment.entries[at] = {};
    --segment.count;
    --size_;
    return true;
  }

  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  static constexpr std::size_t kSegments = 64;
  static constexpr std::size_t kFirstEntries = 16;
  struct Entry {
    std::uint32_t tag = 0;
    std::uint32_t value = kNone;
  };
  struct Segment {
    std::vector<Entry> entries;
    std::size_t count = 0;
  };

  static std::size_t segment_of(std::uint64_t hash) { return hash % kSegments; }
  static std::uint32_t tag_of(std::uint64_t hash) { return static_cast<std::uint32_t>(hash >> 32); }

  static void place(Segment& segment, Entry entry) {
    const std::size_t mask = segment.entries.size() - 1;
    std::size_t at = entry.tag & mask;
    while (segment.entries[at].value != kNone) at = (at + 1) & mask;
    segment.entries[at] = entry;
  }

  static void grow(Segment& segment) {
    std::vector<Entry> old(segment.entries.empty() ? kFirstEntries : segment.entries.size() * 2);
    old.swap(segment.entries);
    for (const Entry& entry : old) {
      if (entry.value != kNone) place(segment, entry);
    }
  }

  std::array<Segment, kSegments> segments_;
  std::size_t size_ = 0;
};

}  // namespace dfkv
