// Meta as the golden files write it: name=value pairs in key order, defaults left out.
#pragma once

#include <string>

#include "golden.h"
#include "wire/meta.h"

namespace dfkv::golden {

class MetaText {
 public:
  void always(const char* name, std::uint64_t value) { add(name, std::to_string(value)); }
  void uint(const char* name, std::uint64_t value) {
    if (value != 0) always(name, value);
  }
  void uint(const char* name, const std::optional<std::uint64_t>& value) {
    if (value) always(name, *value);
  }
  void bytes(const char* name, Bytes value) {
    if (!value.empty()) add(name, hex(value));
  }
  void id(const char* name, const std::array<std::byte, 16>& value) {
    if (value != std::array<std::byte, 16>{}) bytes(name, value);
  }
  void text(const char* name, const std::string& value) { bytes(name, as_bytes(value.data(), value.size())); }
  void add(const char* name, const std::string& value) {
    if (!out_.empty()) out_ += ',';
    out_ += std::string(name) + "=" + value;
  }
  [[nodiscard]] std::string str() const { return out_.empty() ? "-" : out_; }

 private:
  std::string out_;
};

inline std::string text_of(const HelloMeta& meta) {
  MetaText text;
  text.uint("features_offered", meta.features_offered);
  text.uint("features_required", meta.features_required);
  text.always("lane", static_cast<std::uint64_t>(meta.lane));
  text.uint("max_meta_bytes", meta.max_meta_bytes);
  text.uint("max_fragment_bytes", meta.max_fragment_bytes);
  text.uint("auth_methods", meta.auth_methods);
  text.id("nonce", meta.nonce);
  text.text("node_id", meta.node_id);
  text.uint("incarnation", meta.incarnation);
  text.id("boot_id", meta.boot_id);
  text.text("software", meta.software);
  text.text("client_name", meta.client_name);
  text.text("group", meta.group);
  return text.str();
}

inline std::string text_of(const RequestMeta& meta) {
  MetaText text;
  if (meta.ns) text.bytes("ns", meta.ns->bytes);
  text.uint("deadline_us", meta.deadline_us);
  text.uint("lease_ms", meta.lease_ms);
  text.uint("ack", static_cast<std::uint64_t>(meta.ack));
  text.uint("replace", meta.replace ? 1 : 0);
  text.uint("lease_id", meta.lease_id);
  text.uint("target_request", meta.target_request);
  text.uint("cursor", meta.cursor);
  text.uint("limit", meta.limit);
  text.uint("known_revision", meta.known_revision);
  text.uint("wait_ms", meta.wait_ms);
  text.bytes("descriptor", meta.descriptor);
  text.bytes("mac", meta.mac);
  text.uint("checksum", meta.checksum);
  text.uint("aborted", meta.aborted ? 1 : 0);
  text.uint("trace_id", meta.trace_id);
  text.uint("priority", static_cast<std::uint64_t>(meta.priority));
  text.uint("recompute_us", meta.recompute_us);
  text.text("label", meta.label);
  return text.str();
}

inline std::string text_of(const ReplyMeta& meta) {
  MetaText text;
  text.always("status", static_cast<std::uint64_t>(meta.status));
  text.uint("length", meta.length);
  text.uint("checksum", meta.checksum);
  text.uint("lease_id", meta.lease_id);
  text.uint("prefix", meta.prefix);
  text.uint("cursor", meta.cursor);
  text.bytes("mac", meta.mac);
  text.uint("queue_us", meta.queue_us);
  text.uint("disk_us", meta.disk_us);
  text.uint("retry_after_ms", meta.retry_after_ms);
  text.text("reason", meta.reason);
  std::string tags;
  for (const std::uint16_t tag : meta.nearest_differs_in) {
    tags += (tags.empty() ? "" : ";") + std::to_string(tag);
  }
  if (!tags.empty()) text.add("nearest_differs_in", tags);
  text.uint("lease_ms", meta.lease_ms);
  return text.str();
}

struct MetaReading {
  std::string fault;
  std::string text = "-";  // "-" where it was not read
  Buffer encoded_again;
};

template <typename Meta>
MetaReading read_meta(Bytes in, MetaFault (*decode)(Bytes, Meta&), void (*encode)(const Meta&, Buffer&)) {
  Meta meta;
  MetaReading reading;
  const MetaFault fault = decode(in, meta);
  reading.fault = meta_fault_name(fault);
  if (fault == MetaFault::kNone) {
    reading.text = text_of(meta);
    encode(meta, reading.encoded_again);
  }
  return reading;
}

inline MetaReading read_meta(const std::string& kind, Bytes in) {
  if (kind == "hello") return read_meta<HelloMeta>(in, decode_hello, encode_hello);
  if (kind == "request") return read_meta<RequestMeta>(in, decode_request, encode_request);
  return read_meta<ReplyMeta>(in, decode_reply, encode_reply);
}

}  // namespace dfkv::golden
