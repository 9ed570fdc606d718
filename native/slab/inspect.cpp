#include "slab/inspect.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

#include "slab/size_class.h"

namespace dfkv {

namespace {

void count(DirectorySummary& out, const SlotRecord& record) {
  out.latest_sequence = std::max(out.latest_sequence, record.sequence);
  if (record.state == RecordState::kQuarantined) ++out.quarantined;
  if (record.state != RecordState::kLive) return;
  DirectorySummary::Space& space = out.spaces[record.key.ns];
  if (space.saved && space.saved->generation != record.namespace_generation) {
    ++space.stale_objects;
    return;
  }
  const std::uint64_t slot_bytes = slot_bytes_of(size_class_of(record.stored_bytes));
  ++space.objects;
  space.stored_bytes += record.stored_bytes;
  ++out.objects;
  out.stored_bytes += record.stored_bytes;
  out.slot_bytes += slot_bytes;
  ++out.objects_by_slot_bytes[slot_bytes];
}

}  // namespace

DirectorySummary inspect_directory(const std::filesystem::path& path) {
  DirectorySummary out;
  const std::filesystem::path table = path / "slots.tbl";
  out.header = read_table_header(table);
  if (const auto state = read_saved_state(path / "namespaces.tbl");
      state && state->store == out.header.store) {
    out.state_found = true;
    for (const SavedNamespace& space : state->namespaces) out.spaces[space.info.id].saved = space;
  }
  const Fd fd(::open(table.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) throw StoreError(table.string() + ": " + std::generic_category().message(errno));
  constexpr std::array<std::byte, kSlotRecordBytes> kZeros{};
  std::vector<std::byte> buffer(4 * 1024 * 1024);
  off_t at = kSlotTableHeaderBytes;
  while (true) {
    // Most of a table was never written.
    const off_t data = ::lseek(fd.get(), at, SEEK_DATA);
    if (data < 0) break;
    at = std::max(at, data / off_t{kSlotRecordBytes} * off_t{kSlotRecordBytes});
    const ssize_t got = ::pread(fd.get(), buffer.data(), buffer.size(), at);
    if (got < 0) throw StoreError(table.string() + ": " + std::generic_category().message(errno));
    const auto records = static_cast<std::size_t>(got) / kSlotRecordBytes;
    if (records == 0) break;
    for (std::size_t i = 0; i < records; ++i) {
      const std::span<const std::byte, kSlotRecordBytes> bytes(buffer.data() + i * kSlotRecordBytes,
                                                               kSlotRecordBytes);
      if (std::ranges::equal(bytes, kZeros)) continue;
      const auto slot = (static_cast<std::uint64_t>(at) - kSlotTableHeaderBytes) / kSlotRecordBytes + i;
      SlotRecord record;
      const bool sound = decode_slot_record(bytes, out.header.store, slot, record) == RecordFault::kNone &&
                         (record.state != RecordState::kLive ||
                          (record.stored_bytes != 0 && record.stored_bytes <= kMaxSlotBytes));
      if (sound) {
        count(out, record);
      } else {
        ++out.faulty;
      }
    }
    at += static_cast<off_t>(records * kSlotRecordBytes);
  }
  return out;
}

}  // namespace dfkv
