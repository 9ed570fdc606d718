// Formats: checksums, frame headers, identity, records and views. See dfkv_core/_native.pyi for the typed
// surface.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <tuple>

#include "bind/buffer.h"
#include "bind/parts.h"
#include "slab/record.h"
#include "wire/checksum.h"
#include "wire/frame.h"
#include "wire/identity.h"
#include "wire/meta.h"
#include "wire/sha256.h"
#include "wire/status.h"
#include "wire/view.h"

namespace nb = nanobind;

namespace dfkv {

namespace {

nb::bytes to_bytes(Bytes value) { return nb::bytes(value.data(), value.size()); }

[[noreturn]] void value_error(const std::string& message) { throw nb::value_error(message.c_str()); }

// A fixed-width field given as bytes.
template <std::size_t size>
std::array<std::byte, size> exact_bytes(nb::handle value, const char* what) {
  const BufferView view(value);
  if (view.bytes().size() != size) {
    value_error(std::string(what) + ": expected " + std::to_string(size) + " bytes, found " +
                std::to_string(view.bytes().size()));
  }
  std::array<std::byte, size> out;
  std::ranges::copy(view.bytes(), out.begin());
  return out;
}

// Takes fields out of a dict of Python, checks type and range, and at the end that nothing was left over.
class Fields {
 public:
  Fields(nb::dict from, const char* what) : from_(std::move(from)), what_(what) {}

  template <typename T>
  void uint(const char* name, T& out) {
    const nb::object value = take(name);
    if (!value.is_valid()) return;
    if (PyLong_Check(value.ptr()) == 0) wrong(name, "an int");
    const unsigned long long wide = PyLong_AsUnsignedLongLong(value.ptr());
    const bool failed = wide == std::numeric_limits<unsigned long long>::max() && PyErr_Occurred() != nullptr;
    if (failed) PyErr_Clear();
    if (failed || wide > std::numeric_limits<T>::max()) {
      wrong(name, "an int from 0 to " + std::to_string(std::numeric_limits<T>::max()));
    }
    out = static_cast<T>(wide);
  }
  template <typename Enum>
  void choice(const char* name, Enum last, Enum& out) {
    auto value = static_cast<std::uint8_t>(out);
    uint(name, value);
    if (value > static_cast<std::uint8_t>(last)) {
      wrong(name, "an int from 0 to " + std::to_string(static_cast<unsigned>(last)));
    }
    out = static_cast<Enum>(value);
  }
  template <std::size_t size>
  void bytes(const char* name, std::array<std::byte, size>& out) {
    const nb::object value = take(name);
    if (!value.is_valid()) return;
    if (PyBytes_Check(value.ptr()) == 0) wrong(name, "bytes");
    out = exact_bytes<size>(value, name);
  }
  void text(const char* name, std::string& out) {
    const nb::object value = take(name);
    if (value.is_valid()) out = as_text(name, value);
  }
  void texts(const char* name, std::vector<std::string>& out) {
    const nb::object value = take(name);
    if (!value.is_valid()) return;
    if (!is_sequence(value)) wrong(name, "a list of str");
    out.clear();
    for (const nb::handle item : value) out.push_back(as_text(name, item));
  }
  nb::object sequence(const char* name) {
    nb::object value = take(name);
    if (value.is_valid() && !is_sequence(value)) wrong(name, "a list");
    return value;
  }
  void ignore(const char* name) { (void)take(name); }
  void finish() {
    for (const auto [key, value] : from_) {
      if (!PyUnicode_Check(key.ptr()) || taken_.count(nb::cast<std::string>(key)) == 0) {
        value_error(std::string(what_) + ": unknown field " + nb::repr(key).c_str());
      }
    }
  }

 private:
  nb::object take(const char* name) {
    taken_.insert(name);
    return from_.contains(name) ? nb::object(from_[name]) : nb::object();
  }
  static bool is_sequence(nb::handle value) {
    return PyList_Check(value.ptr()) != 0 || PyTuple_Check(value.ptr()) != 0;
  }
  std::string as_text(const char* name, nb::handle value) {
    if (PyUnicode_Check(value.ptr()) == 0) wrong(name, "a str");
    return nb::cast<std::string>(value);
  }
  [[noreturn]] void wrong(const char* name, const std::string& expected) {
    const nb::object found = nb::object(from_[name]);
    value_error(std::string(what_) + "." + name + ": expected " + expected + ", found " +
                nb::repr(found).c_str());
  }

  nb::dict from_;
  const char* what_;
  std::set<std::string> taken_;
};

// ---- frames
// -----------------------------------------------------------------------------------------------------

nb::bytes py_encode_frame_header(std::uint8_t opcode, std::uint16_t flags, std::uint64_t request_id,
                                 std::uint32_t item, std::uint32_t meta_bytes, std::uint32_t payload_bytes) {
  std::array<std::byte, kFrameHeaderBytes> out;
  encode_frame_header({opcode, flags, request_id, item, meta_bytes, payload_bytes}, out);
  return to_bytes(out);
}

nb::dict py_decode_frame_header(nb::handle header, std::uint32_t max_meta_bytes,
                                std::uint32_t max_fragment_bytes) {
  const auto in = exact_bytes<kFrameHeaderBytes>(header, "frame header");
  FrameHeader out;
  const FrameFault fault = decode_frame_header(in, {max_meta_bytes, max_fragment_bytes}, out);
  if (fault != FrameFault::kNone) value_error(std::string("frame header: ") + frame_fault_name(fault));
  nb::dict fields;
  fields["opcode"] = out.opcode;
  fields["flags"] = out.flags;
  fields["request_id"] = out.request_id;
  fields["item"] = out.item;
  fields["meta_bytes"] = out.meta_bytes;
  fields["payload_bytes"] = out.payload_bytes;
  return fields;
}

// ---- slot records
// -----------------------------------------------------------------------------------------------

nb::bytes py_encode_slot_record(nb::dict fields, nb::bytes store_uuid, std::uint64_t slot) {
  SlotRecord record;
  Fields in(std::move(fields), "slot record");
  in.choice("state", RecordState::kQuarantined, record.state);
  in.uint("codec", record.codec);
  in.uint("priority", record.priority);
  in.uint("sequence", record.sequence);
  in.bytes("namespace", record.key.ns.bytes);
  in.bytes("block", record.key.block.bytes);
  in.uint("part", record.key.part);
  in.uint("route", record.route);
  in.uint("checksum", record.checksum);
  in.uint("stored_bytes", record.stored_bytes);
  in.uint("raw_bytes", record.raw_bytes);
  in.uint("created_s", record.created_s);
  in.uint("expires_s", record.expires_s);
  in.uint("extent_generation", record.extent_generation);
  in.uint("namespace_generation", record.namespace_generation);
  in.uint("tenant", record.tenant);
  in.uint("recompute_us", record.recompute_us);
  in.uint("key_id", record.key_id);
  in.finish();
  std::array<std::byte, kSlotRecordBytes> out;
  encode_slot_record(record, StoreUuid{exact_bytes<16>(store_uuid, "store uuid")}, slot, out);
  return to_bytes(out);
}

const char* record_fault_name(RecordFault fault) {
  switch (fault) {
    case RecordFault::kNone:
      return "none";
    case RecordFault::kCrc:
      return "crc";
    case RecordFault::kVersion:
      return "version";
    case RecordFault::kNotZero:
      return "not_zero";
  }
  return "unknown";
}

nb::dict py_decode_slot_record(nb::handle record, nb::bytes store_uuid, std::uint64_t slot) {
  const auto in = exact_bytes<kSlotRecordBytes>(record, "slot record");
  SlotRecord out;
  const RecordFault fault =
      decode_slot_record(in, StoreUuid{exact_bytes<16>(store_uuid, "store uuid")}, slot, out);
  if (fault != RecordFault::kNone) value_error(std::string("slot record: ") + record_fault_name(fault));
  nb::dict fields;
  fields["state"] = static_cast<unsigned>(out.state);
  fields["codec"] = out.codec;
  fields["priority"] = out.priority;
  fields["sequence"] = out.sequence;
  fields["namespace"] = to_bytes(out.key.ns.bytes);
  fields["block"] = to_bytes(out.key.block.bytes);
  fields["part"] = out.key.part;
  fields["route"] = out.route;
  fields["checksum"] = out.checksum;
  fields["stored_bytes"] = out.stored_bytes;
  fields["raw_bytes"] = out.raw_bytes;
  fields["created_s"] = out.created_s;
  fields["expires_s"] = out.expires_s;
  fields["extent_generation"] = out.extent_generation;
  fields["namespace_generation"] = out.namespace_generation;
  fields["tenant"] = out.tenant;
  fields["recompute_us"] = out.recompute_us;
  fields["key_id"] = out.key_id;
  return fields;
}

// ---- views
// ------------------------------------------------------------------------------------------------------

ViewNode node_from(nb::handle item) {
  if (!PyDict_Check(item.ptr())) value_error("view.nodes: expected dicts");
  ViewNode node;
  Fields in(nb::borrow<nb::dict>(item), "view.nodes");
  in.text("id", node.id);
  in.uint("incarnation", node.incarnation);
  in.bytes("boot_id", node.boot_id);
  in.choice("state", NodeState::kGone, node.state);
  in.uint("read_weight", node.read_weight);
  in.uint("write_weight", node.write_weight);
  in.text("zone", node.zone);
  in.uint("features", node.features);
  in.texts("tcp", node.tcp);
  in.texts("rdma", node.rdma);
  in.text("unix_path", node.unix_path);
  in.finish();
  return node;
}

nb::bytes py_encode_view(nb::dict fields) {
  View view;
  Fields in(std::move(fields), "view");
  in.bytes("cluster_id", view.cluster_id);
  in.uint("revision", view.revision);
  in.uint("placement_rule", view.placement_rule);
  in.ignore("digest");  // made anew from the nodes and the rule
  const nb::object nodes = in.sequence("nodes");
  in.finish();
  if (nodes.is_valid()) {
    for (const nb::handle item : nodes) view.nodes.push_back(node_from(item));
  }
  return to_bytes(encode_view(view));
}

nb::list texts_of(const std::vector<std::string>& values) {
  nb::list out;
  for (const std::string& value : values) out.append(nb::str(value.data(), value.size()));
  return out;
}

nb::dict node_to(const ViewNode& node) {
  nb::dict out;
  out["id"] = node.id;
  out["incarnation"] = node.incarnation;
  out["boot_id"] = to_bytes(node.boot_id);
  out["state"] = static_cast<unsigned>(node.state);
  out["read_weight"] = node.read_weight;
  out["write_weight"] = node.write_weight;
  out["zone"] = node.zone;
  out["features"] = node.features;
  out["tcp"] = texts_of(node.tcp);
  out["rdma"] = texts_of(node.rdma);
  out["unix_path"] = node.unix_path;
  return out;
}

nb::dict py_decode_view(nb::handle data) {
  const BufferView buffer(data);
  const std::optional<View> view = decode_view(buffer.bytes());
  if (!view) value_error("view: malformed, over a limit, or its digest does not match its nodes");
  nb::list nodes;
  for (const ViewNode& node : view->nodes) nodes.append(node_to(node));
  nb::dict out;
  out["cluster_id"] = to_bytes(view->cluster_id);
  out["revision"] = view->revision;
  out["digest"] = to_bytes(view->digest);
  out["placement_rule"] = view->placement_rule;
  out["nodes"] = nodes;
  return out;
}

// ---- block chain
// ------------------------------------------------------------------------------------------------

// Tokens out of a C-contiguous buffer of 4-byte integers; copied only where they are not aligned.
class TokenView {
 public:
  explicit TokenView(nb::handle object) : buffer_(object, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) {
    const Py_buffer& raw = buffer_.raw();
    std::string_view format = raw.format != nullptr ? raw.format : "B";
    if (format.size() == 2 && (format[0] == '<' || format[0] == '=' || format[0] == '@'))
      format.remove_prefix(1);
    const bool integers = format == "I" || format == "i" || format == "L" || format == "l";
    if (raw.itemsize != sizeof(std::uint32_t) || !integers) {
      const std::string message = "tokens: expected a buffer of 4-byte integers, found items of " +
                                  std::to_string(raw.itemsize) + " bytes with format '" +
                                  std::string(format) + "'";
      throw nb::type_error(message.c_str());
    }
    const Bytes bytes = buffer_.bytes();
    count_ = bytes.size() / sizeof(std::uint32_t);
    if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(std::uint32_t) != 0) {
      copy_.resize(count_);
      std::memcpy(copy_.data(), bytes.data(), bytes.size());
    }
  }
  [[nodiscard]] std::span<const std::uint32_t> tokens() const {
    if (!copy_.empty()) return copy_;
    return {static_cast<const std::uint32_t*>(buffer_.raw().buf), count_};
  }

 private:
  BufferView buffer_;
  std::size_t count_ = 0;
  std::vector<std::uint32_t> copy_;
};

Extra make_extra(std::uint8_t tag, const nb::bytes& value) {
  const Bytes bytes = as_bytes(value.data(), value.size());
  return {tag, {bytes.begin(), bytes.end()}};
}

nb::bytes py_append(BlockChain& chain, nb::handle tokens,
                    const std::vector<std::tuple<std::uint8_t, nb::bytes>>& extras) {
  const TokenView view(tokens);
  std::vector<Extra> own;
  own.reserve(extras.size());
  for (const auto& [tag, value] : extras) own.push_back(make_extra(tag, value));
  const BlockId id = without_gil_if_large(view.tokens().size_bytes(),
                                          [&] { return chain.append(view.tokens(), std::move(own)); });
  return to_bytes(id.bytes);
}

nb::bytes py_append_blocks(BlockChain& chain, nb::handle tokens, std::uint32_t block_tokens,
                           const std::vector<std::tuple<std::size_t, std::uint8_t, nb::bytes>>& extras) {
  if (block_tokens == 0) value_error("block_tokens: expected 1 or more, found 0");
  const TokenView view(tokens);
  const std::size_t blocks = view.tokens().size() / block_tokens;
  std::vector<std::pair<std::size_t, Extra>> by_block;
  by_block.reserve(extras.size());
  for (const auto& [block, tag, value] : extras) {
    if (block >= blocks) {
      value_error("extras: block index " + std::to_string(block) + " is not one of the " +
                  std::to_string(blocks) + " whole blocks");
    }
    by_block.emplace_back(block, make_extra(tag, value));
  }
  std::ranges::stable_sort(by_block, {}, &std::pair<std::size_t, Extra>::first);
  std::vector<std::byte> ids;
  ids.reserve(blocks * sizeof(BlockId));
  without_gil_if_large(view.tokens().size_bytes(), [&] {
    auto next = by_block.begin();
    for (std::size_t block = 0; block < blocks; ++block) {
      std::vector<Extra> own;
      for (; next != by_block.end() && next->first == block; ++next) own.push_back(std::move(next->second));
      const BlockId id =
          chain.append(view.tokens().subspan(block * block_tokens, block_tokens), std::move(own));
      ids.insert(ids.end(), id.bytes.begin(), id.bytes.end());
    }
  });
  return to_bytes(ids);
}

void bind_block_chain(nb::module_& m) {
  nb::class_<BlockChain>(m, "BlockChain", nb::is_final())
      .def(
          "__init__",
          [](BlockChain* self, const std::optional<nb::bytes>& tip) {
            if (tip) {
              new (self) BlockChain(exact_bytes<32>(*tip, "tip"));
            } else {
              new (self) BlockChain();
            }
          },
          nb::arg("tip") = nb::none())
      .def_prop_ro("tip", [](const BlockChain& self) { return to_bytes(self.tip()); })
      .def("append", &py_append, nb::arg("tokens"), nb::arg("extras") = nb::tuple())
      .def("append_blocks", &py_append_blocks, nb::arg("tokens"), nb::arg("block_tokens"),
           nb::arg("extras") = nb::tuple());
}

void bind_hashes(nb::module_& m) {
  m.def(
      "crc32c",
      [](nb::handle data) {
        const BufferView view(data);
        return without_gil_if_large(view.bytes().size(), [&] { return crc32c(view.bytes()); });
      },
      nb::arg("data"));
  m.def(
      "xxh3_64",
      [](nb::handle data) {
        const BufferView view(data);
        return without_gil_if_large(view.bytes().size(), [&] { return xxh3_64(view.bytes()); });
      },
      nb::arg("data"));
  m.def(
      "sha256",
      [](nb::handle data) {
        const BufferView view(data);
        return to_bytes(without_gil_if_large(view.bytes().size(), [&] { return sha256(view.bytes()); }));
      },
      nb::arg("data"));
  m.def(
      "auth_mac",
      [](nb::handle secret, std::string_view role, nb::handle client_nonce, nb::handle server_nonce,
         std::string_view node_id) {
        if (role != "c" && role != "s")
          value_error("role: expected 'c' or 's', found '" + std::string(role) + "'");
        const BufferView key(secret);
        const auto client = exact_bytes<16>(client_nonce, "client nonce");
        const auto server = exact_bytes<16>(server_nonce, "server nonce");
        return to_bytes(auth_mac(key.bytes(), role[0], client, server, node_id));
      },
      nb::arg("secret"), nb::arg("role"), nb::arg("client_nonce"), nb::arg("server_nonce"),
      nb::arg("node_id"));
}

void bind_identity(nb::module_& m) {
  m.def(
      "namespace_id",
      [](nb::handle descriptor) {
        const BufferView view(descriptor);
        if (!parse_descriptor(view.bytes())) {
          value_error(
              "descriptor: expected at most 64 KiB of {u16 tag, u32 length, bytes} in ascending tag order");
        }
        return to_bytes(namespace_id(view.bytes()).bytes);
      },
      nb::arg("descriptor"));
  m.def(
      "opaque_block_id",
      [](std::uint8_t algorithm, nb::handle hash, nb::handle extras) {
        const BufferView hash_view(hash);
        const BufferView extras_view(extras);
        return to_bytes(opaque_block_id(algorithm, hash_view.bytes(), extras_view.bytes()).bytes);
      },
      nb::arg("algorithm"), nb::arg("hash"), nb::arg("extras"));
  m.def(
      "opaque_block_ids",
      [](std::uint8_t algorithm, nb::handle hashes, std::size_t hash_bytes) {
        const BufferView view(hashes);
        const Bytes all = view.bytes();
        if (hash_bytes == 0 || all.size() % hash_bytes != 0) {
          value_error("hashes: expected a multiple of " + std::to_string(hash_bytes) + " bytes, found " +
                      std::to_string(all.size()));
        }
        std::vector<std::byte> ids;
        without_gil_if_large(all.size(), [&] {
          ids.reserve(all.size() / hash_bytes * sizeof(BlockId));
          for (std::size_t at = 0; at < all.size(); at += hash_bytes) {
            const BlockId id = opaque_block_id(algorithm, all.subspan(at, hash_bytes), {});
            ids.insert(ids.end(), id.bytes.begin(), id.bytes.end());
          }
        });
        return to_bytes(ids);
      },
      nb::arg("algorithm"), nb::arg("hashes"), nb::arg("hash_bytes"));
  m.def(
      "encode_part",
      [](std::uint8_t group, std::uint8_t component, std::uint16_t stage, std::uint8_t cp_index,
         std::uint8_t shard_index, std::uint8_t shard_count) {
        return encode_part({group, component, stage, cp_index, shard_index, shard_count});
      },
      nb::arg("group"), nb::arg("component"), nb::arg("stage"), nb::arg("cp_index"), nb::arg("shard_index"),
      nb::arg("shard_count"));
  m.def(
      "status_name", [](std::uint16_t status) { return status_name(static_cast<Status>(status)); },
      nb::arg("status"));
}

}  // namespace

void bind_formats(nb::module_& m) {
  bind_hashes(m);
  bind_identity(m);
  bind_block_chain(m);
  m.def("encode_frame_header", &py_encode_frame_header, nb::arg("opcode"), nb::arg("flags"),
        nb::arg("request_id"), nb::arg("item"), nb::arg("meta_bytes"), nb::arg("payload_bytes"));
  m.def("decode_frame_header", &py_decode_frame_header, nb::arg("header"), nb::arg("max_meta_bytes"),
        nb::arg("max_fragment_bytes"));
  m.def("encode_slot_record", &py_encode_slot_record, nb::arg("fields"), nb::arg("store_uuid"),
        nb::arg("slot"));
  m.def("decode_slot_record", &py_decode_slot_record, nb::arg("record"), nb::arg("store_uuid"),
        nb::arg("slot"));
  m.def("encode_view", &py_encode_view, nb::arg("view"));
  m.def("decode_view", &py_decode_view, nb::arg("data"));
}

}  // namespace dfkv
