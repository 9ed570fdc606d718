#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "wire/frame.h"

#include <doctest/doctest.h>

#include <map>
#include <random>

#include "golden.h"
#include "meta_text.h"
#include "wire/checksum.h"
#include "wire/meta.h"
#include "wire/payloads.h"
#include "wire/view.h"

namespace dfkv {
namespace {

using HeaderBytes = std::array<std::byte, kFrameHeaderBytes>;

HeaderBytes header_at(Bytes stream, std::size_t at) {
  HeaderBytes bytes;
  std::copy_n(stream.begin() + static_cast<std::ptrdiff_t>(at), bytes.size(), bytes.begin());
  return bytes;
}

// Payloads of whole requests and replies have to decode as what their opcode says.
void check_payload(const FrameHeader& header, Bytes payload) {
  if (header.item != kWholeRequest || payload.empty() || header.is_error()) return;
  const auto opcode = static_cast<Opcode>(header.opcode);
  ExistsTable chunks;
  std::vector<ItemRef> items;
  if (!header.is_reply() && opcode == Opcode::kExists) {
    CHECK(decode_exists_table(payload, chunks));
    golden::Buffer again;
    encode_exists_table(chunks, again);
    CHECK(golden::hex(again) == golden::hex(payload));
  } else if (!header.is_reply() &&
             (opcode == Opcode::kGet || opcode == Opcode::kPut || opcode == Opcode::kRemove)) {
    CHECK(decode_item_table(payload, items));
    golden::Buffer again;
    encode_item_table(items, again);
    CHECK(golden::hex(again) == golden::hex(payload));
    for (const ItemRef& item : items) CHECK(item.route == route_of(item.block));
  } else if (header.is_reply() && opcode == Opcode::kStat) {
    const auto counters = decode_counters(payload);
    REQUIRE(counters);
    CHECK(*counters == Counters{{"objects", 3}, {"used_bytes", std::uint64_t{1} << 40}, {"pins", 0}});
    CHECK(golden::hex(encode_counters(*counters)) == golden::hex(payload));
  } else if (header.is_reply() && opcode == Opcode::kList) {
    const auto namespaces = decode_namespaces(payload);
    REQUIRE(namespaces);
    REQUIRE(namespaces->size() == 2);
    const NamespaceInfo& info = namespaces->front();
    CHECK(info.id == namespace_id(info.descriptor));
    CHECK(info.label ==
          "l\xC3\xA4"
          "bel");
    CHECK(info.objects == 12);
    CHECK(info.stored_bytes == std::uint64_t{1} << 40);
    CHECK(info.created_s == 1700000000);
    CHECK(info.last_used_s == 1700000001);
    CHECK(namespaces->back().descriptor.empty());
  } else if (header.is_reply() && opcode == Opcode::kSubscribe) {
    CHECK(decode_view(payload));
  }
}

TEST_CASE("golden frames: header, meta and payload read and written again") {
  std::map<std::string, std::size_t> read_up_to;
  std::array<bool, 256> opcode_seen{};
  for (const golden::Row& row : golden::rows("frames.txt")) {
    CAPTURE(row[0]);
    CAPTURE(row[1]);
    const golden::Buffer stream = golden::file("frames/" + row[0] + ".bin");
    std::size_t& at = read_up_to[row[0]];
    REQUIRE(at + kFrameHeaderBytes <= stream.size());
    const HeaderBytes head = header_at(stream, at);
    FrameHeader header;
    REQUIRE(decode_frame_header(head, {}, header) == FrameFault::kNone);
    CHECK(header.opcode == golden::number(row[2]));
    CHECK(header.flags == golden::number(row[3]));
    CHECK(header.request_id == golden::number(row[4]));
    CHECK(header.item == golden::number(row[5]));
    CHECK(header.payload_bytes == golden::number(row[8]));
    opcode_seen[header.opcode] = true;
    HeaderBytes again;
    encode_frame_header(header, again);
    CHECK(golden::hex(again) == golden::hex(head));

    REQUIRE(at + kFrameHeaderBytes + header.meta_bytes + header.payload_bytes <= stream.size());
    const Bytes meta = Bytes(stream).subspan(at + kFrameHeaderBytes, header.meta_bytes);
    const Bytes payload =
        Bytes(stream).subspan(at + kFrameHeaderBytes + header.meta_bytes, header.payload_bytes);
    if (!meta.empty()) {
      const golden::MetaReading reading = golden::read_meta(row[6], meta);
      CHECK(reading.fault == "none");
      CHECK(reading.text == row[7]);
      CHECK(golden::hex(reading.encoded_again) == golden::hex(meta));
    } else {
      CHECK(row[7] == "-");
    }
    CHECK(xxh3_64(payload) == golden::number(row[9]));
    check_payload(header, payload);
    at += kFrameHeaderBytes + header.meta_bytes + header.payload_bytes;
  }
  for (const auto& stream : read_up_to) {
    CAPTURE(stream.first);
    CHECK(golden::file("frames/" + stream.first + ".bin").size() == stream.second);
  }
  for (int opcode = 1; opcode <= 18; ++opcode) {
    CAPTURE(opcode);
    CHECK(opcode_seen[static_cast<std::size_t>(opcode)]);
  }
}

TEST_CASE("fragments of golden GET items carry what the first one announced") {
  const golden::Buffer stream = golden::file("frames/get_server.bin");
  std::map<std::uint32_t, golden::Buffer> received;
  std::map<std::uint32_t, ReplyMeta> announced;
  for (std::size_t at = 0; at < stream.size();) {
    FrameHeader header;
    REQUIRE(decode_frame_header(header_at(stream, at), {}, header) == FrameFault::kNone);
    const Bytes meta = Bytes(stream).subspan(at + kFrameHeaderBytes, header.meta_bytes);
    const Bytes payload =
        Bytes(stream).subspan(at + kFrameHeaderBytes + header.meta_bytes, header.payload_bytes);
    if (header.item != kWholeRequest) {
      if (received.count(header.item) == 0) {
        REQUIRE(decode_reply(meta, announced[header.item]) == MetaFault::kNone);
      }
      golden::Buffer& item = received[header.item];
      item.insert(item.end(), payload.begin(), payload.end());
      CHECK(header.last_of_item() == (item.size() == announced[header.item].length));
    }
    at += kFrameHeaderBytes + header.meta_bytes + header.payload_bytes;
  }
  REQUIRE(received.size() == 2);
  for (const auto& [item, bytes] : received) CHECK(xxh3_64(bytes) == announced[item].checksum);
}

TEST_CASE("golden headers that close the connection") {
  for (const golden::Row& row : golden::rows("bad_frames.txt")) {
    CAPTURE(row[0]);
    FrameHeader header;
    CHECK(std::string(frame_fault_name(decode_frame_header(golden::exact<32>(row[2]), {}, header))) ==
          row[1]);
  }
}

TEST_CASE("negotiated limits are the ones that count") {
  FrameHeader header{1, 0, 1, 0, 100, 200};
  HeaderBytes bytes;
  encode_frame_header(header, bytes);
  FrameHeader out;
  CHECK(decode_frame_header(bytes, {100, 200}, out) == FrameFault::kNone);
  CHECK(decode_frame_header(bytes, {99, 200}, out) == FrameFault::kMetaLimit);
  CHECK(decode_frame_header(bytes, {100, 199}, out) == FrameFault::kPayloadLimit);
}

TEST_CASE("a header with one bit turned is never taken") {
  const unsigned seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 50; ++round) {
    const FrameHeader header{static_cast<std::uint8_t>(random()),
                             static_cast<std::uint16_t>(random() & ~std::uint64_t{kFlagsMustBeZero}),
                             random(),
                             static_cast<std::uint32_t>(random()),
                             static_cast<std::uint32_t>(random()),
                             static_cast<std::uint32_t>(random())};
    HeaderBytes bytes;
    encode_frame_header(header, bytes);
    FrameHeader out;
    REQUIRE(decode_frame_header(bytes, {~0u, ~0u}, out) == FrameFault::kNone);
    CHECK(out.request_id == header.request_id);
    for (std::size_t bit = 0; bit < 256; ++bit) {
      const auto mask = static_cast<std::byte>(1u << (bit % 8));
      bytes[bit / 8] ^= mask;
      CHECK(decode_frame_header(bytes, {~0u, ~0u}, out) != FrameFault::kNone);
      bytes[bit / 8] ^= mask;
    }
  }
}

TEST_CASE("every fault has a name of its own") {
  std::map<std::string, int> names;
  for (int fault = 0; fault <= static_cast<int>(FrameFault::kPayloadLimit); ++fault) {
    ++names[frame_fault_name(static_cast<FrameFault>(fault))];
  }
  CHECK(names.size() == 7);
  CHECK(names.count("unknown") == 0);
}

}  // namespace
}  // namespace dfkv
