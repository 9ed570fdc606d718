#include "wire/identity.h"

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>
#include <string_view>
#include <tuple>

namespace dfkv {

namespace {

Bytes text(std::string_view value) { return as_bytes(value.data(), value.size()); }

template <typename T>
void update_le(Sha256& hash, T value) {
  hash.update(as_bytes(&value, sizeof value));
}

template <typename Id>
Id first_16(const Sha256Digest& digest) {
  Id id;
  std::copy_n(digest.begin(), id.bytes.size(), id.bytes.begin());
  return id;
}

std::uint32_t checked_length(std::size_t size, const char* what) {
  if (size > std::numeric_limits<std::uint32_t>::max()) {
    throw std::length_error(std::string(what) + " is longer than 4 GiB - 1");
  }
  return static_cast<std::uint32_t>(size);
}

bool extra_less(const Extra& a, const Extra& b) {
  if (a.tag != b.tag) return a.tag < b.tag;
  return std::lexicographical_compare(a.value.begin(), a.value.end(), b.value.begin(), b.value.end());
}

}  // namespace

Part encode_part(const PartFields& fields) {
  return Part{fields.group} | Part{fields.component} << 8 | Part{fields.stage} << 16 |
         Part{fields.cp_index} << 32 | Part{fields.shard_index} << 40 | Part{fields.shard_count} << 48;
}

std::optional<PartFields> decode_part(Part part) {
  if ((part >> 56) != 0) return std::nullopt;
  PartFields fields;
  fields.group = static_cast<std::uint8_t>(part);
  fields.component = static_cast<std::uint8_t>(part >> 8);
  fields.stage = static_cast<std::uint16_t>(part >> 16);
  fields.cp_index = static_cast<std::uint8_t>(part >> 32);
  fields.shard_index = static_cast<std::uint8_t>(part >> 40);
  fields.shard_count = static_cast<std::uint8_t>(part >> 48);
  return fields;
}

Route route_of(const BlockId& chunk) { return load_le<std::uint64_t>(chunk.bytes.data()); }

NamespaceId namespace_id(Bytes descriptor) {
  Sha256 hash;
  hash.update(text("dfkv.ns.1"));
  hash.update(descriptor);
  return first_16<NamespaceId>(hash.finish());
}

std::optional<std::vector<DescriptorField>> parse_descriptor(Bytes descriptor) {
  if (descriptor.size() > kMaxDescriptorBytes) return std::nullopt;
  constexpr std::size_t kHeadBytes = 6;
  std::vector<DescriptorField> fields;
  while (!descriptor.empty()) {
    if (descriptor.size() < kHeadBytes) return std::nullopt;
    const auto tag = load_le<std::uint16_t>(descriptor.data());
    const auto length = load_le<std::uint32_t>(descriptor.data() + 2);
    descriptor = descriptor.subspan(kHeadBytes);
    if (length > descriptor.size()) return std::nullopt;
    if (tag == 0 || (!fields.empty() && tag <= fields.back().tag)) return std::nullopt;
    fields.push_back({tag, descriptor.first(length)});
    descriptor = descriptor.subspan(length);
  }
  return fields;
}

std::vector<std::uint16_t> descriptor_difference(Bytes a, Bytes b) {
  std::map<std::uint16_t, std::array<std::optional<Bytes>, 2>> values;
  const std::array<Bytes, 2> sides{a, b};
  for (std::size_t side = 0; side < sides.size(); ++side) {
    for (const DescriptorField& field :
         parse_descriptor(sides[side]).value_or(std::vector<DescriptorField>{})) {
      values[field.tag][side] = field.value;
    }
  }
  std::vector<std::uint16_t> tags;
  for (const auto& [tag, pair] : values) {
    const bool same = pair[0] && pair[1] && std::ranges::equal(*pair[0], *pair[1]);
    if (!same) tags.push_back(tag);
  }
  return tags;
}

BlockId opaque_block_id(std::uint8_t algorithm, Bytes hash, Bytes extras) {
  Sha256 digest;
  digest.update(text("dfkv.opq.1"));
  update_le(digest, algorithm);
  update_le(digest, checked_length(hash.size(), "the engine's hash"));
  digest.update(hash);
  digest.update(extras);
  return first_16<BlockId>(digest.finish());
}

BlockChain::BlockChain() : tip_(sha256(text("dfkv.block.1"))) {}

BlockId BlockChain::append(std::span<const std::uint32_t> tokens, std::vector<Extra> extras) {
  if (extras.size() > std::numeric_limits<std::uint16_t>::max()) {
    throw std::length_error("a block has more than 65535 extras");
  }
  std::ranges::sort(extras, extra_less);
  Sha256 hash;
  hash.update(text("dfkv.blk.1"));
  hash.update(tip_);
  update_le(hash, checked_length(tokens.size(), "a block's token list"));
  hash.update(std::as_bytes(tokens));
  update_le(hash, static_cast<std::uint16_t>(extras.size()));
  for (const Extra& extra : extras) {
    update_le(hash, extra.tag);
    update_le(hash, checked_length(extra.value.size(), "a block's extra"));
    hash.update(extra.value);
  }
  tip_ = hash.finish();
  return first_16<BlockId>(tip_);
}

BlockId BlockChain::append(std::span<const std::uint32_t> tokens) { return append(tokens, {}); }

}  // namespace dfkv
