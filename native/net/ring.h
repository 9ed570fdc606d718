// Who owns a route: a fixed table of slots, filled by weighted rendezvous hashing.
//
// The arithmetic is integer only, so that every language fills the same table:
//   mix(x)      x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
//   (64 bits) slot        mix(route) >> 50, one of 16384 h           mix(xxh3_64(node id) ^ mix(slot)), 0
//   read as 1 cost        -log2(h / 2^64) with 32 fractional bits: with e the position of h's top bit and m =
//   h << (63 - e),
//               i = bits 53-62 of m, f = bits 21-52 of m,
//               (64 << 32) - ((e << 32) + L[i] + ((L[i + 1] - L[i]) * f >> 32))
//   L[i]        log2(1 + i / 1024) with 32 fractional bits, by squaring: x = (1024 + i) << 21; 32 times:
//               x = x * x >> 31, the next bit is 1 when x >= 2^32, and then x >>= 1. L[1024] = 2^32.
// A slot belongs to the node with the smallest cost / weight (compared as cost * other weight); on equality
// to the larger h, then to the smaller node id. A node of weight 0 owns nothing. Changing one node's weight
// or taking it out moves only slots from or to that node.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "wire/identity.h"
#include "wire/view.h"

namespace dfkv::client {

class Ring {
 public:
  static constexpr std::uint32_t kSlots = 16384;
  static constexpr std::size_t kMaxMembers = kMaxViewNodes;

  struct Member {
    std::string_view id;
    std::uint32_t weight = 0;
  };

  Ring() = default;  // owns nothing: empty()
  // Throws std::invalid_argument when there are more than kMaxMembers.
  explicit Ring(std::span<const Member> members);

  [[nodiscard]] bool empty() const { return slots_.empty(); }
  // Position of the owner in `members`. Not on an empty ring.
  [[nodiscard]] std::uint32_t owner(Route route) const { return slots_[slot_of(route)]; }

  [[nodiscard]] static std::uint64_t mix(std::uint64_t x) {
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ULL;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBULL;
    x ^= x >> 31;
    return x;
  }
  [[nodiscard]] static std::uint32_t slot_of(Route route) {
    return static_cast<std::uint32_t>(mix(route) >> 50);
  }

 private:
  std::vector<std::uint16_t> slots_;
};

// Reads go to serving and draining nodes by their read weight, writes to serving nodes by their write weight.
// Positions are those of view.nodes.
[[nodiscard]] Ring read_ring(const View& view);
[[nodiscard]] Ring write_ring(const View& view);

}  // namespace dfkv::client
