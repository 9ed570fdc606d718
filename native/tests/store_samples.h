// Namespaces, keys and payload for tests of stores and servers. Payload is a function of the key, so that any
// byte of any other object is noticed.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "wire/bytes.h"
#include "wire/identity.h"

namespace dfkv::test {

inline std::vector<std::byte> make_descriptor(
    std::vector<std::pair<std::uint16_t, std::string_view>> fields) {
  std::vector<std::byte> out;
  for (const auto& [tag, value] : fields) {
    const std::size_t at = out.size();
    out.resize(at + 6 + value.size());
    store_le(out.data() + at, tag);
    store_le(out.data() + at + 2, static_cast<std::uint32_t>(value.size()));
    std::memcpy(out.data() + at + 6, value.data(), value.size());
  }
  return out;
}

struct TestNamespace {
  std::vector<std::byte> descriptor;
  NamespaceId id;

  explicit TestNamespace(std::string_view salt)
      : descriptor(make_descriptor({{2, "test"}, {4, salt}})), id(namespace_id(descriptor)) {}
};

inline BlockId make_block(std::uint64_t number) {
  BlockId block;
  store_le(block.bytes.data(), number * 0x9E3779B97F4A7C15U);
  store_le(block.bytes.data() + 8, number ^ 0x5DEECE66DU);
  return block;
}

inline Part make_part(std::uint16_t stage) {
  PartFields fields;
  fields.stage = stage;
  return encode_part(fields);
}

// Pages that all differ, made of one random page: sanitized builds would spend most of their time here
// otherwise.
inline std::vector<std::byte> make_payload(std::uint64_t seed, std::size_t bytes) {
  std::array<std::byte, 4096> page;
  std::uint64_t state = seed * 0xD1342543DE82EF95U + 1;
  for (std::size_t at = 0; at < page.size(); at += 8) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    store_le(page.data() + at, state);
  }
  std::vector<std::byte> out(bytes);
  for (std::size_t at = 0; at < bytes; at += page.size()) {
    store_le(page.data(), state + at);
    std::memcpy(out.data() + at, page.data(), std::min(page.size(), bytes - at));
  }
  return out;
}

inline bool same_bytes(Bytes a, Bytes b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace dfkv::test
