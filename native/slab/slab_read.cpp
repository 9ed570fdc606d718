// Reading an object, and putting a slot that holds something else out of use.
#include <algorithm>
#include <cerrno>

#include "slab/slab_store.h"
#include "wire/checksum.h"

namespace dfkv {

Status SlabStore::read_record(SlotNumber slot, const ObjectKey& key, SlotRecord& out) {
  std::array<std::byte, kSlotRecordBytes> bytes{};
  const int error = table_->read(record_at(slot), bytes);
  Lock lock(mutex_);
  if (error != 0) {
    ++counts_.read_errors;
    return Status::kAgainDisk;
  }
  const bool sound = decode_slot_record(bytes, directory_.header().store, slot, out) == RecordFault::kNone;
  if (sound && out.state == RecordState::kLive && out.key == key &&
      size_class_of(out.stored_bytes) == allocator_.class_of(ref_of(slot))) {
    return Status::kOk;
  }
  // Removed since it was pinned: its record is free, and that is no fault.
  if (pins_.at(slot).condemned) return Status::kMissNotFound;
  quarantine_slot(lock, slot, out);
  return Status::kMissCorrupt;
}

Status SlabStore::read_payload(SlotNumber slot, const SlotRecord& record, MutableBytes into) {
  std::uint64_t offset = 0;
  {
    const std::lock_guard lock(mutex_);
    offset = payload_at(slot);
  }
  const int error = payload_->read(offset, into);
  const bool same = error == 0 && xxh3_64(into.first(record.stored_bytes)) == record.checksum;
  Lock lock(mutex_);
  if (error != 0) {
    ++counts_.read_errors;
    return Status::kAgainDisk;
  }
  if (!same) {
    quarantine_slot(lock, slot, record);
    return Status::kMissCorrupt;
  }
  ++counts_.reads;
  counts_.read_bytes += record.stored_bytes;
  return Status::kOk;
}

void SlabStore::quarantine(const ObjectKey& key) {
  const auto slot = pin(key);
  if (!slot) return;
  SlotRecord record;
  if (read_record(*slot, key, record) == Status::kOk) {
    Lock lock(mutex_);
    quarantine_slot(lock, *slot, record);
  }
  unpin(*slot);
}

// Precondition: the slot is pinned. It stays taken until the next start: what is wrong with it may be the
// medium.
void SlabStore::quarantine_slot(Lock& lock, SlotNumber slot, const SlotRecord& record) {
  if (index_.node(slot).tag == 0) return;  // removed, or quarantined by another reader
  ++counts_.corrupt;
  unlink(slot);
  condemn(slot);
  allocator_.set_owner(ref_of(slot), kQuarantinedOwner);
  ++counts_.quarantined;
  counts_.quarantined_bytes += allocator_.slot_bytes(ref_of(slot));
  SlotRecord kept = free_record(slot);
  kept.state = RecordState::kQuarantined;
  kept.key = record.key;
  kept.checksum = record.checksum;
  lock.unlock();
  const int error = write_record(slot, kept);
  lock.lock();
  if (error == 0) recorded(kept.sequence);
  note_write(error);  // unwritten, the next start finds it live and the next read finds it corrupt
}

}  // namespace dfkv
