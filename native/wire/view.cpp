#include "wire/view.h"

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
constexpr std::size_t kMaxZoneBytes = 128;
constexpr std::size_t kMaxAddressBytes = 256;
constexpr std::uint32_t kMaxAddresses = 64;
constexpr std::uint64_t kMax32 = std::numeric_limits<std::uint32_t>::max();

bool valid_node_id(std::string_view id) {
  if (id.empty() || id.size() > kMaxNodeIdBytes) return false;
  return std::ranges::all_of(id, [](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  });
}

std::array<std::byte, 16> view_digest(std::uint32_t placement_rule, Bytes encoded_nodes) {
  constexpr std::string_view kPrefix = "dfkv.view.1";
  Sha256 hash;
  hash.update(as_bytes(kPrefix.data(), kPrefix.size()));
  hash.update(as_bytes(&placement_rule, sizeof placement_rule));
  hash.update(encoded_nodes);
  const Sha256Digest full = hash.finish();
  std::array<std::byte, 16> digest;
  std::copy_n(full.begin(), digest.size(), digest.begin());
  return digest;
}

// ---- writing
// ----------------------------------------------------------------------------------------------------

void check_text(std::string_view value, std::size_t max_bytes, const char* what) {
  if (value.size() > max_bytes || !msgpack::is_utf8(value)) {
    throw std::invalid_argument(std::string("view: ") + what + " is too long or is not UTF-8");
  }
}

void check_node(const ViewNode& node) {
  if (!valid_node_id(node.id)) {
    throw std::invalid_argument("view: a node id must be 1 to 128 characters of [A-Za-z0-9._-], found '" +
                                node.id + "'");
  }
  check_text(node.zone, kMaxZoneBytes, "a zone");
  check_text(node.unix_path, kMaxAddressBytes, "a unix path");
  if (node.tcp.size() > kMaxAddresses || node.rdma.size() > kMaxAddresses) {
    throw std::invalid_argument("view: node '" + node.id + "' has more than 64 addresses of one kind");
  }
  for (const std::string& address : node.tcp) check_text(address, kMaxAddressBytes, "a TCP address");
  for (const std::string& address : node.rdma) check_text(address, kMaxAddressBytes, "an RDMA address");
}

void write_addresses(msgpack::Writer& writer, std::uint64_t key, const std::vector<std::string>& addresses) {
  if (addresses.empty()) return;
  writer.uint(key);
  writer.array(static_cast<std::uint32_t>(addresses.size()));
  for (const std::string& address : addresses) writer.str(address);
}

void write_node(msgpack::Writer& writer, const ViewNode& node) {
  const bool has_zone = !node.zone.empty();
  const bool has_features = node.features != 0;
  const bool has_unix = !node.unix_path.empty();
  const std::uint32_t optional = std::uint32_t{has_zone} + std::uint32_t{has_features} +
                                 std::uint32_t{!node.tcp.empty()} + std::uint32_t{!node.rdma.empty()} +
                                 std::uint32_t{has_unix};
  writer.map(6 + optional);
  writer.uint(1);
  writer.str(node.id);
  writer.uint(2);
  writer.uint(node.incarnation);
  writer.uint(3);
  writer.bin(node.boot_id);
  writer.uint(4);
  writer.uint(static_cast<std::uint64_t>(node.state));
  writer.uint(5);
  writer.uint(node.read_weight);
  writer.uint(6);
  writer.uint(node.write_weight);
  if (has_zone) {
    writer.uint(7);
    writer.str(node.zone);
  }
  if (has_features) {
    writer.uint(8);
    writer.uint(node.features);
  }
  write_addresses(writer, 9, node.tcp);
  write_addresses(writer, 10, node.rdma);
  if (has_unix) {
    writer.uint(11);
    writer.str(node.unix_path);
  }
}

// ---- reading
// ----------------------------------------------------------------------------------------------------

bool read_exact(msgpack::Reader& reader, MutableBytes out) {
  Bytes bytes;
  if (!reader.bin(out.size(), bytes) || bytes.size() != out.size()) return false;
  std::ranges::copy(bytes, out.begin());
  return true;
}

bool read_u32(msgpack::Reader& reader, std::uint32_t& out) {
  std::uint64_t value = 0;
  if (!reader.uint_up_to(kMax32, value)) return false;
  out = static_cast<std::uint32_t>(value);
  return true;
}

bool read_text(msgpack::Reader& reader, std::size_t max_bytes, std::string& out) {
  std::string_view value;
  if (!reader.str(max_bytes, value)) return false;
  out = value;
  return true;
}

bool read_addresses(msgpack::Reader& reader, std::vector<std::string>& out) {
  std::uint32_t count = 0;
  if (!reader.array(kMaxAddresses, count)) return false;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (!read_text(reader, kMaxAddressBytes, out.emplace_back())) return false;
  }
  return true;
}

// Reads a map whose keys come in ascending order, each once. `take` returns false to refuse; `required` has a
// bit for every key below 64 that must be there.
template <typename Take>
bool read_ordered_map(msgpack::Reader& reader, std::uint64_t required, Take take) {
  std::uint32_t count = 0;
  if (!reader.map(kMaxEntries, count)) return false;
  std::uint64_t seen = 0;
  std::uint64_t previous = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    std::uint64_t key = 0;
    if (!reader.uint(key) || key <= previous) return false;
    previous = key;
    if (key < 64) seen |= std::uint64_t{1} << key;
    if (!take(key)) return false;
  }
  return (seen & required) == required;
}

constexpr std::uint64_t bits(unsigned first, unsigned last) {
  std::uint64_t result = 0;
  for (unsigned key = first; key <= last; ++key) result |= std::uint64_t{1} << key;
  return result;
}

bool read_node(msgpack::Reader& reader, ViewNode& node) {
  return read_ordered_map(reader, bits(1, 6), [&](std::uint64_t key) {
    std::uint64_t state = 0;
    switch (key) {
      case 1:
        return read_text(reader, kMaxNodeIdBytes, node.id) && valid_node_id(node.id);
      case 2:
        return reader.uint(node.incarnation);
      case 3:
        return read_exact(reader, node.boot_id);
      case 4:
        if (!reader.uint_up_to(static_cast<std::uint64_t>(NodeState::kGone), state)) return false;
        node.state = static_cast<NodeState>(state);
        return true;
      case 5:
        return read_u32(reader, node.read_weight);
      case 6:
        return read_u32(reader, node.write_weight);
      case 7:
        return read_text(reader, kMaxZoneBytes, node.zone);
      case 8:
        return reader.uint(node.features);
      case 9:
        return read_addresses(reader, node.tcp);
      case 10:
        return read_addresses(reader, node.rdma);
      case 11:
        return read_text(reader, kMaxAddressBytes, node.unix_path);
      default:
        return key >= kFirstIgnorable && reader.skip();
    }
  });
}

bool read_nodes(msgpack::Reader& reader, std::vector<ViewNode>& nodes) {
  std::uint32_t count = 0;
  if (!reader.array(kMaxViewNodes, count)) return false;
  for (std::uint32_t i = 0; i < count; ++i) {
    ViewNode node;
    if (!read_node(reader, node)) return false;
    if (!nodes.empty() && node.id <= nodes.back().id) return false;  // ascending, so each id comes once
    nodes.push_back(std::move(node));
  }
  return true;
}

}  // namespace

std::vector<std::byte> encode_view(View& view) {
  if (view.nodes.size() > kMaxViewNodes) throw std::invalid_argument("view: more than 4096 nodes");
  std::ranges::sort(view.nodes, {}, &ViewNode::id);
  const auto repeated = std::ranges::adjacent_find(view.nodes, {}, &ViewNode::id);
  if (repeated != view.nodes.end()) {
    throw std::invalid_argument("view: node '" + repeated->id + "' is there twice");
  }
  std::vector<std::byte> nodes;
  msgpack::Writer node_writer(nodes);
  node_writer.array(static_cast<std::uint32_t>(view.nodes.size()));
  for (const ViewNode& node : view.nodes) {
    check_node(node);
    write_node(node_writer, node);
  }
  view.digest = view_digest(view.placement_rule, nodes);

  std::vector<std::byte> out;
  msgpack::Writer writer(out);
  writer.map(5);
  writer.uint(1);
  writer.bin(view.cluster_id);
  writer.uint(2);
  writer.uint(view.revision);
  writer.uint(3);
  writer.bin(view.digest);
  writer.uint(4);
  writer.uint(view.placement_rule);
  writer.uint(5);
  writer.raw(nodes);
  if (out.size() > kMaxViewBytes) throw std::invalid_argument("view: more than 4 MiB when encoded");
  return out;
}

std::optional<View> decode_view(Bytes in) {
  if (in.size() > kMaxViewBytes) return std::nullopt;
  View view;
  Bytes encoded_nodes;
  msgpack::Reader reader(in);
  const bool read = read_ordered_map(reader, bits(1, 5), [&](std::uint64_t key) {
    switch (key) {
      case 1:
        return read_exact(reader, view.cluster_id);
      case 2:
        return reader.uint(view.revision);
      case 3:
        return read_exact(reader, view.digest);
      case 4:
        return read_u32(reader, view.placement_rule);
      case 5: {
        const std::size_t from = reader.position();
        if (!read_nodes(reader, view.nodes)) return false;
        encoded_nodes = in.subspan(from, reader.position() - from);
        return true;
      }
      default:
        return key >= kFirstIgnorable && reader.skip();
    }
  });
  if (!read || !reader.finished()) return std::nullopt;
  if (view.digest != view_digest(view.placement_rule, encoded_nodes)) return std::nullopt;
  return view;
}

}  // namespace dfkv
