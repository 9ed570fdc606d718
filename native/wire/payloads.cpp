#include "wire/payloads.h"

#include <string_view>
#include <unordered_set>

#include "wire/msgpack.h"

namespace dfkv {

namespace {
constexpr std::size_t kMaxLabelBytes = 256;
}  // namespace

std::vector<std::byte> encode_counters(const Counters& counters) {
  std::vector<std::byte> out;
  msgpack::Writer writer(out);
  writer.map(static_cast<std::uint32_t>(counters.size()));
  for (const auto& [name, value] : counters) {
    writer.str(name);
    writer.uint(value);
  }
  return out;
}

std::optional<Counters> decode_counters(Bytes in) {
  msgpack::Reader reader(in);
  std::uint32_t count = 0;
  if (!reader.map(kMaxCounters, count)) return std::nullopt;
  Counters counters;
  counters.reserve(count);
  std::unordered_set<std::string_view> seen;
  for (std::uint32_t i = 0; i < count; ++i) {
    std::string_view name;
    std::uint64_t value = 0;
    if (!reader.str(kMaxCounterNameBytes, name) || !reader.uint(value)) return std::nullopt;
    if (!seen.insert(name).second) return std::nullopt;
    counters.emplace_back(name, value);
  }
  if (!reader.finished()) return std::nullopt;
  return counters;
}

std::vector<std::byte> encode_namespaces(const std::vector<NamespaceInfo>& namespaces) {
  std::vector<std::byte> out;
  msgpack::Writer writer(out);
  writer.array(static_cast<std::uint32_t>(namespaces.size()));
  for (const NamespaceInfo& info : namespaces) {
    writer.map(7);
    writer.uint(1);
    writer.bin(info.id.bytes);
    writer.uint(2);
    writer.bin(info.descriptor);
    writer.uint(3);
    writer.str(msgpack::utf8_prefix(info.label, kMaxLabelBytes));
    writer.uint(4);
    writer.uint(info.objects);
    writer.uint(5);
    writer.uint(info.stored_bytes);
    writer.uint(6);
    writer.uint(info.created_s);
    writer.uint(7);
    writer.uint(info.last_used_s);
  }
  return out;
}

namespace {

// Keys from 128 on may be ignored; an unknown key below 128, a repeated one or a missing id makes the entry
// invalid.
bool decode_namespace(msgpack::Reader& reader, NamespaceInfo& info) {
  std::uint32_t count = 0;
  if (!reader.map(64, count)) return false;
  std::uint64_t seen = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    std::uint64_t key = 0;
    if (!reader.uint(key)) return false;
    if (key < 64) {
      if ((seen >> key & 1) != 0) return false;
      seen |= std::uint64_t{1} << key;
    }
    Bytes bytes;
    std::string_view text;
    bool ok = false;
    switch (key) {
      case 1:
        ok = reader.bin(info.id.bytes.size(), bytes) && bytes.size() == info.id.bytes.size();
        if (ok) std::memcpy(info.id.bytes.data(), bytes.data(), bytes.size());
        break;
      case 2:
        ok = reader.bin(kMaxDescriptorBytes, bytes);
        if (ok) info.descriptor.assign(bytes.begin(), bytes.end());
        break;
      case 3:
        ok = reader.str(kMaxLabelBytes, text);
        if (ok) info.label = text;
        break;
      case 4:
        ok = reader.uint(info.objects);
        break;
      case 5:
        ok = reader.uint(info.stored_bytes);
        break;
      case 6:
        ok = reader.uint(info.created_s);
        break;
      case 7:
        ok = reader.uint(info.last_used_s);
        break;
      default:
        ok = key >= 128 && reader.skip();
        break;
    }
    if (!ok) return false;
  }
  return (seen & 2) != 0;
}

}  // namespace

std::optional<std::vector<NamespaceInfo>> decode_namespaces(Bytes in) {
  msgpack::Reader reader(in);
  std::uint32_t count = 0;
  if (!reader.array(kMaxNamespacesPerReply, count)) return std::nullopt;
  std::vector<NamespaceInfo> namespaces;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (!decode_namespace(reader, namespaces.emplace_back())) return std::nullopt;
  }
  if (!reader.finished()) return std::nullopt;
  return namespaces;
}

}  // namespace dfkv
