// The 128-byte slot record of slots.tbl and the table's 4 KiB header. Bytes in docs/formats.md.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "wire/bytes.h"
#include "wire/identity.h"

namespace dfkv {

inline constexpr std::size_t kSlotRecordBytes = 128;
inline constexpr std::size_t kSlotTableHeaderBytes = 4096;
inline constexpr std::uint8_t kSlotRecordVersion = 1;

enum class RecordState : std::uint8_t { kFree = 0, kLive = 1, kQuarantined = 2 };

struct SlotRecord {
  RecordState state = RecordState::kFree;
  std::uint8_t codec = 0;
  std::uint8_t priority = 0;
  std::uint64_t sequence = 0;
  ObjectKey key;
  Route route = 0;
  std::uint64_t checksum = 0;  // xxh3-64 of the stored bytes
  std::uint32_t stored_bytes = 0;
  std::uint32_t raw_bytes = 0;
  std::uint32_t created_s = 0;
  std::uint32_t expires_s = 0;
  std::uint32_t extent_generation = 0;
  std::uint32_t namespace_generation = 0;
  std::uint32_t tenant = 0;
  std::uint32_t recompute_us = 0;
  std::uint32_t key_id = 0;
};

enum class RecordFault : std::uint8_t { kNone, kCrc, kVersion, kNotZero };

struct StoreUuid {
  std::array<std::byte, 16> bytes{};
  auto operator<=>(const StoreUuid&) const = default;
};

void encode_slot_record(const SlotRecord& record, const StoreUuid& store, std::uint64_t slot,
                        std::span<std::byte, kSlotRecordBytes> out);
// kVersion: the CRC holds but the version is unknown: a miss, kept until repair.
[[nodiscard]] RecordFault decode_slot_record(std::span<const std::byte, kSlotRecordBytes> in,
                                             const StoreUuid& store, std::uint64_t slot, SlotRecord& out);

struct SlotTableHeader {
  std::uint16_t major = 1;
  std::uint16_t minor = 0;
  StoreUuid store;
  std::uint64_t extent_bytes = 0;
  std::uint64_t extent_count = 0;
  std::uint64_t slot_count = 0;
  std::uint32_t lattice_id = 0;  // which size-class lattice
  std::string node_id;           // at most 128 bytes
};
enum class TableFault : std::uint8_t { kNone, kMagic, kCrc, kMajor, kMalformed };
void encode_table_header(const SlotTableHeader& header, std::span<std::byte, kSlotTableHeaderBytes> out);
[[nodiscard]] TableFault decode_table_header(std::span<const std::byte, kSlotTableHeaderBytes> in,
                                             SlotTableHeader& out);

}  // namespace dfkv
