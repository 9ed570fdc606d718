#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "slab/record.h"

#include <doctest/doctest.h>

#include <map>

#include "golden.h"
#include "wire/checksum.h"

namespace dfkv {
namespace {

using RecordBytes = std::array<std::byte, kSlotRecordBytes>;
using HeaderBytes = std::array<std::byte, kSlotTableHeaderBytes>;

const char* name(RecordFault fault) {
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

std::string text_of(const SlotRecord& record) {
  std::string out;
  const auto add = [&out](const char* key, const std::string& value) {
    out += (out.empty() ? "" : ",") + std::string(key) + "=" + value;
  };
  add("state", std::to_string(static_cast<int>(record.state)));
  add("codec", std::to_string(record.codec));
  add("priority", std::to_string(record.priority));
  add("sequence", std::to_string(record.sequence));
  add("namespace", golden::hex(record.key.ns.bytes));
  add("block", golden::hex(record.key.block.bytes));
  add("part", std::to_string(record.key.part));
  add("route", std::to_string(record.route));
  add("checksum", std::to_string(record.checksum));
  add("stored_bytes", std::to_string(record.stored_bytes));
  add("raw_bytes", std::to_string(record.raw_bytes));
  add("created_s", std::to_string(record.created_s));
  add("expires_s", std::to_string(record.expires_s));
  add("extent_generation", std::to_string(record.extent_generation));
  add("namespace_generation", std::to_string(record.namespace_generation));
  add("tenant", std::to_string(record.tenant));
  add("recompute_us", std::to_string(record.recompute_us));
  add("key_id", std::to_string(record.key_id));
  return out;
}

TEST_CASE("golden slot records") {
  std::map<std::string, int> faults;
  for (const golden::Row& row : golden::rows("record.txt")) {
    CAPTURE(row[0]);
    const StoreUuid store{golden::exact<16>(row[2])};
    const std::uint64_t slot = golden::number(row[3]);
    const auto bytes = golden::exact<kSlotRecordBytes>(row[4]);
    SlotRecord record;
    const RecordFault fault = decode_slot_record(bytes, store, slot, record);
    CHECK(std::string(name(fault)) == row[1]);
    ++faults[row[1]];
    if (fault != RecordFault::kNone) continue;
    CHECK(text_of(record) == row[5]);
    RecordBytes again;
    encode_slot_record(record, store, slot, again);
    CHECK(golden::hex(again) == row[4]);
  }
  CHECK(faults.size() == 4);
}

TEST_CASE("a record is not believed in another place, in another store, or with any bit turned") {
  const auto rows = golden::rows("record.txt");
  const golden::Row& row = rows[1];
  REQUIRE(row[0] == "live");
  const StoreUuid store{golden::exact<16>(row[2])};
  const std::uint64_t slot = golden::number(row[3]);
  auto bytes = golden::exact<kSlotRecordBytes>(row[4]);
  SlotRecord record;
  REQUIRE(decode_slot_record(bytes, store, slot, record) == RecordFault::kNone);
  for (int bit = 0; bit < 64; ++bit) {
    CHECK(decode_slot_record(bytes, store, slot ^ (std::uint64_t{1} << bit), record) == RecordFault::kCrc);
  }
  for (std::size_t i = 0; i < store.bytes.size(); ++i) {
    StoreUuid other = store;
    other.bytes[i] ^= std::byte{1};
    CHECK(decode_slot_record(bytes, other, slot, record) == RecordFault::kCrc);
  }
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    CHECK(decode_slot_record(bytes, store, slot, record) == RecordFault::kCrc);
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  }
}

TEST_CASE("space that was never written is a free slot") {
  SlotRecord record;
  record.state = RecordState::kLive;
  CHECK(decode_slot_record(RecordBytes{}, StoreUuid{}, 3, record) == RecordFault::kNone);
  CHECK(record.state == RecordState::kFree);
  RecordBytes nearly{};
  nearly[127] = std::byte{1};
  CHECK(decode_slot_record(nearly, StoreUuid{}, 3, record) == RecordFault::kCrc);
}

HeaderBytes header_from(const std::string& first_bytes) {
  HeaderBytes header{};
  const golden::Buffer first = golden::unhex(first_bytes);
  std::copy(first.begin(), first.end(), header.begin());
  return header;
}

void seal(HeaderBytes& header) {
  store_le(header.data() + 12, std::uint32_t{0});
  store_le(header.data() + 12, crc32c(header));
}

TEST_CASE("golden table headers") {
  for (const golden::Row& row : golden::rows("table_header.txt")) {
    CAPTURE(row[0]);
    const HeaderBytes bytes = header_from(row[8]);
    SlotTableHeader header;
    REQUIRE(decode_table_header(bytes, header) == TableFault::kNone);
    CHECK(header.major == 1);
    CHECK(header.minor == golden::number(row[1]));
    CHECK(golden::hex(header.store.bytes) == row[2]);
    CHECK(header.extent_bytes == golden::number(row[3]));
    CHECK(header.extent_count == golden::number(row[4]));
    CHECK(header.slot_count == golden::number(row[5]));
    CHECK(header.lattice_id == golden::number(row[6]));
    CHECK(header.node_id == row[7]);
    HeaderBytes again;
    encode_table_header(header, again);
    CHECK(again == bytes);
  }
}

TEST_CASE("table headers that are not taken") {
  const auto rows = golden::rows("table_header.txt");
  const HeaderBytes good = header_from(rows[0][8]);
  SlotTableHeader header;
  const auto fault_with = [&](std::size_t at, std::uint8_t value, bool sealed) {
    HeaderBytes changed = good;
    changed[at] = static_cast<std::byte>(value);
    if (sealed) seal(changed);
    return decode_table_header(changed, header);
  };
  CHECK(fault_with(0, 'X', true) == TableFault::kMagic);
  CHECK(fault_with(8, 2, true) == TableFault::kMajor);
  CHECK(fault_with(8, 2, false) == TableFault::kCrc);
  CHECK(fault_with(60, 129, true) == TableFault::kMalformed);
  CHECK(fault_with(62, 1, true) == TableFault::kMalformed);
  CHECK(fault_with(70, 'x', true) == TableFault::kMalformed);  // behind the end of the node id
  CHECK(fault_with(192, 1, true) == TableFault::kMalformed);   // zero in minor 0
  CHECK(fault_with(4095, 1, true) == TableFault::kMalformed);
  CHECK(fault_with(32, 1, true) == TableFault::kNone);
  for (std::size_t at = 8; at < good.size(); at += at < 256 ? 1 : 37) {
    const auto other = static_cast<std::uint8_t>(static_cast<std::uint8_t>(good[at]) ^ 0x10);
    CAPTURE(at);
    CHECK(fault_with(at, other, false) == TableFault::kCrc);
  }
  HeaderBytes later = good;
  later[10] = std::byte{1};
  later[200] = std::byte{7};
  seal(later);
  CHECK(decode_table_header(later, header) == TableFault::kNone);
  CHECK(header.minor == 1);

  SlotTableHeader too_long;
  too_long.node_id = std::string(129, 'n');
  HeaderBytes out;
  CHECK_THROWS_AS(encode_table_header(too_long, out), std::length_error);
}

}  // namespace
}  // namespace dfkv
