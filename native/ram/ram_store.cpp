#include "ram/ram_store.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "slab/recycled.h"

namespace dfkv {

namespace {
constexpr std::size_t kChunksPerSlice = 256;  // how much work one hold of the mutex does
constexpr std::size_t kWantedChunks = 65'536;
}  // namespace

class RamStore::Pin final : public ReadPin, public Recycled<Pin> {
 public:
  Pin(RamStore& store, Catalog::ObjectId id, Bytes bytes, std::uint64_t checksum)
      : store_(store), id_(id), bytes_(bytes), checksum_(checksum) {}
  ~Pin() override { store_.unpin(id_); }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

  Bytes bytes() const override { return bytes_; }
  std::uint64_t checksum() const override { return checksum_; }

 private:
  RamStore& store_;
  const Catalog::ObjectId id_;
  const Bytes bytes_;
  const std::uint64_t checksum_;
};

class RamStore::Ticket final : public WriteTicket, public Recycled<Ticket> {
 public:
  Ticket(RamStore& store, const Catalog::Fill& fill, NamespaceRegistry::Index ns, const ObjectKey& key,
         Route route, const PutOptions& options, MutableBytes bytes)
      : store_(store), fill_(fill), ns_(ns), key_(key), route_(route), options_(options), bytes_(bytes) {}
  ~Ticket() override {
    if (committed_) return;
    const std::lock_guard lock(store_.mutex_);
    store_.catalog_.abandon(fill_.object);
  }
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  MutableBytes bytes() override { return bytes_; }
  void commit(std::uint64_t checksum, StatusDone done) override {
    assert(!committed_);
    committed_ = true;
    if (store_.disk_) {
      store_.commit_behind(fill_, ns_, key_, route_, options_, checksum, std::move(done));
      return;
    }
    Status status = Status::kOk;
    {
      const std::lock_guard lock(store_.mutex_);
      status = store_.catalog_.publish(fill_.object, ns_, fill_.generation, key_, route_, checksum,
                                       options_.recompute_us, options_.replace);
      if (status == Status::kAlready) ++store_.put_already_;
    }
    done(status);
  }

 private:
  RamStore& store_;
  const Catalog::Fill fill_;
  const NamespaceRegistry::Index ns_;
  const ObjectKey key_;
  const Route route_;
  const PutOptions options_;
  const MutableBytes bytes_;
  bool committed_ = false;
};

RamStore::RamStore(RamStoreOptions options)
    : max_lease_ms_(options.max_lease_ms),
      max_leases_(options.max_leases),
      max_objects_per_lease_(options.max_objects_per_lease),
      now_(std::move(options.now)),
      namespaces_(options.namespaces, std::move(options.tenant)),
      catalog_(std::move(options.catalog)),
      arena_(catalog_.capacity_bytes(), options.ahead_bytes),
      max_dirty_bytes_(static_cast<std::uint64_t>(static_cast<double>(catalog_.capacity_bytes()) *
                                                  options.max_dirty_fraction)),
      wanted_(options.disk ? kWantedChunks : 1) {
  if (options.disk) open_disk(std::move(*options.disk));
}

RamStore::~RamStore() {
  close(std::chrono::steady_clock::now());
  assert(catalog_.counts().pins == 0 && catalog_.counts().filling == 0);
}

Status RamStore::put_namespace(const NamespaceId& id, Bytes descriptor, std::string_view label,
                               std::vector<std::uint16_t>& nearest_differs_in) {
  const Status status = namespaces_.put(id, descriptor, label, nearest_differs_in);
  if (status == Status::kOk && disk_) disk_->put_namespace(namespaces_.info(id));
  return status;
}

PutStart RamStore::begin_put(const ObjectKey& key, Route route, std::uint32_t length,
                             const PutOptions& options) {
  const auto ns = namespaces_.find(key.ns);
  Catalog::Fill fill;
  std::uint64_t offset = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!ns) {
      fill.status = Status::kMissNamespaceUnknown;
    } else if (key.part == kAllParts || length == 0) {
      fill.status = Status::kRefusedBadRequest;
    } else if (options.ack == Ack::kDisk && !disk_) {
      fill.status = Status::kRefusedUnsupported;  // memory cannot promise to survive a crash
    } else if (!options.replace &&
               (catalog_.find(*ns, key) != Catalog::kNone || (disk_ && disk_->holds(key)))) {
      fill.status = Status::kAlready;
    } else if (disk_ && dirty_bytes_ != 0 && length <= kMaxSlotBytes &&
               dirty_bytes_ + catalog_.counts().filling_bytes + slot_bytes_of(size_class_of(length)) >
                   max_dirty_bytes_) {
      fill.status = Status::kAgainNoMemory;  // the disks are behind
    } else {
      fill = catalog_.begin_fill(*ns, length);
    }
    if (fill.status == Status::kOk) {
      offset = catalog_.offset_of(fill.object);
    } else if (fill.status != Status::kAgainNoMemory || !options.asks_again) {
      ++(fill.status == Status::kAlready ? put_already_ : put_refused_);
    }
  }
  if (fill.status != Status::kOk) return {fill.status, nullptr};
  return {Status::kOk,
          std::make_unique<Ticket>(*this, fill, *ns, key, route, options, arena_.slice(offset, length))};
}

void RamStore::acquire(const ObjectKey& key, ReadDone done) {
  const auto ns = namespaces_.find(key.ns);
  if (!ns) {
    done({Status::kMissNamespaceUnknown, nullptr});
    return;
  }
  std::unique_lock lock(mutex_);
  const Catalog::ObjectId id = catalog_.find(*ns, key);
  if (id == Catalog::kNone) {
    if (disk_ && acquire_cold(lock, *ns, key, done)) return;
    const Status reason = miss_reason({key.ns, key.block});
    lock.unlock();
    done({reason, nullptr});
    return;
  }
  catalog_.pin(id);
  const std::uint64_t offset = catalog_.offset_of(id);
  const std::uint32_t length = catalog_.object(id).length;
  const std::uint64_t checksum = catalog_.object(id).checksum;
  lock.unlock();
  done({Status::kOk, std::make_unique<Pin>(*this, id, arena_.slice(offset, length), checksum)});
}

void RamStore::unpin(Catalog::ObjectId id) {
  const std::lock_guard lock(mutex_);
  catalog_.unpin(id);
}

std::uint32_t RamStore::padded(std::uint32_t length) const {
  return static_cast<std::uint32_t>((length + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment);
}

void RamStore::touch(const NamespaceId& ns, std::span<const BlockId> batch) {
  used(ns, batch, &Catalog::touch);
  // What is used in memory is used: its copy on disk must not look forgotten.
  if (disk_) disk_->touch(ns, batch);
}

void RamStore::stored(const NamespaceId& ns, std::span<const BlockId> batch) {
  used(ns, batch, &Catalog::stored);
  if (disk_) disk_->touch(ns, batch);
}

void RamStore::used(const NamespaceId& ns_id, std::span<const BlockId> batch, Use use) {
  const auto ns = namespaces_.find(ns_id);
  if (!ns) return;
  for (std::size_t end = batch.size(); end > 0;) {
    const std::size_t begin = end - std::min(end, kChunksPerSlice);
    const std::lock_guard lock(mutex_);
    used_.clear();
    for (std::size_t i = begin; i < end; ++i) {
      const auto chunk = catalog_.find_chunk(*ns, {ns_id, batch[i]});
      if (chunk != Catalog::kNone) used_.push_back(chunk);
    }
    (catalog_.*use)(used_);
    end = begin;
  }
}

void RamStore::remove(std::span<const ObjectKey> keys, RemoveDone done) {
  std::vector<Status> statuses;
  statuses.reserve(keys.size());
  DiskTier::Removals removals;
  for (const ObjectKey& key : keys) {
    const auto ns = namespaces_.find(key.ns);
    if (!ns) {
      statuses.push_back(Status::kMissNamespaceUnknown);
      continue;
    }
    const std::lock_guard lock(mutex_);
    bool found = catalog_.remove(*ns, key);
    if (disk_) found = disk_->begin_remove(key, removals) || found;
    statuses.push_back(found ? Status::kOk : miss_reason({key.ns, key.block}));
  }
  if (!disk_) {
    done(std::move(statuses));
    return;
  }
  disk_->settle(std::move(removals), false,
                [statuses = std::move(statuses), done = std::move(done)](int error) mutable {
                  if (error != 0) std::ranges::fill(statuses, Status::kAgainDisk);
                  done(std::move(statuses));
                });
}

void RamStore::erase(const NamespaceId& ns_id, EraseDone done) {
  const auto ns = namespaces_.find(ns_id);
  if (!ns) {
    done(Status::kOk, 0);
    return;
  }
  std::uint64_t objects = 0;
  {
    const std::lock_guard lock(mutex_);
    objects = catalog_.begin_erase(*ns);
    if (disk_) objects = std::max(objects, disk_->erase(ns_id));  // most are on both
  }
  bool left = true;
  while (left) {
    const std::lock_guard lock(mutex_);
    left = catalog_.continue_erase(*ns, kChunksPerSlice);
  }
  if (!disk_) {
    done(Status::kOk, objects);
    return;
  }
  disk_->settle({}, false, [objects, done = std::move(done)](int error) {
    done(error == 0 ? Status::kOk : Status::kAgainDisk, objects);
  });
}

void RamStore::quarantine(const ObjectKey& key) {
  const auto ns = namespaces_.find(key.ns);
  if (!ns) return;
  {
    const std::lock_guard lock(mutex_);
    catalog_.quarantine(*ns, key);
  }
  if (disk_) disk_->quarantine(key);
}

std::vector<NamespaceInfo> RamStore::list() const {
  auto infos = namespaces_.list();
  {
    const std::lock_guard lock(mutex_);
    for (std::uint32_t i = 0; i < infos.size(); ++i) {
      const auto usage = catalog_.usage_of(i);
      infos[i].objects = usage.objects;
      infos[i].stored_bytes = usage.stored_bytes;
    }
  }
  if (disk_) add_disk_usage(infos);
  return infos;
}

StoreStats RamStore::stats() const {
  StoreStats stats;
  stats.namespaces = namespaces_.size();
  const std::lock_guard lock(mutex_);
  const Catalog::Counts& counts = catalog_.counts();
  stats.capacity_bytes = catalog_.capacity_bytes();
  stats.used_bytes = catalog_.used_bytes();
  stats.stored_bytes = counts.stored_bytes;
  stats.objects = counts.objects;
  stats.chunks = catalog_.chunks();
  stats.pins = counts.pins;
  stats.leases = leases_.size();
  stats.leased_bytes = counts.leased_bytes;
  stats.filling = counts.filling;
  stats.condemned = counts.condemned;
  stats.evicted_objects = counts.evicted_objects;
  stats.evicted_bytes = counts.evicted_bytes;
  stats.put_already = put_already_;
  stats.put_refused = put_refused_;
  if (disk_) {
    stats.pins -= dirty_objects_;  // they have a count of their own
    stats.disk.emplace();
    disk_->add_stats(*stats.disk);
    stats.disk->dirty_objects = dirty_objects_;
    stats.disk->dirty_bytes = dirty_bytes_;
    stats.disk->lost_writes = lost_writes_;
    stats.disk->joined_reads = joined_reads_;
    stats.disk->promoted = promoted_;
  }
  return stats;
}

std::vector<std::string> RamStore::violations(bool at_rest) const {
  std::vector<std::string> found;
  for (std::size_t i = 0; disk_ && i < disk_->directories(); ++i) {
    const auto one = disk_->directory(i).violations(at_rest);
    found.insert(found.end(), one.begin(), one.end());
  }
  const std::lock_guard lock(mutex_);
  const auto in_memory = catalog_.violations();
  found.insert(found.end(), in_memory.begin(), in_memory.end());
  const Catalog::Counts& counts = catalog_.counts();
  if (at_rest &&
      (counts.pins != 0 || counts.lease_pins != 0 || counts.filling != 0 || counts.condemned != 0)) {
    found.push_back("not at rest: " + std::to_string(counts.pins) + " pins, " +
                    std::to_string(counts.lease_pins) + " lease pins, " + std::to_string(counts.filling) +
                    " fillings, " + std::to_string(counts.condemned) + " condemned");
  }
  return found;
}

}  // namespace dfkv
