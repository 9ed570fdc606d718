// Payloads that are msgpack: counters of STAT and namespaces of LIST. Bytes in docs/formats.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "wire/bytes.h"
#include "wire/identity.h"

namespace dfkv {

// STAT: a map of name to unsigned value, in the order given.
using Counters = std::vector<std::pair<std::string, std::uint64_t>>;
inline constexpr std::uint32_t kMaxCounters = 4096;
inline constexpr std::size_t kMaxCounterNameBytes = 128;

[[nodiscard]] std::vector<std::byte> encode_counters(const Counters& counters);
[[nodiscard]] std::optional<Counters> decode_counters(
    Bytes in);  // nullopt: malformed, duplicate or over a limit

struct NamespaceInfo {
  NamespaceId id;
  std::vector<std::byte> descriptor;
  std::string label;
  std::uint64_t objects = 0;
  std::uint64_t stored_bytes = 0;
  std::uint64_t created_s = 0;
  std::uint64_t last_used_s = 0;
};
inline constexpr std::uint32_t kMaxNamespacesPerReply = 4096;

// LIST: an array of maps with the keys 1 id, 2 descriptor, 3 label, 4 objects, 5 stored bytes, 6 created s,
// 7 last used s.
[[nodiscard]] std::vector<std::byte> encode_namespaces(const std::vector<NamespaceInfo>& namespaces);
[[nodiscard]] std::optional<std::vector<NamespaceInfo>> decode_namespaces(Bytes in);

}  // namespace dfkv
