// Who owns a route: a fixed table of slots, filled by weighted rendezvous hashing.
//
// The arithmetic is that of placement rule 1 (docs/formats.md): integers only, the same in every language.
// Changing one node's weight or taking it out moves only slots from or to that node. The number of slots
// bounds how far a share strays from its weight: by one part in the square root of the node's slots, so that
// the largest of 64 shares is a few percent off and the largest of 1,000 about a tenth.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "wire/identity.h"
#include "wire/view.h"

namespace dfkv::client {

class Ring {
 public:
  static constexpr unsigned kSlotBits = 20;
  static constexpr std::uint32_t kSlots = 1U << kSlotBits;
  static constexpr std::size_t kMaxMembers = kMaxViewNodes;

  struct Member {
    std::string_view id;
    std::uint32_t weight = 0;

    friend bool operator==(const Member&, const Member&) = default;
  };

  Ring() = default;  // owns nothing: empty()
  // Takes time with kSlots x members. Throws std::invalid_argument when there are more than kMaxMembers.
  explicit Ring(std::span<const Member> members);
  // The same table, made from that of other members: takes time with what differs. Shares it if nothing does.
  Ring(std::span<const Member> members, const Ring& before);

  [[nodiscard]] bool empty() const { return slots_ == nullptr; }
  // Position of the owner in `members`. Not on an empty ring.
  [[nodiscard]] std::uint32_t owner(Route route) const { return (*slots_)[slot_of(route)]; }

  // Slots of each member.
  [[nodiscard]] std::vector<std::uint32_t> counts() const;

  [[nodiscard]] static std::uint64_t mix(std::uint64_t x) {
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ULL;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBULL;
    x ^= x >> 31;
    return x;
  }
  [[nodiscard]] static std::uint32_t slot_of(Route route) {
    return static_cast<std::uint32_t>(mix(route) >> (64 - kSlotBits));
  }

 private:
  using Slots = std::vector<std::uint16_t>;
  struct Node {
    std::string id;
    std::uint64_t seed = 0;
    std::uint32_t weight = 0;
  };
  class Contest;

  void take_members(std::span<const Member> members);
  void fill();
  void fill_from(const Ring& before);

  std::vector<Node> nodes_;
  std::shared_ptr<const Slots> slots_;  // null: no node has weight
};

// Reads go to serving and draining nodes by their read weight, writes to serving nodes by their write weight.
// Positions are those of view.nodes. `before`: a ring of an earlier view, to start from.
[[nodiscard]] Ring read_ring(const View& view, const Ring& before = {});
[[nodiscard]] Ring write_ring(const View& view, const Ring& before = {});

}  // namespace dfkv::client
