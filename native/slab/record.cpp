#include "slab/record.h"

#include <algorithm>
#include <stdexcept>

#include "wire/checksum.h"

namespace dfkv {

namespace {

// Offsets inside a slot record.
constexpr std::size_t kVersionAt = 4;
constexpr std::size_t kStateAt = 5;
constexpr std::size_t kCodecAt = 6;
constexpr std::size_t kPriorityAt = 7;
constexpr std::size_t kSequenceAt = 8;
constexpr std::size_t kNamespaceAt = 16;
constexpr std::size_t kBlockAt = 32;
constexpr std::size_t kPartAt = 48;
constexpr std::size_t kRouteAt = 56;
constexpr std::size_t kChecksumAt = 64;
constexpr std::size_t kStoredBytesAt = 72;
constexpr std::size_t kRawBytesAt = 76;
constexpr std::size_t kCreatedAt = 80;
constexpr std::size_t kExpiresAt = 84;
constexpr std::size_t kExtentGenerationAt = 88;
constexpr std::size_t kNamespaceGenerationAt = 92;
constexpr std::size_t kTenantAt = 96;
constexpr std::size_t kRecomputeAt = 100;
constexpr std::size_t kKeyIdAt = 104;
constexpr std::size_t kZeroAt = 108;

// Offsets inside the table header.
constexpr std::uint64_t kTableMagic = 0x53544F4C534B4644;  // "DFKSLOTS"
constexpr std::size_t kTableMajorAt = 8;
constexpr std::size_t kTableMinorAt = 10;
constexpr std::size_t kTableCrcAt = 12;
constexpr std::size_t kTableStoreAt = 16;
constexpr std::size_t kTableExtentBytesAt = 32;
constexpr std::size_t kTableExtentCountAt = 40;
constexpr std::size_t kTableSlotCountAt = 48;
constexpr std::size_t kTableLatticeAt = 56;
constexpr std::size_t kTableNodeIdBytesAt = 60;
constexpr std::size_t kTableNodeIdAt = 64;
constexpr std::size_t kMaxNodeIdBytes = 128;
constexpr std::size_t kTableZeroAt = kTableNodeIdAt + kMaxNodeIdBytes;
constexpr std::uint16_t kTableMajor = 1;

bool all_zero(Bytes bytes) {
  return std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; });
}

// The store and the slot number go into the CRC, so that a record that was copied elsewhere is not believed.
std::uint32_t record_crc(Bytes record, const StoreUuid& store, std::uint64_t slot) {
  std::uint32_t crc = crc32c(store.bytes);
  crc = crc32c(as_bytes(&slot, sizeof slot), crc);
  return crc32c(record.subspan(kVersionAt), crc);
}

std::uint32_t table_crc(std::span<const std::byte, kSlotTableHeaderBytes> header) {
  constexpr std::array<std::byte, 4> kZeroCrc{};
  std::uint32_t crc = crc32c(header.first(kTableCrcAt));
  crc = crc32c(kZeroCrc, crc);
  return crc32c(header.subspan(kTableCrcAt + kZeroCrc.size()), crc);
}

}  // namespace

void encode_slot_record(const SlotRecord& record, const StoreUuid& store, std::uint64_t slot,
                        std::span<std::byte, kSlotRecordBytes> out) {
  std::ranges::fill(out, std::byte{0});
  std::byte* at = out.data();
  store_le(at + kVersionAt, kSlotRecordVersion);
  store_le(at + kStateAt, static_cast<std::uint8_t>(record.state));
  store_le(at + kCodecAt, record.codec);
  store_le(at + kPriorityAt, record.priority);
  store_le(at + kSequenceAt, record.sequence);
  std::ranges::copy(record.key.ns.bytes, at + kNamespaceAt);
  std::ranges::copy(record.key.block.bytes, at + kBlockAt);
  store_le(at + kPartAt, record.key.part);
  store_le(at + kRouteAt, record.route);
  store_le(at + kChecksumAt, record.checksum);
  store_le(at + kStoredBytesAt, record.stored_bytes);
  store_le(at + kRawBytesAt, record.raw_bytes);
  store_le(at + kCreatedAt, record.created_s);
  store_le(at + kExpiresAt, record.expires_s);
  store_le(at + kExtentGenerationAt, record.extent_generation);
  store_le(at + kNamespaceGenerationAt, record.namespace_generation);
  store_le(at + kTenantAt, record.tenant);
  store_le(at + kRecomputeAt, record.recompute_us);
  store_le(at + kKeyIdAt, record.key_id);
  store_le(at, record_crc(out, store, slot));
}

RecordFault decode_slot_record(std::span<const std::byte, kSlotRecordBytes> in, const StoreUuid& store,
                               std::uint64_t slot, SlotRecord& out) {
  const std::byte* at = in.data();
  if (load_le<std::uint32_t>(at) != record_crc(in, store, slot)) {
    if (!all_zero(in)) return RecordFault::kCrc;
    out = SlotRecord{};  // never written: preallocated space reads as zeros
    return RecordFault::kNone;
  }
  const auto state = load_le<std::uint8_t>(at + kStateAt);
  if (load_le<std::uint8_t>(at + kVersionAt) != kSlotRecordVersion ||
      state > static_cast<std::uint8_t>(RecordState::kQuarantined)) {
    return RecordFault::kVersion;
  }
  if (!all_zero(in.subspan(kZeroAt))) return RecordFault::kNotZero;
  out.state = static_cast<RecordState>(state);
  out.codec = load_le<std::uint8_t>(at + kCodecAt);
  out.priority = load_le<std::uint8_t>(at + kPriorityAt);
  out.sequence = load_le<std::uint64_t>(at + kSequenceAt);
  std::copy_n(at + kNamespaceAt, out.key.ns.bytes.size(), out.key.ns.bytes.begin());
  std::copy_n(at + kBlockAt, out.key.block.bytes.size(), out.key.block.bytes.begin());
  out.key.part = load_le<std::uint64_t>(at + kPartAt);
  out.route = load_le<std::uint64_t>(at + kRouteAt);
  out.checksum = load_le<std::uint64_t>(at + kChecksumAt);
  out.stored_bytes = load_le<std::uint32_t>(at + kStoredBytesAt);
  out.raw_bytes = load_le<std::uint32_t>(at + kRawBytesAt);
  out.created_s = load_le<std::uint32_t>(at + kCreatedAt);
  out.expires_s = load_le<std::uint32_t>(at + kExpiresAt);
  out.extent_generation = load_le<std::uint32_t>(at + kExtentGenerationAt);
  out.namespace_generation = load_le<std::uint32_t>(at + kNamespaceGenerationAt);
  out.tenant = load_le<std::uint32_t>(at + kTenantAt);
  out.recompute_us = load_le<std::uint32_t>(at + kRecomputeAt);
  out.key_id = load_le<std::uint32_t>(at + kKeyIdAt);
  return RecordFault::kNone;
}

void encode_table_header(const SlotTableHeader& header, std::span<std::byte, kSlotTableHeaderBytes> out) {
  if (header.node_id.size() > kMaxNodeIdBytes) throw std::length_error("a node id is over 128 bytes");
  std::ranges::fill(out, std::byte{0});
  std::byte* at = out.data();
  store_le(at, kTableMagic);
  store_le(at + kTableMajorAt, header.major);
  store_le(at + kTableMinorAt, header.minor);
  std::ranges::copy(header.store.bytes, at + kTableStoreAt);
  store_le(at + kTableExtentBytesAt, header.extent_bytes);
  store_le(at + kTableExtentCountAt, header.extent_count);
  store_le(at + kTableSlotCountAt, header.slot_count);
  store_le(at + kTableLatticeAt, header.lattice_id);
  store_le(at + kTableNodeIdBytesAt, static_cast<std::uint32_t>(header.node_id.size()));
  std::ranges::copy(as_bytes(header.node_id.data(), header.node_id.size()), at + kTableNodeIdAt);
  store_le(at + kTableCrcAt, table_crc(out));
}

TableFault decode_table_header(std::span<const std::byte, kSlotTableHeaderBytes> in, SlotTableHeader& out) {
  const std::byte* at = in.data();
  if (load_le<std::uint64_t>(at) != kTableMagic) return TableFault::kMagic;
  // The CRC keeps its place and its range in every major version: damage is never taken for a newer format.
  if (load_le<std::uint32_t>(at + kTableCrcAt) != table_crc(in)) return TableFault::kCrc;
  const auto major = load_le<std::uint16_t>(at + kTableMajorAt);
  if (major != kTableMajor) return TableFault::kMajor;
  const auto minor = load_le<std::uint16_t>(at + kTableMinorAt);
  const auto node_id_bytes = load_le<std::uint32_t>(at + kTableNodeIdBytesAt);
  if (node_id_bytes > kMaxNodeIdBytes) return TableFault::kMalformed;
  const auto node_id = in.subspan(kTableNodeIdAt, kMaxNodeIdBytes);
  if (!all_zero(node_id.subspan(node_id_bytes))) return TableFault::kMalformed;
  // A later minor may use bytes that are zero in minor 0, where zero means "as before".
  if (minor == 0 && !all_zero(in.subspan(kTableZeroAt))) return TableFault::kMalformed;
  out.major = major;
  out.minor = minor;
  std::copy_n(at + kTableStoreAt, out.store.bytes.size(), out.store.bytes.begin());
  out.extent_bytes = load_le<std::uint64_t>(at + kTableExtentBytesAt);
  out.extent_count = load_le<std::uint64_t>(at + kTableExtentCountAt);
  out.slot_count = load_le<std::uint64_t>(at + kTableSlotCountAt);
  out.lattice_id = load_le<std::uint32_t>(at + kTableLatticeAt);
  out.node_id.assign(reinterpret_cast<const char*>(node_id.data()), node_id_bytes);
  return TableFault::kNone;
}

}  // namespace dfkv
