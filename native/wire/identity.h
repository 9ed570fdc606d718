// What makes a KV block the same block: namespace, block, part, route. Bytes in docs/formats.md.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "wire/bytes.h"
#include "wire/sha256.h"

namespace dfkv {

template <typename Tag>
struct Id16 {
  std::array<std::byte, 16> bytes{};
  auto operator<=>(const Id16&) const = default;
};
using NamespaceId = Id16<struct NamespaceTag>;
using BlockId = Id16<struct BlockTag>;
using Part = std::uint64_t;
using Route = std::uint64_t;

struct ObjectKey {
  NamespaceId ns;
  BlockId block;
  Part part = 0;
  auto operator<=>(const ObjectKey&) const = default;
};

// A chunk is the unit of eviction: all parts of one block id in one namespace.
struct ChunkKey {
  NamespaceId ns;
  BlockId block;
  auto operator<=>(const ChunkKey&) const = default;
};

inline constexpr Part kAllParts = ~Part{0};  // REMOVE: every part of the chunk; never a stored part

// group | component | stage | cp_index | shard_index | shard_count | zero: 8, 8, 16, 8, 8, 8, 8 bits, from
// the low end.
struct PartFields {
  std::uint8_t group = 0;
  std::uint8_t component = 0;
  std::uint16_t stage = 0;
  std::uint8_t cp_index = 0;
  std::uint8_t shard_index = 0;
  std::uint8_t shard_count = 0;  // 0: replicated
  auto operator<=>(const PartFields&) const = default;
};
[[nodiscard]] Part encode_part(const PartFields& fields);
[[nodiscard]] std::optional<PartFields> decode_part(Part part);  // nullopt: the zero bits are not zero

// Route of a chunk under placement rule 1: the first 8 bytes of its own block id.
[[nodiscard]] Route route_of(const BlockId& chunk);

// SHA-256("dfkv.ns.1" || descriptor), first 16 bytes. The descriptor is {u16 tag, u32 length, bytes} in
// ascending tag order, each tag once.
[[nodiscard]] NamespaceId namespace_id(Bytes descriptor);

struct DescriptorField {
  std::uint16_t tag;
  Bytes value;
};
inline constexpr std::size_t kMaxDescriptorBytes = 64 * 1024;
// nullopt: not canonical (order, duplicate, truncation, too large).
[[nodiscard]] std::optional<std::vector<DescriptorField>> parse_descriptor(Bytes descriptor);
// Tags whose values differ or that only one side has, ascending.
[[nodiscard]] std::vector<std::uint16_t> descriptor_difference(Bytes a, Bytes b);

// SHA-256("dfkv.opq.1" || u8 algorithm || u32 length || hash || extras), first 16 bytes.
[[nodiscard]] BlockId opaque_block_id(std::uint8_t algorithm, Bytes hash, Bytes extras);

struct Extra {
  std::uint8_t tag;
  std::vector<std::byte> value;
};

// The own chain: h0 = SHA-256("dfkv.block.1"),
// hi = SHA-256("dfkv.blk.1" || h(i-1) || u32 n || n x u32 token || u16 m || m x {u8 tag, u32 length, bytes}).
class BlockChain {
 public:
  BlockChain();
  explicit BlockChain(const Sha256Digest& resume_from) : tip_(resume_from) {}
  // Extras are sorted by (tag, bytes) here. Returns the first 16 bytes of the new tip.
  BlockId append(std::span<const std::uint32_t> tokens, std::vector<Extra> extras);
  BlockId append(std::span<const std::uint32_t> tokens);
  [[nodiscard]] const Sha256Digest& tip() const { return tip_; }

 private:
  Sha256Digest tip_;
};

struct Id16Hash {
  template <typename Tag>
  std::size_t operator()(const Id16<Tag>& id) const {
    return load_le<std::uint64_t>(id.bytes.data() + 8);
  }
};

}  // namespace dfkv
