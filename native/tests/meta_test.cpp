#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "wire/meta.h"

#include <doctest/doctest.h>

#include <set>

#include "golden.h"
#include "meta_text.h"
#include "wire/msgpack.h"
#include "wire/payloads.h"

namespace dfkv {
namespace {

HelloMeta full_hello() {
  HelloMeta meta;
  meta.features_offered = 1;
  meta.features_required = 2;
  meta.lane = Lane::kBulk;
  meta.max_meta_bytes = 3;
  meta.max_fragment_bytes = 4;
  meta.auth_methods = kAuthHmac;
  meta.nonce.fill(std::byte{5});
  meta.node_id = std::string(128, 'n');
  meta.incarnation = 6;
  meta.boot_id.fill(std::byte{7});
  meta.software = "dfkv";
  meta.client_name = "client";
  return meta;
}

RequestMeta full_request() {
  RequestMeta meta;
  meta.ns = NamespaceId{};
  meta.deadline_us = 1;
  meta.lease_ms = 2;
  meta.ack = Ack::kDisk;
  meta.replace = true;
  meta.lease_id = 3;
  meta.target_request = 4;
  meta.cursor = 5;
  meta.limit = 6;
  meta.known_revision = 7;
  meta.wait_ms = 8;
  meta.descriptor = golden::pattern(300);
  meta.mac = golden::pattern(32);
  meta.checksum = 0;
  meta.aborted = true;
  meta.trace_id = ~std::uint64_t{0};
  meta.priority = Priority::kBackground;
  meta.recompute_us = 9;
  meta.label = "label";
  return meta;
}

ReplyMeta full_reply() {
  ReplyMeta meta;
  meta.status = Status::kAgainBusy;
  meta.length = 1;
  meta.checksum = 2;
  meta.lease_id = 3;
  meta.prefix = 4;
  meta.cursor = 5;
  meta.mac = golden::pattern(32);
  meta.queue_us = 6;
  meta.disk_us = 7;
  meta.retry_after_ms = 8;
  meta.reason = "reason";
  meta.nearest_differs_in = {1, 2, 65535};
  meta.lease_ms = 9;
  return meta;
}

std::vector<std::pair<std::string, golden::Buffer>> full_metas() {
  golden::Buffer hello;
  golden::Buffer request;
  golden::Buffer reply;
  encode_hello(full_hello(), hello);
  encode_request(full_request(), request);
  encode_reply(full_reply(), reply);
  return {{"hello", hello}, {"request", request}, {"reply", reply}};
}

TEST_CASE("golden meta: verdict, fields, and the canonical bytes again") {
  std::set<std::string> verdicts;
  for (const golden::Row& row : golden::rows("meta.txt")) {
    CAPTURE(row[0]);
    CAPTURE(row[1]);
    const golden::Buffer data = golden::unhex(row[3]);
    const golden::MetaReading reading = golden::read_meta(row[0], data);
    verdicts.insert(row[2]);
    CHECK(reading.fault == (row[2] == "lenient" ? "none" : row[2]));
    CHECK(reading.text == row[4]);
    if (row[2] == "none") CHECK(golden::hex(reading.encoded_again) == golden::hex(data));
    if (row[2] == "lenient") CHECK(golden::hex(reading.encoded_again) != golden::hex(data));
  }
  CHECK(verdicts.size() == 7);
}

TEST_CASE("every field survives") {
  for (const auto& meta : full_metas()) {
    const std::string& kind = meta.first;
    const golden::Buffer& data = meta.second;
    CAPTURE(kind);
    const golden::MetaReading reading = golden::read_meta(kind, data);
    CHECK(reading.fault == "none");
    CHECK(golden::hex(reading.encoded_again) == golden::hex(data));
    const std::size_t fields = golden::split(reading.text, ',').size();
    CHECK(fields == (kind == "hello" ? 12 : kind == "request" ? 19 : 13));
  }
}

TEST_CASE("cut at every byte, with a byte too many, and with every byte changed") {
  for (const auto& meta : full_metas()) {
    const std::string& kind = meta.first;
    const golden::Buffer& data = meta.second;
    CAPTURE(kind);
    for (std::size_t size = kind == "request" ? 1 : 0; size < data.size(); ++size) {
      CAPTURE(size);
      CHECK(golden::read_meta(kind, Bytes(data).first(size)).fault == "malformed");
    }
    golden::Buffer longer = data;
    longer.push_back(std::byte{0});
    CHECK(golden::read_meta(kind, longer).fault == "malformed");
    for (std::size_t at = 0; at < data.size(); ++at) {
      golden::Buffer changed = data;
      for (int value = 0; value < 256; ++value) {
        changed[at] = static_cast<std::byte>(value);
        const golden::MetaReading reading = golden::read_meta(kind, changed);
        // Whatever is read can be written and read again with the same meaning.
        if (reading.fault == "none")
          CHECK(golden::read_meta(kind, reading.encoded_again).text == reading.text);
      }
    }
  }
}

TEST_CASE("decoding overwrites what the struct held before") {
  golden::Buffer empty_map{std::byte{0x80}};
  RequestMeta meta = full_request();
  REQUIRE(decode_request(empty_map, meta) == MetaFault::kNone);
  CHECK(golden::text_of(meta) == "-");
  meta = full_request();
  REQUIRE(decode_request({}, meta) == MetaFault::kNone);
  CHECK(golden::text_of(meta) == "-");
}

TEST_CASE("encoders append") {
  golden::Buffer out = golden::pattern(3);
  encode_request({}, out);
  CHECK(golden::hex(out) == golden::hex(golden::pattern(3)) + "80");
}

TEST_CASE("text for people is cut at a character, fields that mean something are not") {
  RequestMeta request;
  request.label = std::string(255, 'x') + "\xC3\xA4";
  ReplyMeta reply;
  reply.reason = std::string(5000, 'r');
  golden::Buffer out;
  encode_request(request, out);
  RequestMeta read;
  REQUIRE(decode_request(out, read) == MetaFault::kNone);
  CHECK(read.label == std::string(255, 'x'));
  out.clear();
  encode_reply(reply, out);
  ReplyMeta read_reply;
  REQUIRE(decode_reply(out, read_reply) == MetaFault::kNone);
  CHECK(read_reply.reason == std::string(1024, 'r'));

  HelloMeta hello;
  hello.node_id = std::string(129, 'n');
  CHECK_THROWS_AS(encode_hello(hello, out), std::length_error);
  request.descriptor.resize(kMaxDescriptorBytes + 1);
  CHECK_THROWS_AS(encode_request(request, out), std::length_error);
}

TEST_CASE("a descriptor at its limit passes, one byte more does not") {
  RequestMeta meta;
  meta.descriptor.resize(kMaxDescriptorBytes);
  golden::Buffer out;
  encode_request(meta, out);
  RequestMeta read;
  CHECK(decode_request(out, read) == MetaFault::kNone);
  out = {std::byte{0x81}, std::byte{12}};
  msgpack::Writer(out).bin(golden::Buffer(kMaxDescriptorBytes + 1));
  CHECK(decode_request(out, read) == MetaFault::kTooLarge);
}

TEST_CASE("a count beyond the bytes that are there is refused before anything is read") {
  std::uint32_t count = 0;
  for (const char* const data : {"dd00000003c0c0", "dc0003c0c0", "93c0c0", "ddffffffff", "ddffffffffc0"}) {
    CAPTURE(data);
    const golden::Buffer bytes = golden::unhex(data);
    msgpack::Reader reader(bytes);
    CHECK_FALSE(reader.array(~0u, count));
    CHECK(reader.fault() == msgpack::Fault::kTruncated);
  }
  for (const char* const data :
       {"df00000002c0c0c0", "de0002c0c0c0", "82c0c0c0", "dfffffffff", "dfffffffffc0c0"}) {
    CAPTURE(data);
    const golden::Buffer bytes = golden::unhex(data);
    msgpack::Reader reader(bytes);
    CHECK_FALSE(reader.map(~0u, count));
    CHECK(reader.fault() == msgpack::Fault::kTruncated);
  }
}

TEST_CASE("the first fault of a reader stays") {
  const golden::Buffer bytes = golden::unhex("a16107");
  msgpack::Reader reader(bytes);
  std::uint64_t value = 0;
  std::string_view text;
  CHECK_FALSE(reader.uint(value));
  CHECK_FALSE(reader.str(10, text));
  CHECK_FALSE(reader.skip());
  CHECK(reader.fault() == msgpack::Fault::kType);
  CHECK_FALSE(reader.finished());
}

// ---- tables
// -----------------------------------------------------------------------------------------------------

ExistsTable some_chunks(std::size_t parts, std::size_t chunks) {
  ExistsTable table;
  for (std::size_t i = 0; i < parts; ++i)
    table.parts.push_back(encode_part({.stage = static_cast<std::uint16_t>(i)}));
  for (std::size_t i = 0; i < chunks; ++i) {
    ChunkRef& chunk = table.chunks.emplace_back();
    store_le(chunk.block.bytes.data() + 8, i);
    chunk.route = ~i;
  }
  return table;
}

TEST_CASE("chunk tables: limits, cuts and zero bits") {
  for (const auto& [parts, chunks] :
       {std::pair{1u, 1u}, {2u, 3u}, {kMaxPartsPerRequest, kMaxChunksPerRequest}}) {
    const ExistsTable table = some_chunks(parts, chunks);
    golden::Buffer data;
    encode_exists_table(table, data);
    CHECK(data.size() == 8 + 8 * parts + kChunkRefBytes * chunks);
    ExistsTable read;
    REQUIRE(decode_exists_table(data, read));
    CHECK(read.parts == table.parts);
    REQUIRE(read.chunks.size() == chunks);
    CHECK(read.chunks.back().block == table.chunks.back().block);
    CHECK(read.chunks.back().route == table.chunks.back().route);
    for (std::size_t size = 0; size < std::min<std::size_t>(data.size(), 200); ++size) {
      CHECK_FALSE(decode_exists_table(Bytes(data).first(size), read));
    }
    data.push_back(std::byte{0});
    CHECK_FALSE(decode_exists_table(data, read));
  }
  ExistsTable read;
  for (const auto& [parts, chunks] :
       {std::pair{0u, 1u}, {1u, 0u}, {kMaxPartsPerRequest + 1, 1u}, {1u, kMaxChunksPerRequest + 1}}) {
    golden::Buffer data;
    encode_exists_table(some_chunks(parts, chunks), data);
    CHECK_FALSE(decode_exists_table(data, read));
  }
  golden::Buffer lying(8, std::byte{0xFF});
  CHECK_FALSE(decode_exists_table(lying, read));
  ExistsTable all_parts = some_chunks(1, 1);
  all_parts.parts[0] = kAllParts;
  golden::Buffer data;
  encode_exists_table(all_parts, data);
  CHECK_FALSE(decode_exists_table(data, read));
}

std::vector<ItemRef> some_items(std::size_t count) {
  std::vector<ItemRef> items(count);
  for (std::size_t i = 0; i < count; ++i) {
    store_le(items[i].block.bytes.data(), i);
    items[i].part = i % (Part{1} << 56);
    items[i].route = i * 3;
    items[i].length = static_cast<std::uint32_t>(i * 5);
  }
  return items;
}

TEST_CASE("item tables: limits, cuts and zero bytes") {
  for (const std::size_t count : {std::size_t{1}, std::size_t{3}, std::size_t{kMaxItemsPerRequest}}) {
    golden::Buffer data;
    encode_item_table(some_items(count), data);
    CHECK(data.size() == 8 + kItemRefBytes * count);
    std::vector<ItemRef> read;
    REQUIRE(decode_item_table(data, read));
    REQUIRE(read.size() == count);
    CHECK(read.back().length == (count - 1) * 5);
    for (std::size_t size = 0; size < std::min<std::size_t>(data.size(), 200); ++size) {
      CHECK_FALSE(decode_item_table(Bytes(data).first(size), read));
    }
    for (const std::size_t zero_at : {4u, 8u + 36u, 8u + 39u, 8u + 23u}) {
      golden::Buffer used = data;
      used[zero_at] = std::byte{1};
      CAPTURE(zero_at);
      CHECK_FALSE(decode_item_table(used, read));
    }
  }
  std::vector<ItemRef> read;
  golden::Buffer data;
  encode_item_table(some_items(kMaxItemsPerRequest + 1), data);
  CHECK_FALSE(decode_item_table(data, read));
  data.clear();
  encode_item_table({}, data);
  CHECK_FALSE(decode_item_table(data, read));
}

// ---- payloads
// ---------------------------------------------------------------------------------------------------

TEST_CASE("counters and namespaces: cuts, repeats and limits") {
  const Counters counters{{"a", 1}, {"b", ~std::uint64_t{0}}};
  const golden::Buffer data = encode_counters(counters);
  CHECK(decode_counters(data) == counters);
  for (std::size_t size = 0; size < data.size(); ++size)
    CHECK_FALSE(decode_counters(Bytes(data).first(size)));
  CHECK_FALSE(decode_counters(encode_counters({{"a", 1}, {"a", 2}})));
  CHECK_FALSE(decode_counters(encode_counters({{std::string(129, 'a'), 1}})));
  CHECK_FALSE(decode_counters(encode_counters(Counters(kMaxCounters + 1, {"a", 1}))));

  NamespaceInfo info;
  info.id.bytes.fill(std::byte{1});
  info.descriptor = golden::pattern(70);
  info.label = std::string(400, 'l');
  info.objects = 2;
  info.stored_bytes = 3;
  info.created_s = 4;
  info.last_used_s = 5;
  const golden::Buffer listed = encode_namespaces({info, NamespaceInfo{}});
  const auto read = decode_namespaces(listed);
  REQUIRE(read);
  CHECK(read->front().label == std::string(256, 'l'));
  CHECK(read->front().descriptor == info.descriptor);
  CHECK(read->front().last_used_s == 5);
  CHECK(golden::hex(encode_namespaces(*read)) == golden::hex(listed));
  for (std::size_t size = 0; size < listed.size(); ++size)
    CHECK_FALSE(decode_namespaces(Bytes(listed).first(size)));
  CHECK_FALSE(decode_namespaces(golden::unhex("9180")));  // no id
  CHECK_FALSE(decode_namespaces(
      golden::unhex("918201c410" + std::string(32, '0') + "0801")));  // unknown critical key
  CHECK(decode_namespaces(golden::unhex("918201c410" + std::string(32, '0') + "cc8001")));  // ignorable key
  CHECK_FALSE(decode_namespaces(golden::unhex("ddffffffff")));                              // lying count
}

// ---- status
// -----------------------------------------------------------------------------------------------------

TEST_CASE("unknown statuses are read by their range") {
  CHECK(status_name(static_cast<Status>(99)) == "done_other");
  CHECK(status_name(static_cast<Status>(199)) == "miss_other");
  CHECK(status_name(static_cast<Status>(299)) == "again_other");
  CHECK(status_name(static_cast<Status>(65535)) == "refused_other");
  CHECK(range_of(static_cast<Status>(100)) == StatusRange::kMiss);
  CHECK(range_of(static_cast<Status>(99)) == StatusRange::kDone);
  std::set<std::string_view> names;
  int known = 0;
  for (int value = 0; value < 400; ++value) {
    const std::string_view name = status_name(static_cast<Status>(value));
    if (name.ends_with("_other")) continue;
    ++known;
    names.insert(name);
  }
  CHECK(known == 26);
  CHECK(names.size() == 26);
}

}  // namespace
}  // namespace dfkv
