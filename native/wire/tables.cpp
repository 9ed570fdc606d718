// The tables that travel packed in the payload of a request frame.
#include <algorithm>

#include "wire/meta.h"

namespace dfkv {

namespace {

constexpr std::size_t kTableHeadBytes = 8;

template <typename T>
std::byte* put(std::byte* at, T value) {
  store_le(at, value);
  return at + sizeof value;
}

std::byte* put_block(std::byte* at, const BlockId& block) {
  return std::copy(block.bytes.begin(), block.bytes.end(), at);
}

BlockId get_block(const std::byte* at) {
  BlockId block;
  std::copy_n(at, block.bytes.size(), block.bytes.begin());
  return block;
}

std::byte* grow(std::vector<std::byte>& out, std::size_t bytes) {
  const std::size_t before = out.size();
  out.resize(before + bytes);
  return out.data() + before;
}

}  // namespace

void encode_exists_table(const ExistsTable& table, std::vector<std::byte>& out) {
  std::byte* at =
      grow(out, kTableHeadBytes + table.parts.size() * sizeof(Part) + table.chunks.size() * kChunkRefBytes);
  at = put(at, static_cast<std::uint32_t>(table.chunks.size()));
  at = put(at, static_cast<std::uint32_t>(table.parts.size()));
  for (const Part part : table.parts) at = put(at, part);
  for (const ChunkRef& chunk : table.chunks) at = put(put_block(at, chunk.block), chunk.route);
}

bool decode_exists_table(Bytes in, ExistsTable& out) {
  out.parts.clear();
  out.chunks.clear();
  if (in.size() < kTableHeadBytes) return false;
  const auto chunks = load_le<std::uint32_t>(in.data());
  const auto parts = load_le<std::uint32_t>(in.data() + 4);
  if (chunks == 0 || chunks > kMaxChunksPerRequest || parts == 0 || parts > kMaxPartsPerRequest) return false;
  if (in.size() !=
      kTableHeadBytes + std::size_t{parts} * sizeof(Part) + std::size_t{chunks} * kChunkRefBytes) {
    return false;
  }
  const std::byte* at = in.data() + kTableHeadBytes;
  out.parts.resize(parts);
  for (Part& part : out.parts) {
    part = load_le<Part>(at);
    if (!decode_part(part)) return false;
    at += sizeof(Part);
  }
  out.chunks.resize(chunks);
  for (ChunkRef& chunk : out.chunks) {
    chunk = {get_block(at), load_le<Route>(at + 16)};
    at += kChunkRefBytes;
  }
  return true;
}

void encode_item_table(std::span<const ItemRef> items, std::vector<std::byte>& out) {
  std::byte* at = grow(out, kTableHeadBytes + items.size() * kItemRefBytes);
  at = put(at, static_cast<std::uint32_t>(items.size()));
  at = put(at, std::uint32_t{0});
  for (const ItemRef& item : items) {
    at = put_block(at, item.block);
    at = put(at, item.part);
    at = put(at, item.route);
    at = put(at, item.length);
    at = put(at, std::uint32_t{0});
  }
}

bool decode_item_table(Bytes in, std::vector<ItemRef>& out) {
  out.clear();
  if (in.size() < kTableHeadBytes) return false;
  const auto items = load_le<std::uint32_t>(in.data());
  if (items == 0 || items > kMaxItemsPerRequest || load_le<std::uint32_t>(in.data() + 4) != 0) return false;
  if (in.size() != kTableHeadBytes + std::size_t{items} * kItemRefBytes) return false;
  const std::byte* at = in.data() + kTableHeadBytes;
  out.resize(items);
  for (ItemRef& item : out) {
    item = {get_block(at), load_le<Part>(at + 16), load_le<Route>(at + 24), load_le<std::uint32_t>(at + 32)};
    const bool part_valid = item.part == kAllParts || decode_part(item.part).has_value();
    if (!part_valid || load_le<std::uint32_t>(at + 36) != 0) return false;
    at += kItemRefBytes;
  }
  return true;
}

}  // namespace dfkv
