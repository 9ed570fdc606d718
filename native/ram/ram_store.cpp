#include "ram/ram_store.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace dfkv {

namespace {
constexpr std::size_t kLookupsPerSlice = 512;  // how much work one hold of the mutex does
constexpr std::size_t kChunksPerSlice = 256;
}  // namespace

class RamStore::Pin final : public ReadPin {
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

class RamStore::Ticket final : public WriteTicket {
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
  Status commit(std::uint64_t checksum) override {
    assert(!committed_);
    const std::lock_guard lock(store_.mutex_);
    const Status status = store_.catalog_.publish(fill_.object, ns_, fill_.generation, key_, route_, checksum,
                                                  options_.recompute_us, options_.replace);
    committed_ = true;
    if (status == Status::kAlready) ++store_.put_already_;
    return status;
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
      arena_(catalog_.capacity_bytes()) {}

RamStore::~RamStore() { assert(catalog_.counts().pins == 0 && catalog_.counts().filling == 0); }

Status RamStore::put_namespace(const NamespaceId& id, Bytes descriptor, std::string_view label,
                               std::vector<std::uint16_t>& nearest_differs_in) {
  return namespaces_.put(id, descriptor, label, nearest_differs_in);
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
    } else if (options.ack == Ack::kDisk) {
      fill.status = Status::kRefusedUnsupported;  // memory cannot promise to survive a crash
    } else if (!options.replace && catalog_.find(*ns, key) != Catalog::kNone) {
      fill.status = Status::kAlready;
    } else {
      fill = catalog_.begin_fill(*ns, length);
    }
    if (fill.status == Status::kOk) {
      offset = catalog_.offset_of(fill.object);
    } else {
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
    const Status reason = catalog_.miss_reason({key.ns, key.block});
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

Status RamStore::probe(NamespaceRegistry::Index ns, const ChunkKey& key, std::span<const Part> parts,
                       std::vector<Catalog::ObjectId>& found) {
  found.clear();
  const Catalog::ChunkId chunk = catalog_.find_chunk(ns, key);
  if (chunk == Catalog::kNone) return catalog_.miss_reason(key);
  for (const Part part : parts) {
    const Catalog::ObjectId id = catalog_.find_part(chunk, part);
    if (id == Catalog::kNone) return Status::kMissPartMissing;
    found.push_back(id);
  }
  return Status::kOk;
}

// A chunk is leased with all the parts asked for or not at all.
bool RamStore::extend_lease(std::span<const Catalog::ObjectId> found,
                            std::vector<Catalog::ObjectId>& leased) {
  const std::size_t before = leased.size();
  if (before + found.size() > max_objects_per_lease_) return false;
  leased.insert(leased.end(), found.begin(), found.end());
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (catalog_.pin_for_lease(found[i])) continue;
    while (i-- > 0) catalog_.unpin_for_lease(found[i]);
    leased.resize(before);
    return false;
  }
  return true;
}

ExistsResult RamStore::exists(const NamespaceId& ns_id, const ExistsTable& table, std::uint32_t lease_ms,
                              std::uint64_t owner) {
  ExistsResult result;
  result.statuses.resize(table.chunks.size(), Status::kMissNamespaceUnknown);
  const auto ns = namespaces_.find(ns_id);
  if (!ns) return result;

  std::vector<Catalog::ObjectId> found;
  std::vector<Catalog::ObjectId> leased;
  found.reserve(table.parts.size());
  bool in_prefix = true;
  bool leasing = lease_ms != 0;
  std::size_t leased_chunks = 0;
  const std::size_t slice =
      std::max<std::size_t>(1, kLookupsPerSlice / std::max<std::size_t>(1, table.parts.size()));
  for (std::size_t begin = 0; begin < table.chunks.size(); begin += slice) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = begin; i < std::min(begin + slice, table.chunks.size()); ++i) {
      const Status status = probe(*ns, {ns_id, table.chunks[i].block}, table.parts, found);
      result.statuses[i] = status;
      in_prefix = in_prefix && status == Status::kOk;
      if (!in_prefix) continue;
      ++result.prefix;
      leasing = leasing && leases_.size() < max_leases_ && extend_lease(found, leased);
      if (leasing) ++leased_chunks;
    }
  }
  if (leased.empty()) return result;
  {
    const std::lock_guard lock(mutex_);
    result.lease_ms = std::min(lease_ms, max_lease_ms_);
    result.lease_id =
        leases_.open(owner, now_() + std::chrono::milliseconds(result.lease_ms), std::move(leased));
  }
  std::vector<BlockId> batch(leased_chunks);
  std::ranges::transform(table.chunks.begin(),
                         table.chunks.begin() + static_cast<std::ptrdiff_t>(leased_chunks), batch.begin(),
                         &ChunkRef::block);
  touch(ns_id, batch);
  return result;
}

bool RamStore::renew(std::uint64_t lease_id, std::uint32_t lease_ms) {
  const std::lock_guard lock(mutex_);
  const auto now = now_();
  return leases_.renew(lease_id, now, now + std::chrono::milliseconds(std::min(lease_ms, max_lease_ms_)));
}

bool RamStore::release(std::uint64_t lease_id) {
  std::optional<LeaseTable::Lease> lease;
  {
    const std::lock_guard lock(mutex_);
    lease = leases_.close(lease_id);
  }
  if (lease) end_lease(*lease);
  return lease.has_value();
}

void RamStore::release_owner(std::uint64_t owner) {
  std::vector<LeaseTable::Lease> closed;
  {
    const std::lock_guard lock(mutex_);
    closed = leases_.close_owner(owner);
  }
  for (const auto& lease : closed) end_lease(lease);
}

// Its objects stay pinned until their turn comes, so the mutex may be given up in between.
void RamStore::end_lease(const LeaseTable::Lease& lease) {
  for (std::size_t begin = 0; begin < lease.objects.size(); begin += kLookupsPerSlice) {
    const std::size_t end = std::min(begin + kLookupsPerSlice, lease.objects.size());
    const std::lock_guard lock(mutex_);
    for (std::size_t i = begin; i < end; ++i) catalog_.unpin_for_lease(lease.objects[i]);
  }
}

void RamStore::touch(const NamespaceId& ns, std::span<const BlockId> batch) {
  used(ns, batch, &Catalog::touch);
}

void RamStore::stored(const NamespaceId& ns, std::span<const BlockId> batch) {
  used(ns, batch, &Catalog::stored);
}

void RamStore::used(const NamespaceId& ns_id, std::span<const BlockId> batch, Use use) {
  const auto ns = namespaces_.find(ns_id);
  if (!ns) return;
  std::vector<Catalog::ChunkId> chunks;
  chunks.reserve(std::min(batch.size(), kChunksPerSlice));
  for (std::size_t end = batch.size(); end > 0;) {
    const std::size_t begin = end - std::min(end, kChunksPerSlice);
    chunks.clear();
    const std::lock_guard lock(mutex_);
    for (std::size_t i = begin; i < end; ++i) {
      const auto chunk = catalog_.find_chunk(*ns, {ns_id, batch[i]});
      if (chunk != Catalog::kNone) chunks.push_back(chunk);
    }
    (catalog_.*use)(chunks);
    end = begin;
  }
}

Status RamStore::remove(const ObjectKey& key) {
  const auto ns = namespaces_.find(key.ns);
  if (!ns) return Status::kMissNamespaceUnknown;
  const std::lock_guard lock(mutex_);
  return catalog_.remove(*ns, key) ? Status::kOk : catalog_.miss_reason({key.ns, key.block});
}

std::uint64_t RamStore::erase(const NamespaceId& ns_id) {
  const auto ns = namespaces_.find(ns_id);
  if (!ns) return 0;
  std::uint64_t objects = 0;
  {
    const std::lock_guard lock(mutex_);
    objects = catalog_.begin_erase(*ns);
  }
  while (true) {
    const std::lock_guard lock(mutex_);
    if (!catalog_.continue_erase(*ns, kChunksPerSlice)) return objects;
  }
}

void RamStore::quarantine(const ObjectKey& key) {
  const auto ns = namespaces_.find(key.ns);
  if (!ns) return;
  const std::lock_guard lock(mutex_);
  catalog_.quarantine(*ns, key);
}

std::vector<NamespaceInfo> RamStore::list() const {
  auto infos = namespaces_.list();
  const std::lock_guard lock(mutex_);
  for (std::uint32_t i = 0; i < infos.size(); ++i) {
    const auto usage = catalog_.usage_of(i);
    infos[i].objects = usage.objects;
    infos[i].stored_bytes = usage.stored_bytes;
  }
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
  return stats;
}

void RamStore::tick() {
  std::vector<LeaseTable::Lease> closed;
  {
    const std::lock_guard lock(mutex_);
    closed = leases_.close_expired(now_());
  }
  for (const auto& lease : closed) end_lease(lease);
}

std::vector<std::string> RamStore::violations(bool at_rest) const {
  const std::lock_guard lock(mutex_);
  auto found = catalog_.violations();
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
