// Formats: frame headers, slot records and views. See dfkv_core/_native.pyi for the typed
// surface.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>

#include "bind/buffer.h"
#include "bind/parts.h"
#include "bind/values.h"
#include "slab/record.h"
#include "wire/frame.h"
#include "wire/identity.h"
#include "wire/view.h"

namespace nb = nanobind;

namespace dfkv {

namespace {

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

}  // namespace

void bind_formats(nb::module_& m) {
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
