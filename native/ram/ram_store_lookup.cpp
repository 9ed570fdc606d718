// Lookups, and the leases that they take.
#include <algorithm>
#include <utility>

#include "ram/ram_store.h"

namespace dfkv {

namespace {
constexpr std::size_t kLookupsPerSlice = 512;  // how much work one hold of the mutex does
}  // namespace

Status RamStore::miss_reason(const ChunkKey& key) const {
  if (disk_ && disk_->evicted_lately(key)) return Status::kMissEvicted;
  return catalog_.miss_reason(key);
}

Status RamStore::probe(NamespaceRegistry::Index ns, const ChunkKey& key, std::span<const Part> parts) {
  found_.clear();
  const Catalog::ChunkId chunk = catalog_.find_chunk(ns, key);
  if (chunk == Catalog::kNone && !disk_) return miss_reason(key);
  for (const Part part : parts) {
    const Catalog::ObjectId id = chunk == Catalog::kNone ? Catalog::kNone : catalog_.find_part(chunk, part);
    if (id != Catalog::kNone) {
      found_.push_back(id);
    } else if (disk_ && disk_->holds({key.ns, key.block, part})) {
      found_.push_back(kOnDisk);
    } else {
      return chunk == Catalog::kNone && found_.empty() ? miss_reason(key) : Status::kMissPartMissing;
    }
  }
  return Status::kOk;
}

bool RamStore::pin_for_lease(const ObjectKey& key, LeaseTable::ObjectId found, LeaseTable::ObjectId& leased) {
  leased = found;
  if (found != kOnDisk) return catalog_.pin_for_lease(static_cast<Catalog::ObjectId>(found));
  const auto ref = disk_->pin_for_lease(key);
  if (!ref) return false;
  leased = kDiskLease | ref->packed();
  return true;
}

void RamStore::unpin_for_lease(LeaseTable::ObjectId leased) {
  if ((leased & kDiskLease) == 0) {
    catalog_.unpin_for_lease(static_cast<Catalog::ObjectId>(leased));
  } else {
    disk_->unpin_for_lease(DiskTier::Ref::unpack(leased & ~kDiskLease));
  }
}

// A chunk is leased with all the parts asked for or not at all.
bool RamStore::extend_lease(const ChunkKey& key, std::span<const Part> parts,
                            std::vector<LeaseTable::ObjectId>& leased) {
  const std::size_t before = leased.size();
  if (before + found_.size() > max_objects_per_lease_) return false;
  for (std::size_t i = 0; i < found_.size(); ++i) {
    LeaseTable::ObjectId one = 0;
    if (pin_for_lease({key.ns, key.block, parts[i]}, found_[i], one)) {
      leased.push_back(one);
      continue;
    }
    for (std::size_t at = before; at < leased.size(); ++at) unpin_for_lease(leased[at]);
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

  std::vector<LeaseTable::ObjectId> leased;
  bool in_prefix = true;
  bool leasing = lease_ms != 0;
  std::size_t leased_chunks = 0;
  const std::size_t slice =
      std::max<std::size_t>(1, kLookupsPerSlice / std::max<std::size_t>(1, table.parts.size()));
  for (std::size_t begin = 0; begin < table.chunks.size(); begin += slice) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = begin; i < std::min(begin + slice, table.chunks.size()); ++i) {
      const ChunkKey key{ns_id, table.chunks[i].block};
      const Status status = probe(*ns, key, table.parts);
      result.statuses[i] = status;
      in_prefix = in_prefix && status == Status::kOk;
      if (!in_prefix) continue;
      ++result.prefix;
      leasing = leasing && leases_.size() < max_leases_ && extend_lease(key, table.parts, leased);
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
    for (std::size_t i = begin; i < end; ++i) unpin_for_lease(lease.objects[i]);
  }
}

void RamStore::tick() {
  std::vector<LeaseTable::Lease> closed;
  {
    const std::lock_guard lock(mutex_);
    closed = leases_.close_expired(now_());
  }
  for (const auto& lease : closed) end_lease(lease);
}

}  // namespace dfkv
