#include "wire/meta.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string_view>

#include "wire/msgpack.h"

namespace dfkv {

namespace {

constexpr std::uint64_t kFirstIgnorable = 128;
constexpr std::uint32_t kMaxEntries = 64;
constexpr std::size_t kMaxNodeIdBytes = 128;
constexpr std::size_t kMaxNameBytes = 128;
constexpr std::size_t kMaxLabelBytes = 256;
constexpr std::size_t kMaxReasonBytes = 1024;
constexpr std::uint32_t kMaxDifferences = 256;
constexpr std::size_t kMacBytes = 32;
constexpr std::size_t kNonceBytes = 16;
constexpr std::uint64_t kMax32 = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint64_t kMax16 = std::numeric_limits<std::uint16_t>::max();

// ---- writing
// ----------------------------------------------------------------------------------------------------

// Writes a map whose number of entries is known only at the end: up to 15, its head is the one byte that is
// left free for it.
class MapWriter {
 public:
  explicit MapWriter(std::vector<std::byte>& out) : out_(out), head_at_(out.size()), writer_(out) {
    out_.emplace_back();
  }

  msgpack::Writer& key(std::uint64_t key) {
    ++count_;
    writer_.uint(key);
    return writer_;
  }
  void uint(std::uint64_t at, std::uint64_t value) {
    if (value != 0) key(at).uint(value);
  }
  void boolean(std::uint64_t at, bool value) {
    if (value) key(at).boolean(true);
  }
  void bin(std::uint64_t at, Bytes value, std::size_t max_bytes) {
    if (value.size() > max_bytes) throw std::length_error("a binary field of meta is over its limit");
    if (!value.empty()) key(at).bin(value);
  }
  void id(std::uint64_t at, const std::array<std::byte, 16>& value) {
    if (value != std::array<std::byte, 16>{}) key(at).bin(value);
  }
  // For people: cut rather than refused.
  void text(std::uint64_t at, std::string_view value, std::size_t max_bytes) {
    if (!value.empty()) key(at).str(msgpack::utf8_prefix(value, max_bytes));
  }
  void finish() {
    if (count_ < 16) {
      out_[head_at_] = static_cast<std::byte>(0x80 | count_);
      return;
    }
    std::vector<std::byte> head;
    msgpack::Writer(head).map(count_);
    out_[head_at_] = head[0];
    out_.insert(out_.begin() + static_cast<std::ptrdiff_t>(head_at_) + 1, head.begin() + 1, head.end());
  }

 private:
  std::vector<std::byte>& out_;
  const std::size_t head_at_;
  msgpack::Writer writer_;
  std::uint32_t count_ = 0;
};

// ---- reading
// ----------------------------------------------------------------------------------------------------

MetaFault fault_of(msgpack::Fault fault) {
  switch (fault) {
    case msgpack::Fault::kType:
      return MetaFault::kBadType;
    case msgpack::Fault::kValue:
      return MetaFault::kBadValue;
    case msgpack::Fault::kLimit:
      return MetaFault::kTooLarge;
    case msgpack::Fault::kNone:
    case msgpack::Fault::kTruncated:
    case msgpack::Fault::kDepth:
    case msgpack::Fault::kText:
      break;
  }
  return MetaFault::kMalformed;
}

// One value of the map. Every getter leaves `out` alone when it fails.
class Field {
 public:
  explicit Field(msgpack::Reader& reader) : reader_(reader) {}

  MetaFault u64(std::uint64_t& out) { return check(reader_.uint(out)); }
  MetaFault u32(std::uint32_t& out) { return narrow(kMax32, out); }
  MetaFault boolean(bool& out) { return check(reader_.boolean(out)); }
  MetaFault u64(std::optional<std::uint64_t>& out) {
    std::uint64_t value = 0;
    if (!reader_.uint(value)) return fault();
    out = value;
    return MetaFault::kNone;
  }
  // An enumerator up to `last`; anything beyond is refused.
  template <typename Enum>
  MetaFault choice(Enum last, Enum& out) {
    std::uint64_t value = 0;
    if (!reader_.uint_up_to(static_cast<std::uint64_t>(last), value)) return fault();
    out = static_cast<Enum>(value);
    return MetaFault::kNone;
  }
  // The same for an ignorable key: a value of a later version leaves the default.
  template <typename Enum>
  MetaFault choice_or_default(Enum last, Enum& out) {
    std::uint64_t value = 0;
    if (!reader_.uint(value)) return fault();
    if (value <= static_cast<std::uint64_t>(last)) out = static_cast<Enum>(value);
    return MetaFault::kNone;
  }
  MetaFault status(Status& out) {
    std::uint64_t value = 0;
    if (!reader_.uint_up_to(kMax16, value)) return fault();
    out = static_cast<Status>(value);
    return MetaFault::kNone;
  }
  MetaFault exact(MutableBytes out) {
    Bytes bytes;
    if (!reader_.bin(out.size(), bytes)) return fault();
    if (bytes.size() != out.size()) return MetaFault::kBadValue;
    std::ranges::copy(bytes, out.begin());
    return MetaFault::kNone;
  }
  MetaFault bin(std::size_t max_bytes, std::vector<std::byte>& out) {
    Bytes bytes;
    if (!reader_.bin(max_bytes, bytes)) return fault();
    out.assign(bytes.begin(), bytes.end());
    return MetaFault::kNone;
  }
  MetaFault mac(std::vector<std::byte>& out) {
    std::array<std::byte, kMacBytes> bytes;
    const MetaFault result = exact(bytes);
    if (result == MetaFault::kNone) out.assign(bytes.begin(), bytes.end());
    return result;
  }
  MetaFault text(std::size_t max_bytes, std::string& out) {
    std::string_view value;
    if (!reader_.str(max_bytes, value)) return fault();
    out = value;
    return MetaFault::kNone;
  }
  MetaFault tags(std::vector<std::uint16_t>& out) {
    std::uint32_t count = 0;
    if (!reader_.array(kMaxDifferences, count)) return fault();
    out.clear();
    for (std::uint32_t i = 0; i < count; ++i) {
      std::uint64_t value = 0;
      if (!reader_.uint_up_to(kMax16, value)) return fault();
      out.push_back(static_cast<std::uint16_t>(value));
    }
    return MetaFault::kNone;
  }
  MetaFault unknown(std::uint64_t key) {
    if (key < kFirstIgnorable) return MetaFault::kUnknownCritical;
    return check(reader_.skip());
  }

 private:
  [[nodiscard]] MetaFault fault() const { return fault_of(reader_.fault()); }
  [[nodiscard]] MetaFault check(bool read) const { return read ? MetaFault::kNone : fault(); }
  template <typename T>
  MetaFault narrow(std::uint64_t limit, T& out) {
    std::uint64_t value = 0;
    if (!reader_.uint_up_to(limit, value)) return fault();
    out = static_cast<T>(value);
    return MetaFault::kNone;
  }

  msgpack::Reader& reader_;
};

// Calls take(key, field) for every entry, in the order of the wire. Keys may come in any order but only once.
template <typename Take>
MetaFault read_map(Bytes in, std::uint64_t required_key, Take take) {
  msgpack::Reader reader(in);
  std::uint32_t count = 0;
  if (!reader.map(kMaxEntries, count)) return fault_of(reader.fault());
  std::array<std::uint64_t, kMaxEntries> seen{};
  bool required_seen = required_key == 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    std::uint64_t key = 0;
    if (!reader.uint(key)) return fault_of(reader.fault());
    if (std::find(seen.begin(), seen.begin() + i, key) != seen.begin() + i) return MetaFault::kMalformed;
    seen[i] = key;
    required_seen = required_seen || key == required_key;
    Field field(reader);
    const MetaFault result = take(key, field);
    if (result != MetaFault::kNone) return result;
  }
  return reader.finished() && required_seen ? MetaFault::kNone : MetaFault::kMalformed;
}

}  // namespace

const char* meta_fault_name(MetaFault fault) {
  switch (fault) {
    case MetaFault::kNone:
      return "none";
    case MetaFault::kMalformed:
      return "malformed";
    case MetaFault::kUnknownCritical:
      return "unknown_critical";
    case MetaFault::kBadType:
      return "bad_type";
    case MetaFault::kBadValue:
      return "bad_value";
    case MetaFault::kTooLarge:
      return "too_large";
  }
  return "unknown";
}

void encode_hello(const HelloMeta& meta, std::vector<std::byte>& out) {
  if (meta.node_id.size() > kMaxNodeIdBytes) throw std::length_error("a node id is over 128 bytes");
  MapWriter map(out);
  map.uint(1, meta.features_offered);
  map.uint(2, meta.features_required);
  map.key(3).uint(static_cast<std::uint64_t>(meta.lane));
  map.uint(4, meta.max_meta_bytes);
  map.uint(5, meta.max_fragment_bytes);
  map.uint(6, meta.auth_methods);
  map.id(7, meta.nonce);
  map.text(8, meta.node_id, kMaxNodeIdBytes);
  map.uint(9, meta.incarnation);
  map.id(10, meta.boot_id);
  map.text(128, meta.software, kMaxNameBytes);
  map.text(129, meta.client_name, kMaxNameBytes);
  map.text(130, meta.group, kMaxNameBytes);
  map.finish();
}

void encode_request(const RequestMeta& meta, std::vector<std::byte>& out) {
  MapWriter map(out);
  if (meta.ns) map.key(1).bin(meta.ns->bytes);
  map.uint(2, meta.deadline_us);
  map.uint(3, meta.lease_ms);
  map.uint(4, static_cast<std::uint64_t>(meta.ack));
  map.boolean(5, meta.replace);
  map.uint(6, meta.lease_id);
  map.uint(7, meta.target_request);
  map.uint(8, meta.cursor);
  map.uint(9, meta.limit);
  map.uint(10, meta.known_revision);
  map.uint(11, meta.wait_ms);
  map.bin(12, meta.descriptor, kMaxDescriptorBytes);
  map.bin(13, meta.mac, kMacBytes);
  if (meta.checksum) map.key(14).uint(*meta.checksum);
  map.boolean(15, meta.aborted);
  map.uint(128, meta.trace_id);
  map.uint(129, static_cast<std::uint64_t>(meta.priority));
  map.uint(130, meta.recompute_us);
  map.text(131, meta.label, kMaxLabelBytes);
  map.finish();
}

void encode_reply(const ReplyMeta& meta, std::vector<std::byte>& out) {
  MapWriter map(out);
  map.key(1).uint(static_cast<std::uint64_t>(meta.status));
  map.uint(2, meta.length);
  if (meta.checksum) map.key(3).uint(*meta.checksum);
  map.uint(4, meta.lease_id);
  map.uint(5, meta.prefix);
  map.uint(6, meta.cursor);
  map.bin(7, meta.mac, kMacBytes);
  map.uint(128, meta.queue_us);
  map.uint(129, meta.disk_us);
  map.uint(130, meta.retry_after_ms);
  map.text(131, meta.reason, kMaxReasonBytes);
  if (!meta.nearest_differs_in.empty()) {
    const std::size_t count = std::min<std::size_t>(meta.nearest_differs_in.size(), kMaxDifferences);
    msgpack::Writer& writer = map.key(132);
    writer.array(static_cast<std::uint32_t>(count));
    for (std::size_t i = 0; i < count; ++i) writer.uint(meta.nearest_differs_in[i]);
  }
  map.uint(133, meta.lease_ms);
  map.finish();
}

MetaFault decode_hello(Bytes in, HelloMeta& out) {
  out = HelloMeta{};
  constexpr std::uint64_t kLaneKey = 3;
  return read_map(in, kLaneKey, [&out](std::uint64_t key, Field& field) {
    switch (key) {
      case 1:
        return field.u64(out.features_offered);
      case 2:
        return field.u64(out.features_required);
      case kLaneKey:
        return field.choice(Lane::kBulk, out.lane);
      case 4:
        return field.u32(out.max_meta_bytes);
      case 5:
        return field.u32(out.max_fragment_bytes);
      case 6:
        return field.u32(out.auth_methods);
      case 7:
        return field.exact(out.nonce);
      case 8:
        return field.text(kMaxNodeIdBytes, out.node_id);
      case 9:
        return field.u64(out.incarnation);
      case 10:
        return field.exact(out.boot_id);
      case 128:
        return field.text(kMaxNameBytes, out.software);
      case 129:
        return field.text(kMaxNameBytes, out.client_name);
      case 130:
        return field.text(kMaxNameBytes, out.group);
      default:
        return field.unknown(key);
    }
  });
}

MetaFault decode_request(Bytes in, RequestMeta& out) {
  out = RequestMeta{};
  if (in.empty()) return MetaFault::kNone;  // a frame without meta: every field at its default
  return read_map(in, 0, [&out](std::uint64_t key, Field& field) {
    switch (key) {
      case 1:
        return field.exact(out.ns.emplace().bytes);
      case 2:
        return field.u64(out.deadline_us);
      case 3:
        return field.u32(out.lease_ms);
      case 4:
        return field.choice(Ack::kDisk, out.ack);
      case 5:
        return field.boolean(out.replace);
      case 6:
        return field.u64(out.lease_id);
      case 7:
        return field.u64(out.target_request);
      case 8:
        return field.u64(out.cursor);
      case 9:
        return field.u32(out.limit);
      case 10:
        return field.u64(out.known_revision);
      case 11:
        return field.u32(out.wait_ms);
      case 12:
        return field.bin(kMaxDescriptorBytes, out.descriptor);
      case 13:
        return field.mac(out.mac);
      case 14:
        return field.u64(out.checksum);
      case 15:
        return field.boolean(out.aborted);
      case 128:
        return field.u64(out.trace_id);
      case 129:
        return field.choice_or_default(Priority::kBackground, out.priority);
      case 130:
        return field.u64(out.recompute_us);
      case 131:
        return field.text(kMaxLabelBytes, out.label);
      default:
        return field.unknown(key);
    }
  });
}

MetaFault decode_reply(Bytes in, ReplyMeta& out) {
  out = ReplyMeta{};
  constexpr std::uint64_t kStatusKey = 1;
  return read_map(in, kStatusKey, [&out](std::uint64_t key, Field& field) {
    switch (key) {
      case kStatusKey:
        return field.status(out.status);
      case 2:
        return field.u64(out.length);
      case 3:
        return field.u64(out.checksum);
      case 4:
        return field.u64(out.lease_id);
      case 5:
        return field.u32(out.prefix);
      case 6:
        return field.u64(out.cursor);
      case 7:
        return field.mac(out.mac);
      case 128:
        return field.u64(out.queue_us);
      case 129:
        return field.u64(out.disk_us);
      case 130:
        return field.u32(out.retry_after_ms);
      case 131:
        return field.text(kMaxReasonBytes, out.reason);
      case 132:
        return field.tags(out.nearest_differs_in);
      case 133:
        return field.u32(out.lease_ms);
      default:
        return field.unknown(key);
    }
  });
}

Sha256Digest auth_mac(Bytes secret, char role, Bytes client_nonce, Bytes server_nonce,
                      std::string_view node_id) {
  // Both nonces are of one fixed length: the message is then unambiguous although it has no length fields.
  if (client_nonce.size() != kNonceBytes || server_nonce.size() != kNonceBytes) {
    throw std::invalid_argument("a nonce of AUTH is not 16 bytes long");
  }
  constexpr std::string_view kPrefix = "dfkv.auth.1";
  std::vector<std::byte> message(kPrefix.size() + 1 + 2 * kNonceBytes + node_id.size());
  auto at = std::ranges::copy(as_bytes(kPrefix.data(), kPrefix.size()), message.begin()).out;
  *at++ = static_cast<std::byte>(role);
  at = std::ranges::copy(client_nonce, at).out;
  at = std::ranges::copy(server_nonce, at).out;
  std::ranges::copy(as_bytes(node_id.data(), node_id.size()), at);
  return hmac_sha256(secret, message);
}

}  // namespace dfkv
