#include "slab/slab_store.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cerrno>
#include <random>
#include <utility>

#include "wire/checksum.h"

namespace dfkv {

namespace {

constexpr std::uint64_t kBytesPerGhost = 64 * 1024;
constexpr std::uint32_t kMaxSpaces = 0xFFFF;
constexpr int kSlotTries = 64;
constexpr std::size_t kTouchSlice = 256;

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::uint32_t now_s() {
  return static_cast<std::uint32_t>(
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
          .count());
}

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

// ---- numbers, tags and namespaces

SlotRef SlabStore::ref_of(SlotNumber slot) const {
  return {slot >> record_shift_, slot & ((SlotNumber{1} << record_shift_) - 1)};
}

SlotNumber SlabStore::number_of(SlotRef ref) const { return (ref.slab << record_shift_) + ref.slot; }

std::uint32_t SlabStore::owner_of(std::uint32_t space, std::uint32_t generation) {
  return (generation & 0x7FFF) << 16 | space;
}

std::uint64_t SlabStore::ghost_hash(std::uint64_t tag) {
  return mix(tag >> SlotIndex::kPartBits, 0x9E3779B97F4A7C15U);
}

// The generation is part of it: erasing a namespace makes everything in it unreachable at once.
std::uint64_t SlabStore::chunk_tag(const NamespaceId& ns, std::uint32_t generation,
                                   const BlockId& block) const {
  const std::byte* const space = ns.bytes.data();
  const std::byte* const id = block.bytes.data();
  const std::uint64_t first =
      mix(load_le<std::uint64_t>(space) ^ seed_[0], load_le<std::uint64_t>(space + 8) ^ seed_[1]);
  const std::uint64_t second =
      mix(load_le<std::uint64_t>(id) ^ first ^ generation, load_le<std::uint64_t>(id + 8) ^ seed_[1]);
  return mix(second ^ seed_[0], 0x9E3779B97F4A7C15U);
}

std::uint64_t SlabStore::tag_of(std::uint64_t chunk, Part part) const {
  constexpr std::uint64_t kPartMask = (std::uint64_t{1} << SlotIndex::kPartBits) - 1;
  const std::uint64_t tag = (chunk & ~kPartMask) | (mix(chunk ^ seed_[1], part ^ seed_[0]) & kPartMask);
  return tag == 0 ? kPartMask : tag;
}

std::optional<std::uint64_t> SlabStore::tag_of(const ObjectKey& key) const {
  const auto space = space_index_.find(key.ns);
  if (space == space_index_.end()) return std::nullopt;
  return tag_of(chunk_tag(key.ns, spaces_[space->second].generation, key.block), key.part);
}

std::uint32_t SlabStore::add_space(const NamespaceInfo& info, std::uint32_t generation) {
  const auto index = static_cast<std::uint32_t>(spaces_.size());
  Space space;
  space.info = info;
  space.generation = generation;
  spaces_.push_back(std::move(space));
  space_index_.emplace(info.id, index);
  return index;
}

void SlabStore::put_namespace(const NamespaceInfo& info) {
  const std::lock_guard lock(mutex_);
  const auto known = space_index_.find(info.id);
  if (known == space_index_.end()) {
    if (spaces_.size() >= kMaxSpaces) return;  // its objects stay in memory
    static_cast<void>(add_space(info, 0));
    ++spaces_version_;
    return;
  }
  NamespaceInfo& old = spaces_[known->second].info;
  old.last_used_s = info.last_used_s;  // saved with the next change
  if (old.label == info.label) return;
  old.label = info.label;
  ++spaces_version_;
}

std::vector<NamespaceInfo> SlabStore::namespaces() const {
  const std::lock_guard lock(mutex_);
  std::vector<NamespaceInfo> out;
  out.reserve(spaces_.size());
  for (const Space& space : spaces_) {
    out.push_back(space.info);
    out.back().objects = space.objects;
    out.back().stored_bytes = space.slot_bytes;
  }
  return out;
}

std::uint64_t SlabStore::erase(const NamespaceId& ns) {
  const std::lock_guard lock(mutex_);
  const auto known = space_index_.find(ns);
  if (known == space_index_.end()) return 0;
  Space& space = spaces_[known->second];
  const std::uint64_t objects = space.objects;
  counts_.objects -= objects;
  space.objects = space.slot_bytes = 0;
  ++space.generation;
  space.stale = space.stale || objects != 0;
  ++spaces_version_;
  return objects;
}

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

// ---- finding and pinning

bool SlabStore::holds(const ObjectKey& key) const {
  const std::lock_guard lock(mutex_);
  const auto tag = tag_of(key);
  return tag && index_.find(*tag) != kNoSlot;
}

bool SlabStore::evicted_lately(const ChunkKey& key) const {
  const std::lock_guard lock(mutex_);
  const auto tag = tag_of({key.ns, key.block, 0});
  return tag && ghost_.contains(ghost_hash(*tag));
}

bool SlabStore::current(SlotNumber slot, const ObjectKey& key) const {
  const std::lock_guard lock(mutex_);
  const auto tag = tag_of(key);
  return tag && index_.find(*tag) == slot;
}

std::optional<SlotNumber> SlabStore::pin(const ObjectKey& key) {
  const std::lock_guard lock(mutex_);
  const auto tag = tag_of(key);
  const SlotNumber slot = tag ? index_.find(*tag) : kNoSlot;
  if (slot == kNoSlot) return std::nullopt;
  ++pins_[slot].reads;
  ++counts_.pins;
  allocator_.set_busy(ref_of(slot), true);
  return slot;
}

void SlabStore::unpin(SlotNumber slot) {
  const std::lock_guard lock(mutex_);
  --counts_.pins;
  --pins_.at(slot).reads;
  drop_pins(slot);
}

std::optional<SlotNumber> SlabStore::pin_for_lease(const ObjectKey& key) {
  const std::lock_guard lock(mutex_);
  const auto tag = tag_of(key);
  const SlotNumber slot = tag ? index_.find(*tag) : kNoSlot;
  if (slot == kNoSlot) return std::nullopt;
  const std::uint64_t bytes = allocator_.slot_bytes(ref_of(slot));
  Pins& pins = pins_[slot];
  if (pins.leases == 0) {
    const auto most = static_cast<std::uint64_t>(static_cast<double>(counts_.capacity_bytes) *
                                                 options_.max_leased_fraction);
    if (counts_.leased_bytes + bytes > most) {
      if (pins.reads == 0) pins_.erase(slot);
      return std::nullopt;
    }
    counts_.leased_bytes += bytes;
  }
  ++pins.leases;
  allocator_.set_busy(ref_of(slot), true);
  return slot;
}

void SlabStore::unpin_for_lease(SlotNumber slot) {
  const std::lock_guard lock(mutex_);
  Pins& pins = pins_.at(slot);
  if (--pins.leases == 0) counts_.leased_bytes -= allocator_.slot_bytes(ref_of(slot));
  drop_pins(slot);
}

void SlabStore::drop_pins(SlotNumber slot) {
  const Pins pins = pins_.at(slot);
  if (pins.reads != 0 || pins.leases != 0) return;
  pins_.erase(slot);
  if (!pins.condemned) {
    allocator_.set_busy(ref_of(slot), false);
  } else if (pins.freed) {
    release(slot);
  }
}

void SlabStore::touch(const NamespaceId& ns, std::span<const BlockId> batch) {
  for (std::size_t end = batch.size(); end > 0;) {
    const std::size_t begin = end - std::min(end, kTouchSlice);
    const std::lock_guard lock(mutex_);
    const auto space = space_index_.find(ns);
    if (space == space_index_.end()) return;
    while (end > begin) {
      const std::uint64_t tag = chunk_tag(ns, spaces_[space->second].generation, batch[--end]);
      ++clock_;
      index_.for_chunk(tag, [this](SlotNumber slot) {
        index_.node(slot).stamp = static_cast<std::uint32_t>(clock_);
        allocator_.heat(ref_of(slot), clock_);
      });
    }
  }
}

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

// ---- removing

SlabStore::Removal SlabStore::begin_remove(const ObjectKey& key) {
  Removal removal;
  const std::lock_guard lock(mutex_);
  const auto tag = tag_of(key);
  if (!tag) return removal;
  if (key.part == kAllParts) {
    index_.for_chunk(*tag, [&removal](SlotNumber slot) { removal.slots.push_back(slot); });
  } else if (const SlotNumber slot = index_.find(*tag); slot != kNoSlot) {
    removal.slots.push_back(slot);
  }
  for (const SlotNumber slot : removal.slots) {
    unlink(slot);
    condemn(slot);
  }
  for (const auto& pending : pending_) {
    if (key.part == kAllParts ? !SlotIndex::same_chunk(pending->tag, *tag) : pending->tag != *tag) continue;
    pending->cancelled = true;
    removal.writes.push_back(pending);
  }
  return removal;
}

int SlabStore::finish(const Removal& removal) {
  Lock lock(mutex_);
  const int error = free_records(lock, removal.slots);
  const std::uint64_t begun = frees_begun_;
  changed_.wait(lock, [this, &removal, begun] {
    return (frees_.empty() || frees_.front() > begun) &&
           std::ranges::all_of(removal.writes, [](const auto& pending) { return pending->done; });
  });
  if (error != 0) return error;
  // Any of these may be what was removed: its record would be believed after a crash.
  return stuck_.empty() ? 0 : EIO;
}

bool SlabStore::sweep() {
  constexpr std::size_t kSlotsPerSweep = 512;
  std::vector<SlotNumber> gone;
  Lock lock(mutex_);
  if (!stuck_.empty() && may_write()) {
    std::vector<SlotNumber> again;
    again.swap(stuck_);
    static_cast<void>(free_records(lock, again));
  }
  const auto space = std::ranges::find_if(spaces_, &Space::stale);
  if (space == spaces_.end() || !may_write()) return false;
  const auto index = static_cast<std::uint32_t>(space - spaces_.begin());
  const std::uint32_t owner = owner_of(index, space->generation);
  bool left = false;
  for (std::size_t size_class = 0; size_class < kSizeClasses && !left; ++size_class) {
    for (const std::uint32_t slab : class_slabs_[size_class]) {
      for (std::uint32_t i = 0; i < allocator_.slots_per_slab(size_class); ++i) {
        const SlotRef ref{slab, i};
        const std::uint32_t found = allocator_.owner_of(ref);
        if (found == SlabAllocator::kNoOwner || (found & 0xFFFF) != index || found == owner ||
            index_.node(number_of(ref)).tag == 0) {
          continue;
        }
        left = left || gone.size() >= kSlotsPerSweep;
        if (left) break;
        gone.push_back(number_of(ref));
      }
      if (left) break;
    }
  }
  for (const SlotNumber slot : gone) {
    unlink(slot);
    condemn(slot);
  }
  if (!left) spaces_[index].stale = false;
  static_cast<void>(free_records(lock, gone));
  return left || std::ranges::any_of(spaces_, &Space::stale);
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
  std::vector<SlotRecord> records;
  records.reserve(slots.size());
  for (const SlotNumber slot : slots) records.push_back(free_record(slot));
  const std::uint64_t number = ++frees_begun_;
  frees_.push_back(number);
  lock.unlock();
  std::vector<int> errors(slots.size());
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

// ---- writing

std::shared_ptr<SlabStore::Pending> SlabStore::begin_write(const ObjectKey& key) {
  auto pending = std::make_shared<Pending>();
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
  std::vector<SlotNumber> victims;
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
  std::vector<std::byte> bytes(std::size_t{slots} * kSlotRecordBytes);
  std::vector<SlotRecord> frees;
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

// ---- reading

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

std::vector<std::string> SlabStore::violations(bool at_rest) const {
  const std::lock_guard lock(mutex_);
  auto found = allocator_.violations();
  const auto expect = [&found](bool holds, const std::string& what) {
    if (!holds) found.push_back(what);
  };
  std::uint64_t live_bytes = 0;
  std::uint64_t quarantined = 0;
  std::size_t linked = 0;
  std::size_t taken = 0;
  std::vector<std::uint64_t> objects(spaces_.size());
  for (std::size_t size_class = 0; size_class < kSizeClasses; ++size_class) {
    expect(class_slabs_[size_class].size() == allocator_.slabs_of(size_class),
           "slabs of class " + std::to_string(size_class) + " are miscounted");
    for (const std::uint32_t slab : class_slabs_[size_class]) {
      for (std::uint32_t i = 0; i < allocator_.slots_per_slab(size_class); ++i) {
        const SlotRef ref{slab, i};
        const std::uint32_t owner = allocator_.owner_of(ref);
        const SlotNumber slot = number_of(ref);
        const bool is_linked = index_.node(slot).tag != 0;
        if (owner == SlabAllocator::kNoOwner) {
          expect(!is_linked, "slot " + std::to_string(slot) + " is free and linked");
          continue;
        }
        ++taken;
        if (owner == kQuarantinedOwner) {
          ++quarantined;
          continue;
        }
        if (!is_linked) {
          expect(allocator_.busy(ref), "slot " + std::to_string(slot) + " is neither live nor in use");
          continue;
        }
        ++linked;
        live_bytes += allocator_.slot_bytes(ref);
        if (owner == owner_of(owner & 0xFFFF, spaces_[owner & 0xFFFF].generation)) ++objects[owner & 0xFFFF];
        expect(index_.find(index_.node(slot).tag) == slot, "slot " + std::to_string(slot) + " is not found");
      }
    }
  }
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < spaces_.size(); ++i) {
    expect(objects[i] == spaces_[i].objects, "namespace " + std::to_string(i) + " is miscounted");
    sum += objects[i];
  }
  expect(sum == counts_.objects, "objects are miscounted");
  expect(linked == index_.size(), "the index does not hold every live slot once");
  expect(quarantined == counts_.quarantined, "quarantined slots are miscounted");
  if (at_rest) {
    expect(pins_.empty() && counts_.pins == 0, std::to_string(pins_.size()) + " slots are pinned at rest");
    expect(pending_.empty() && filling_ == 0, "writes are under way at rest");
    expect(stuck_.empty(), "records could not be freed");
    expect(taken == linked + quarantined + stuck_.size(), "a slot is taken and not live at rest");
    expect(live_bytes + counts_.quarantined_bytes == allocator_.used_bytes(),
           "used bytes are not those of the live slots");
  }
  return found;
}

}  // namespace dfkv
