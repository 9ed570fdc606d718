#include "slab/slab_store.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <random>
#include <utility>

namespace dfkv {

namespace {

constexpr std::uint64_t kBytesPerGhost = 64 * 1024;

std::unique_ptr<Device> wrapped(const SlabStoreOptions& options, std::unique_ptr<Device> device,
                                DeviceRole role) {
  return options.wrap ? options.wrap(std::move(device), role) : std::move(device);
}

}  // namespace

SlabStore::SlabStore(SlabStoreOptions options)
    : options_(std::move(options)),
      directory_(options_.path, options_.capacity_bytes, options_.node_id),
      geometry_(directory_.geometry()),
      record_shift_(static_cast<unsigned>(std::countr_zero(geometry_.extent_bytes / kSlotAlignment))),
      table_(wrapped(options_, directory_.open_table(), DeviceRole::kTable)),
      payload_(wrapped(options_, directory_.open_payload(options_.keep_payload), DeviceRole::kPayload)),
      allocator_(geometry_),
      index_(geometry_.extent_count, record_shift_),
      slab_generation_(geometry_.extent_count),
      slab_ready_(geometry_.extent_count),
      ghost_(std::clamp<std::uint64_t>(options_.capacity_bytes / kBytesPerGhost, 4096, 4 << 20)) {
  std::random_device random;
  for (std::uint64_t& seed : seed_) seed = (std::uint64_t{random()} << 32 | random()) | 1;
  random_state_ = seed_[0];
  counts_.capacity_bytes = geometry_.capacity_bytes();
  recover();
}

SlabStore::~SlabStore() { close(); }

void SlabStore::close() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
  }
  // The saved sequence is promised only when the table that has it is on the disk.
  if (sync(true) != 0) return;
  {
    const std::lock_guard lock(mutex_);
    ++spaces_version_;
  }
  static_cast<void>(save_namespaces());
}

// ---- numbers

SlotRef SlabStore::ref_of(SlotNumber slot) const {
  return {slot >> record_shift_, slot & ((SlotNumber{1} << record_shift_) - 1)};
}

SlotNumber SlabStore::number_of(SlotRef ref) const { return (ref.slab << record_shift_) + ref.slot; }

bool SlabStore::fits(std::uint64_t length) const {
  return length <= kMaxSlotBytes && allocator_.fits(size_class_of(length));
}

bool SlabStore::writable() const {
  const std::lock_guard lock(mutex_);
  return may_write();
}

bool SlabStore::may_write() const {
  return state_ == DiskState::kOk || std::chrono::steady_clock::now() >= retry_at_;
}

SlabStats SlabStore::stats() const {
  const std::lock_guard lock(mutex_);
  SlabStats stats = counts_;
  stats.state = state_;
  stats.used_bytes = allocator_.used_bytes() - counts_.quarantined_bytes;
  for (std::size_t i = 0; i < kSizeClasses; ++i) {
    stats.bound_bytes += class_slabs_[i].size() * allocator_.slots_per_slab(i) * slot_bytes_of(i);
  }
  return stats;
}

// ---- what lasts

int SlabStore::save_namespaces() {
  const std::lock_guard saving(save_mutex_);
  SavedState state;
  std::uint64_t version = 0;
  {
    const std::lock_guard lock(mutex_);
    if (spaces_saved_ == spaces_version_) return 0;
    version = spaces_version_;
    state.store = directory_.header().store;
    state.sequence = synced_sequence_;
    state.namespaces.reserve(spaces_.size());
    for (const Space& space : spaces_) state.namespaces.push_back({space.info, space.generation});
  }
  const int error = directory_.save_state(state);
  const std::lock_guard lock(mutex_);
  note_write(error);
  if (error == 0) spaces_saved_ = version;
  return error;
}

int SlabStore::sync(bool payload) {
  std::uint64_t sequence = 0;
  std::uint64_t changes = 0;
  bool unsynced = false;
  {
    const std::lock_guard lock(mutex_);
    sequence = recorded_sequence_;
    changes = changes_;
    unsynced = changes_ != changes_synced_;
  }
  int error = save_namespaces();
  if (error == 0 && !payload && !unsynced) return 0;
  if (error == 0 && payload) error = payload_->sync();
  if (error == 0) error = table_->sync();
  const std::lock_guard lock(mutex_);
  if (error == 0) {
    synced_sequence_ = std::max(synced_sequence_, sequence);
    changes_synced_ = std::max(changes_synced_, changes);
  } else {
    note_write(error);
  }
  return error;
}

// ---- records

int SlabStore::write_record(SlotNumber slot, const SlotRecord& record) {
  std::array<std::byte, kSlotRecordBytes> bytes{};
  encode_slot_record(record, directory_.header().store, slot, bytes);
  return table_->write(record_at(slot), bytes);
}

// A free record keeps what recovery has to know of the slab: its size class and generation.
SlotRecord SlabStore::free_record(SlotNumber slot) {
  SlotRecord record;
  const SlotRef ref = ref_of(slot);
  record.sequence = ++sequence_;
  record.stored_bytes = static_cast<std::uint32_t>(allocator_.slot_bytes(ref));
  record.extent_generation = slab_generation_[ref.slab];
  return record;
}

int SlabStore::free_records(Lock& lock, std::span<const SlotNumber> slots) {
  if (slots.empty()) return 0;
  RecycledVector<SlotRecord> records;
  records.reserve(slots.size());
  for (const SlotNumber slot : slots) records.push_back(free_record(slot));
  const std::uint64_t number = ++frees_begun_;
  frees_.push_back(number);
  lock.unlock();
  RecycledVector<int> errors(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) errors[i] = write_record(slots[i], records[i]);
  lock.lock();
  int first = 0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (errors[i] == 0) {
      recorded(records[i].sequence);
      settle(slots[i]);
    } else {
      // The slot stays taken: after a crash its record would be believed.
      stuck_.push_back(slots[i]);
      if (first == 0) first = errors[i];
    }
  }
  note_write(first);
  std::erase(frees_, number);
  changed_.notify_all();
  return first;
}

void SlabStore::recorded(std::uint64_t sequence) {
  recorded_sequence_ = std::max(recorded_sequence_, sequence);
  ++changes_;
}

void SlabStore::note_write(int error) {
  if (error == 0) {
    state_ = DiskState::kOk;
    return;
  }
  ++counts_.write_errors;
  state_ = error == ENOSPC || error == EDQUOT ? DiskState::kFull
           : error == EROFS                   ? DiskState::kReadOnly
                                              : DiskState::kFailing;
  retry_at_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(options_.retry_ms);
}

}  // namespace dfkv
