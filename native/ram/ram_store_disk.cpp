// The RAM store with directories on disk behind it: writing behind, reading what is only on a disk, and
// making things last.
#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "ram/ram_store.h"

namespace dfkv {

namespace {

constexpr int kSlotTries = 200;  // for a slot to read into, while all of them are being filled
constexpr std::chrono::milliseconds kSlotWait(5);

// Calls `done` with the worst of several outcomes when all of them have come.
class Outcomes {
 public:
  Outcomes(int count, StatusDone done) : left_(count), done_(std::move(done)) {}
  void add(Status status) {
    if (status != Status::kOk) worst_ = status;
    if (--left_ == 0) done_(worst_);
  }

 private:
  std::atomic<int> left_;
  std::atomic<Status> worst_{Status::kOk};
  const StatusDone done_;
};

}  // namespace

struct RamStore::WriteBehind {
  std::uint64_t number = 0;
  Catalog::ObjectId id = Catalog::kNone;
  NamespaceRegistry::Index ns = 0;
  std::uint32_t generation = 0;  // of the namespace when it was published
  ObjectKey key;
  SlabStore::Write what;
  std::uint32_t directory = 0;
  bool durable = false;
  std::shared_ptr<Outcomes> waiting;  // null: nobody waits
};

// ---- an object read from a disk

struct RamStore::ColdRead {
  ObjectKey key;
  RecycledVector<ReadDone> waiters;  // while it is being read
  bool loading = true;
  bool again = false;          // wanted more than once
  std::weak_ptr<Cold> loaded;  // afterwards, as long as somebody uses it
};

// The slot that the readers of one object share. Ends with the last of them; its place on the disk is pinned
// until then, so that whoever finds that place meanwhile is given these bytes.
class RamStore::Cold {
 public:
  Cold(RamStore& store, std::shared_ptr<ColdRead> read, DiskTier::Ref ref, const Catalog::Fill& fill,
       NamespaceRegistry::Index ns, const SlotRecord& record, Bytes bytes)
      : store_(store), read(std::move(read)), ref(ref), fill(fill), ns(ns), record(record), bytes(bytes) {}
  ~Cold() { store_.end_cold(*this); }
  Cold(const Cold&) = delete;
  Cold& operator=(const Cold&) = delete;

 private:
  RamStore& store_;

 public:
  const std::shared_ptr<ColdRead> read;
  const DiskTier::Ref ref;
  const Catalog::Fill fill;
  const NamespaceRegistry::Index ns;
  const SlotRecord record;
  const Bytes bytes;
};

class RamStore::ColdPin final : public ReadPin, public Recycled<ColdPin> {
 public:
  explicit ColdPin(std::shared_ptr<Cold> cold) : cold_(std::move(cold)) {}
  [[nodiscard]] Bytes bytes() const override { return cold_->bytes; }
  [[nodiscard]] std::uint64_t checksum() const override { return cold_->record.checksum; }

 private:
  const std::shared_ptr<Cold> cold_;
};

void RamStore::open_disk(DiskTierOptions options) {
  if (options.directories.empty()) throw std::invalid_argument("a disk tier has at least one directory");
  disk_ = std::make_unique<DiskTier>(std::move(options));
  for (std::size_t i = 0; i < disk_->directories(); ++i) {
    for (const NamespaceInfo& info : disk_->directory(i).namespaces()) {
      // One that is refused, because it is another tenant's now, is unknown: its objects are not found.
      std::vector<std::uint16_t> ignored;
      static_cast<void>(namespaces_.put(info.id, info.descriptor, info.label, ignored));
    }
  }
}

bool RamStore::acquire_cold(std::unique_lock<std::mutex>& lock, NamespaceRegistry::Index ns,
                            const ObjectKey& key, ReadDone& done) {
  const auto ref = disk_->pin(key);
  if (!ref) return false;
  auto& known = cold_[ref->packed()];
  if (known) {
    std::shared_ptr<Cold> loaded = known->loaded.lock();
    if (known->loading || loaded) {
      known->again = true;
      ++joined_reads_;
      if (!loaded) {
        known->waiters.push_back(std::move(done));
        lock.unlock();
        disk_->unpin(*ref);
        return true;
      }
      lock.unlock();
      disk_->unpin(*ref);
      done({Status::kOk, std::make_unique<ColdPin>(std::move(loaded))});
      return true;
    }
  }
  known = recycled_shared<ColdRead>();
  known->key = key;
  known->waiters.push_back(std::move(done));
  disk_->read(ref->directory, [this, ns, ref = *ref, read = known] { read_cold(ns, ref, read); });
  lock.unlock();
  return true;
}

void RamStore::read_cold(NamespaceRegistry::Index ns, DiskTier::Ref ref,
                         const std::shared_ptr<ColdRead>& read) {
  SlabStore& directory = disk_->directory(ref.directory);
  SlotRecord record;
  Status status = directory.read_record(ref.slot, read->key, record);
  Catalog::Fill fill;
  std::shared_ptr<Cold> cold;
  if (status == Status::kOk) {
    std::uint64_t offset = 0;
    for (int i = 0; i < kSlotTries; ++i) {
      {
        const std::lock_guard lock(mutex_);
        fill = catalog_.begin_fill(ns, record.stored_bytes);
        if (fill.status == Status::kOk) offset = catalog_.offset_of(fill.object);
        if (fill.status != Status::kAgainNoMemory || closing_) break;
      }
      std::this_thread::sleep_for(kSlotWait);
    }
    status = fill.status;
    if (status == Status::kOk) {
      const MutableBytes into = arena_.slice(offset, padded(record.stored_bytes));
      status = directory.read_payload(ref.slot, record, into);
      if (status == Status::kOk) {
        cold = recycled_shared<Cold>(*this, read, ref, fill, ns, record, into.first(record.stored_bytes));
      }
    }
  }
  RecycledVector<ReadDone> waiters;
  {
    const std::lock_guard lock(mutex_);
    read->loading = false;
    waiters.swap(read->waiters);
    if (cold) {
      read->loaded = cold;
      const std::uint64_t hash = load_le<std::uint64_t>(read->key.block.bytes.data()) ^
                                 load_le<std::uint64_t>(read->key.ns.bytes.data()) ^ read->key.part;
      const std::uint64_t mixed = hash * 0x9E3779B97F4A7C15U;
      read->again = read->again || wanted_.contains(mixed);
      wanted_.insert(mixed);
    } else {
      if (fill.object != Catalog::kNone) catalog_.abandon(fill.object);
      const auto known = cold_.find(ref.packed());
      if (known != cold_.end() && known->second == read) cold_.erase(known);
    }
  }
  if (!cold) disk_->unpin(ref);
  RecycledVector<ReadResult> results(waiters.size());
  for (ReadResult& result : results) {
    result = {status, cold ? std::make_unique<ColdPin>(cold) : nullptr};
  }
  cold.reset();  // the readers alone decide how long it lives
  for (std::size_t i = 0; i < waiters.size(); ++i) waiters[i](std::move(results[i]));
}

// The last reader has gone: what was wanted twice stays in memory, if it is still what the disk has.
void RamStore::end_cold(Cold& cold) {
  {
    const std::lock_guard lock(mutex_);
    const ObjectKey& key = cold.read->key;
    if (cold.read->again && !closing_ && disk_->directory(cold.ref.directory).current(cold.ref.slot, key)) {
      const Status status =
          catalog_.publish(cold.fill.object, cold.ns, cold.fill.generation, key, cold.record.route,
                           cold.record.checksum, cold.record.recompute_us, false);
      if (status == Status::kOk) ++promoted_;
    } else {
      catalog_.abandon(cold.fill.object);
    }
    const auto known = cold_.find(cold.ref.packed());
    if (known != cold_.end() && known->second == cold.read) cold_.erase(known);
  }
  disk_->unpin(cold.ref);
}

// ---- writing behind

void RamStore::commit_behind(const Catalog::Fill& fill, NamespaceRegistry::Index ns, const ObjectKey& key,
                             Route route, const PutOptions& options, std::uint64_t checksum,
                             StatusDone done) {
  WriteBehind job;
  DiskTier::Removals old;
  Status status = Status::kOk;
  bool waits = options.ack == Ack::kDisk;
  {
    const std::lock_guard lock(mutex_);
    const std::uint32_t length = catalog_.object(fill.object).length;
    const MutableBytes pages = arena_.slice(catalog_.offset_of(fill.object), padded(length));
    std::ranges::fill(pages.subspan(length), std::byte{0});
    if (!options.replace && disk_->holds(key)) {
      catalog_.abandon(fill.object);
      status = Status::kAlready;
    } else {
      status = catalog_.publish(fill.object, ns, fill.generation, key, route, checksum, options.recompute_us,
                                options.replace);
    }
    if (status == Status::kAlready) ++put_already_;
    if (status == Status::kOk) {
      if (options.replace) disk_->begin_remove(key, old);
      const auto directory = disk_->choose({key.ns, key.block}, length);
      if (directory) {
        job = {++writes_begun_,
               fill.object,
               ns,
               fill.generation,
               key,
               {route, length, checksum, options.recompute_us, pages},
               *directory,
               options.ack == Ack::kDisk,
               nullptr};
        writes_left_.insert(job.number);
        catalog_.pin(fill.object);
        ++dirty_objects_;
        dirty_bytes_ += catalog_.slot_bytes(fill.object);
        waits = waits || dirty_bytes_ > max_dirty_bytes_ / 2;
      } else {
        ++lost_writes_;
      }
    }
  }
  if (status != Status::kOk) {
    done(status);
    return;
  }
  // Nobody waits for a disk that is not there.
  if (job.number == 0 && options.ack == Ack::kDisk) status = Status::kAgainDisk;
  const bool for_write = job.number != 0 && waits;
  const auto outcomes =
      recycled_shared<Outcomes>(1 + (for_write ? 1 : 0) + (options.replace ? 1 : 0), std::move(done));
  if (for_write) job.waiting = outcomes;
  if (job.number != 0) {
    const std::uint32_t directory = job.directory;
    disk_->write(directory, [this, job = std::move(job)] { write_behind(job); });
  }
  // What was replaced must not come back in its place.
  if (options.replace) {
    disk_->settle(std::move(old), false,
                  [outcomes](int error) { outcomes->add(error == 0 ? Status::kOk : Status::kAgainDisk); });
  }
  outcomes->add(status);
}

void RamStore::write_behind(const WriteBehind& job) {
  SlabStore& directory = disk_->directory(job.directory);
  std::shared_ptr<SlabStore::Pending> pending;
  {
    const std::lock_guard lock(mutex_);
    // Removed, replaced or erased before its turn came.
    const bool live = catalog_.object(job.id).state == SlotState::kLive &&
                      catalog_.usage_of(job.ns).generation == job.generation;
    if (live && !closing_) pending = directory.begin_write(job.key);
  }
  finish_write(job, pending ? directory.write(pending, job.what) : Status::kMissCancelled);
}

void RamStore::finish_write(const WriteBehind& job, Status status) {
  RecycledVector<StatusDone> syncs;
  {
    const std::lock_guard lock(mutex_);
    dirty_bytes_ -= catalog_.slot_bytes(job.id);
    --dirty_objects_;
    catalog_.unpin(job.id);
    if (status != Status::kOk && (status != Status::kMissCancelled || closing_)) ++lost_writes_;
    writes_left_.erase(job.number);
    syncs = syncs_ready();
    writes_done_.notify_all();
  }
  for (StatusDone& sync : syncs) settle_sync(std::move(sync));
  if (!job.waiting) return;
  if (!job.durable) {
    job.waiting->add(Status::kOk);  // it is visible, and only that was asked for
  } else if (status == Status::kOk || status == Status::kMissCancelled) {
    disk_->sync(job.directory, [waiting = job.waiting](int error) {
      waiting->add(error == 0 ? Status::kOk : Status::kAgainDisk);
    });
  } else {
    job.waiting->add(Status::kAgainDisk);
  }
}

// ---- making things last

void RamStore::sync(StatusDone done) {
  if (!disk_) {
    done(Status::kRefusedUnsupported);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (!writes_left_.empty()) {
      syncs_.emplace_back(writes_begun_, std::move(done));
      return;
    }
  }
  settle_sync(std::move(done));
}

RecycledVector<StatusDone> RamStore::syncs_ready() {
  RecycledVector<StatusDone> ready;
  const std::uint64_t left = writes_left_.empty() ? writes_begun_ + 1 : *writes_left_.begin();
  std::erase_if(syncs_, [&](auto& sync) {
    if (sync.first >= left) return false;
    ready.push_back(std::move(sync.second));
    return true;
  });
  return ready;
}

void RamStore::settle_sync(StatusDone done) {
  bool lost = false;
  {
    const std::lock_guard lock(mutex_);
    lost = lost_reported_ != lost_writes_;
    lost_reported_ = lost_writes_;
  }
  disk_->settle({}, true, [lost, done = std::move(done)](int error) {
    done(error == 0 && !lost ? Status::kOk : Status::kAgainDisk);
  });
}

void RamStore::close(std::chrono::steady_clock::time_point deadline) {
  if (!disk_) return;
  {
    std::unique_lock lock(mutex_);
    writes_done_.wait_until(lock, deadline, [this] { return writes_left_.empty(); });
    closing_ = true;
  }
  disk_->stop();
}

void RamStore::add_disk_usage(std::vector<NamespaceInfo>& infos) const {
  std::unordered_map<NamespaceId, std::pair<std::uint64_t, std::uint64_t>, Id16Hash> usage;
  for (std::size_t i = 0; i < disk_->directories(); ++i) {
    for (const NamespaceInfo& one : disk_->directory(i).namespaces()) {
      usage[one.id].first += one.objects;
      usage[one.id].second += one.stored_bytes;
    }
  }
  for (NamespaceInfo& info : infos) {
    const auto found = usage.find(info.id);
    if (found == usage.end()) continue;
    // Most of what is in memory is on a disk too.
    info.objects = std::max(info.objects, found->second.first);
    info.stored_bytes = std::max(info.stored_bytes, found->second.second);
  }
}

}  // namespace dfkv
