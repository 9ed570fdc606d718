// One direction of a connection: headers, and behind each its meta and what its opcode puts into the payload.
// The CRC is put right first, so that the fuzzer gets past it.
#include <algorithm>
#include <cstdlib>

#include "wire/checksum.h"
#include "wire/frame.h"
#include "wire/identity.h"
#include "wire/meta.h"
#include "wire/payloads.h"
#include "wire/view.h"

namespace {

using dfkv::Bytes;

void check_tables(Bytes payload) {
  dfkv::ExistsTable chunks;
  if (dfkv::decode_exists_table(payload, chunks)) {
    std::vector<std::byte> again;
    dfkv::encode_exists_table(chunks, again);
    if (!std::ranges::equal(again, payload)) std::abort();
  }
  std::vector<dfkv::ItemRef> items;
  if (dfkv::decode_item_table(payload, items)) {
    std::vector<std::byte> again;
    dfkv::encode_item_table(items, again);
    if (!std::ranges::equal(again, payload)) std::abort();
  }
}

void check_payload(dfkv::Opcode opcode, Bytes payload) {
  check_tables(payload);
  if (opcode == dfkv::Opcode::kStat) {
    const auto counters = dfkv::decode_counters(payload);
    if (counters && dfkv::decode_counters(dfkv::encode_counters(*counters)) != counters) std::abort();
  } else if (opcode == dfkv::Opcode::kList) {
    const auto namespaces = dfkv::decode_namespaces(payload);
    if (namespaces && !dfkv::decode_namespaces(dfkv::encode_namespaces(*namespaces))) std::abort();
  } else if (opcode == dfkv::Opcode::kPutNs) {
    (void)dfkv::descriptor_difference(payload, payload.first(payload.size() / 2));
  } else if (opcode == dfkv::Opcode::kSubscribe) {
    (void)dfkv::decode_view(payload);
  }
}

// Returns the bytes that the frame took; 0 where the stream ends or the header closes the connection.
std::size_t read_frame(Bytes stream) {
  if (stream.size() < dfkv::kFrameHeaderBytes) return 0;
  std::array<std::byte, dfkv::kFrameHeaderBytes> head;
  std::copy_n(stream.begin(), head.size(), head.begin());
  dfkv::store_le(head.data() + 28, dfkv::crc32c(Bytes(head).first(28)));
  dfkv::FrameHeader header;
  if (dfkv::decode_frame_header(head, {}, header) != dfkv::FrameFault::kNone) return 0;
  std::array<std::byte, dfkv::kFrameHeaderBytes> again;
  dfkv::encode_frame_header(header, again);
  if (again != head) std::abort();
  stream = stream.subspan(head.size());
  const std::size_t meta_bytes = std::min<std::size_t>(header.meta_bytes, stream.size());
  const std::size_t payload_bytes = std::min<std::size_t>(header.payload_bytes, stream.size() - meta_bytes);
  const Bytes meta = stream.first(meta_bytes);
  const auto opcode = static_cast<dfkv::Opcode>(header.opcode);
  dfkv::HelloMeta hello;
  dfkv::RequestMeta request;
  dfkv::ReplyMeta reply;
  if (opcode == dfkv::Opcode::kHello) {
    (void)dfkv::decode_hello(meta, hello);
  } else if (header.is_reply()) {
    (void)dfkv::decode_reply(meta, reply);
  } else {
    (void)dfkv::decode_request(meta, request);
  }
  check_payload(opcode, stream.subspan(meta_bytes, payload_bytes));
  return head.size() + meta_bytes + payload_bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes stream = dfkv::as_bytes(data, size);
  for (std::size_t taken = read_frame(stream); taken != 0; taken = read_frame(stream))
    stream = stream.subspan(taken);
  return 0;
}
