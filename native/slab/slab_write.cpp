// Writing an object: a slot is taken, its old record made free, then payload and record are written.
#include <algorithm>
#include <cassert>
#include <cerrno>

#include "slab/slab_store.h"
#include "wire/checksum.h"

namespace dfkv {

namespace {
constexpr int kSlotTries = 64;

std::uint32_t now_s() {
  return static_cast<std::uint32_t>(
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
          .count());
}
}  // namespace

std::shared_ptr<SlabStore::Pending> SlabStore::begin_write(const ObjectKey& key) {
  auto pending = recycled_shared<Pending>();
  pending->key = key;
  const std::lock_guard lock(mutex_);
  const auto space = space_index_.find(key.ns);
  if (space == space_index_.end()) {
    pending->cancelled = true;
  } else {
    pending->generation = spaces_[space->second].generation;
    pending->owner = owner_of(space->second, pending->generation);
    pending->tag = tag_of(chunk_tag(key.ns, pending->generation, key.block), key.part);
  }
  pending_.push_back(pending);
  return pending;
}

void SlabStore::abandon_write(const std::shared_ptr<Pending>& pending) {
  const std::lock_guard lock(mutex_);
  end_write(pending);
}

void SlabStore::end_write(const std::shared_ptr<Pending>& pending) {
  pending->done = true;
  std::erase(pending_, pending);
  changed_.notify_all();
}

bool SlabStore::void_now(const Pending& pending) const {
  return pending.cancelled || spaces_[pending.owner & 0xFFFF].generation != pending.generation;
}

Status SlabStore::write(const std::shared_ptr<Pending>& pending, const Write& what) {
  Lock lock(mutex_);
  Status status = Status::kOk;
  SlotNumber slot = kNoSlot;
  if (void_now(*pending)) {
    status = Status::kMissCancelled;
  } else if (!may_write()) {
    status = Status::kAgainDisk;
  } else {
    status = take_slot(lock, size_class_of(what.length), pending->owner, slot);
  }
  if (status == Status::kOk) {
    const std::uint64_t offset = payload_at(slot);
    lock.unlock();
    const int error = options_.keep_payload ? payload_->write(offset, what.payload) : 0;
    lock.lock();
    note_write(error);
    if (error == 0) {
      status = publish(lock, *pending, slot, what);
    } else {
      --filling_;
      release(slot);  // its record is free
      status = Status::kAgainDisk;
    }
  }
  end_write(pending);
  return status;
}

Status SlabStore::publish(Lock& lock, Pending& pending, SlotNumber slot, const Write& what) {
  --filling_;
  if (void_now(pending)) {
    release(slot);
    return Status::kMissCancelled;
  }
  const SlotNumber old = index_.find(pending.tag);
  if (old != kNoSlot) {
    unlink(old);
    condemn(old);
    if (free_records(lock, std::span(&old, 1)) != 0) {
      release(slot);
      return Status::kAgainDisk;
    }
  }
  SlotRecord record;
  record.state = RecordState::kLive;
  record.sequence = ++sequence_;
  record.key = pending.key;
  record.route = what.route;
  record.checksum = what.checksum;
  record.stored_bytes = record.raw_bytes = what.length;
  record.created_s = now_s();
  record.extent_generation = slab_generation_[ref_of(slot).slab];
  record.namespace_generation = pending.generation;
  record.recompute_us =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(what.recompute_us, ~std::uint32_t{0}));
  lock.unlock();
  const int error = write_record(slot, record);
  lock.lock();
  note_write(error);
  if (error != 0) {
    stuck_.push_back(slot);  // it may have been written all the same
    return Status::kAgainDisk;
  }
  recorded(record.sequence);
  if (void_now(pending) || index_.find(pending.tag) != kNoSlot) {
    // Removed while the record was written, or written twice.
    static_cast<void>(free_records(lock, std::span(&slot, 1)));
    return Status::kMissCancelled;
  }
  link(slot, pending.tag, pending.owner);
  index_.node(slot).stamp = static_cast<std::uint32_t>(++clock_);
  allocator_.heat(ref_of(slot), clock_);
  ghost_.erase(ghost_hash(pending.tag));
  allocator_.set_busy(ref_of(slot), false);
  ++counts_.writes;
  counts_.written_bytes += what.length;
  return Status::kOk;
}

Status SlabStore::take_slot(Lock& lock, std::size_t size_class, std::uint32_t owner, SlotNumber& out) {
  SlotList victims;
  for (int i = 0; i < kSlotTries; ++i) {
    if (const auto ref = allocator_.allocate(size_class, owner)) {
      out = number_of(*ref);
      allocator_.set_busy(*ref, true);
      if (!index_.bound(ref->slab)) bind_slab(lock, ref->slab, size_class);
      changed_.wait(lock, [this, &ref] { return slab_ready_[ref->slab] != kUnready; });
      if (slab_ready_[ref->slab] == kReady) {
        ++filling_;
        return Status::kOk;
      }
      release(out);
      return Status::kAgainDisk;
    }
    victims.clear();
    if (!choose_victims(size_class, victims)) return Status::kAgainNoMemory;
    if (free_records(lock, victims) != 0) return Status::kAgainDisk;
  }
  return Status::kAgainNoMemory;
}

// Every record of the slab is made free with the new generation. Records of earlier bindings may be left
// behind them and in the other extents of the slab: they are of another generation, and recovery frees what
// looks live among them.
void SlabStore::bind_slab(Lock& lock, std::uint32_t slab, std::size_t size_class) {
  const std::uint32_t slots = allocator_.slots_per_slab(size_class);
  index_.bind(slab, slots);
  class_slabs_[size_class].push_back(slab);
  slab_ready_[slab] = kUnready;
  slab_generation_[slab] = ++binding_;
  const SlotNumber first = number_of({slab, 0});
  RecycledVector<std::byte> bytes(std::size_t{slots} * kSlotRecordBytes);
  RecycledVector<SlotRecord> frees;
  frees.reserve(slots);
  for (std::uint32_t i = 0; i < slots; ++i) frees.push_back(free_record(first + i));
  lock.unlock();
  for (std::uint32_t i = 0; i < slots; ++i) {
    const auto at = bytes.begin() + static_cast<std::ptrdiff_t>(i * kSlotRecordBytes);
    encode_slot_record(frees[i], directory_.header().store, first + i,
                       std::span<std::byte, kSlotRecordBytes>(at, kSlotRecordBytes));
  }
  const int error = table_->write(record_at(first), bytes);
  lock.lock();
  note_write(error);
  if (error == 0) recorded(frees.back().sequence);
  slab_ready_[slab] = error == 0 ? kReady : kBroken;
  changed_.notify_all();
}

}  // namespace dfkv
