// The RAM tier: a Store over one arena, with directories on disk behind it where there are any.
//
// One mutex guards the catalog and the leases; it is held for index and list work only, never while payload
// is moved: readers and writers use the arena through pinned and filling slots. Long batches give it up
// between slices. Pins and tickets must be gone before the store is.
//
// Lookups and leases: ram_store_lookup.cpp.
//
// With disks (ram_store_disk.cpp): every object is written in memory first, and to a disk behind that. Until
// then it is dirty, and pinned. What is only on a disk is read into a slot that nobody finds, which all its
// readers share; the second time it is wanted, that slot becomes its copy in memory. The disk tier's locks
// come after this mutex.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ram/arena.h"
#include "ram/catalog.h"
#include "ram/leases.h"
#include "ram/namespaces.h"
#include "slab/disk_tier.h"
#include "slab/ghost.h"
#include "slab/recycled.h"
#include "slab/store.h"

namespace dfkv {

struct RamStoreOptions {
  CatalogOptions catalog;
  std::uint64_t ahead_bytes = 0;  // of memory that are kept ready ahead of its use
  NamespaceRegistry::Limits namespaces;
  std::optional<std::vector<std::byte>> tenant;  // the only one that descriptors may name; nullopt: any
  std::uint32_t max_lease_ms = 60'000;
  std::uint32_t max_leases = 65'536;
  std::uint32_t max_objects_per_lease = 65'536;
  std::function<LeaseTable::Clock::time_point()> now = LeaseTable::Clock::now;  // tests step it
  std::optional<DiskTierOptions> disk;                                          // nullopt: memory only
  double max_dirty_fraction =
      0.5;  // of the capacity that may wait for a disk; from half of that, PUTs wait too
};

class RamStore final : public Store {
 public:
  // Throws std::invalid_argument for options out of range and directories that cannot be used (StoreError),
  // std::system_error when the memory cannot be had.
  explicit RamStore(RamStoreOptions options);
  ~RamStore() override;

  Status put_namespace(const NamespaceId& id, Bytes descriptor, std::string_view label,
                       std::vector<std::uint16_t>& nearest_differs_in) override;
  PutStart begin_put(const ObjectKey& key, Route route, std::uint32_t length,
                     const PutOptions& options) override;
  void acquire(const ObjectKey& key, ReadDone done) override;
  ExistsResult exists(const NamespaceId& ns, const ExistsTable& table, std::uint32_t lease_ms,
                      std::uint64_t owner) override;
  bool renew(std::uint64_t lease_id, std::uint32_t lease_ms) override;
  bool release(std::uint64_t lease_id) override;
  void release_owner(std::uint64_t owner) override;
  void touch(const NamespaceId& ns, std::span<const BlockId> batch) override;
  void stored(const NamespaceId& ns, std::span<const BlockId> batch) override;
  void remove(std::span<const ObjectKey> keys, RemoveDone done) override;
  void erase(const NamespaceId& ns, EraseDone done) override;
  void sync(StatusDone done) override;
  void quarantine(const ObjectKey& key) override;
  [[nodiscard]] std::vector<NamespaceInfo> list() const override;
  [[nodiscard]] StoreStats stats() const override;
  void tick() override;

  // Writes what is dirty, as far as there is time, and ends the disk tier: every callback has come then.
  // Nothing may be asked of the store any more, but pins and tickets may still go. Idempotent.
  void close(std::chrono::steady_clock::time_point deadline);
  [[nodiscard]] std::uint64_t ready_bytes() const { return arena_.ready_bytes(); }
  [[nodiscard]] const DiskTier* disk() const { return disk_.get(); }

  // Recounts everything; slow, for tests. Returns what is inconsistent, empty when nothing is. At rest there
  // are also no pins, no leases, no fillings and no condemned slots.
  [[nodiscard]] std::vector<std::string> violations(bool at_rest) const;

 private:
  class Pin;
  class ColdPin;
  class Ticket;
  class Cold;
  struct ColdRead;
  struct WriteBehind;
  using Use = void (Catalog::*)(std::span<const Catalog::ChunkId>);

  static constexpr LeaseTable::ObjectId kDiskLease = LeaseTable::ObjectId{1}
                                                     << 63;                  // the rest is a DiskTier::Ref
  static constexpr LeaseTable::ObjectId kOnDisk = ~LeaseTable::ObjectId{0};  // found there, not leased yet

  void unpin(Catalog::ObjectId id);
  [[nodiscard]] std::uint32_t padded(std::uint32_t length) const;  // whole pages

  // ---- with disks (ram_store_disk.cpp)
  void open_disk(DiskTierOptions options);
  void commit_behind(const Catalog::Fill& fill, NamespaceRegistry::Index ns, const ObjectKey& key,
                     Route route, const PutOptions& options, std::uint64_t checksum, StatusDone done);
  void write_behind(const WriteBehind& job);
  void finish_write(const WriteBehind& job, Status status);
  [[nodiscard]] RecycledVector<StatusDone> syncs_ready();  // expects the mutex
  void settle_sync(StatusDone done);
  void read_cold(NamespaceRegistry::Index ns, DiskTier::Ref ref, const std::shared_ptr<ColdRead>& read);
  void end_cold(Cold& cold);
  // True: `done` was taken. Expects the mutex to be held, and may give it up.
  [[nodiscard]] bool acquire_cold(std::unique_lock<std::mutex>& lock, NamespaceRegistry::Index ns,
                                  const ObjectKey& key, ReadDone& done);
  void add_disk_usage(std::vector<NamespaceInfo>& infos) const;
  [[nodiscard]] Status miss_reason(const ChunkKey& key) const;  // expects the mutex

  void used(const NamespaceId& ns_id, std::span<const BlockId> batch, Use use);
  // These two expect the mutex to be held.
  // probe() leaves in found_ what extend_lease() then leases.
  [[nodiscard]] Status probe(NamespaceRegistry::Index ns, const ChunkKey& key, std::span<const Part> parts);
  [[nodiscard]] bool extend_lease(const ChunkKey& key, std::span<const Part> parts,
                                  std::vector<LeaseTable::ObjectId>& leased);
  [[nodiscard]] bool pin_for_lease(const ObjectKey& key, LeaseTable::ObjectId found,
                                   LeaseTable::ObjectId& leased);
  void unpin_for_lease(LeaseTable::ObjectId leased);
  // These take it themselves.
  void end_lease(const LeaseTable::Lease& lease);

  const std::uint32_t max_lease_ms_;
  const std::uint32_t max_leases_;
  const std::uint32_t max_objects_per_lease_;
  const std::function<LeaseTable::Clock::time_point()> now_;
  NamespaceRegistry namespaces_;
  mutable std::mutex mutex_;
  Catalog catalog_;
  Arena arena_;
  LeaseTable leases_;
  std::vector<LeaseTable::ObjectId> found_;  // kept from call to call, so that none of them allocates
  std::vector<Catalog::ChunkId> used_;
  std::uint64_t put_already_ = 0;
  std::uint64_t put_refused_ = 0;

  // With disks; all but the first guarded by the mutex.
  std::unique_ptr<DiskTier> disk_;
  std::uint64_t max_dirty_bytes_ = 0;
  std::uint64_t dirty_bytes_ = 0;
  std::uint64_t dirty_objects_ = 0;
  std::uint64_t writes_begun_ = 0;
  RecycledSet<std::uint64_t> writes_left_;  // their numbers
  std::condition_variable writes_done_;
  std::vector<std::pair<std::uint64_t, StatusDone>> syncs_;  // with the last write that each waits for
  std::uint64_t lost_writes_ = 0;
  std::uint64_t lost_reported_ = 0;                             // by a sync
  bool closing_ = false;                                        // what is dirty is given up
  RecycledMap<std::uint64_t, std::shared_ptr<ColdRead>> cold_;  // by DiskTier::Ref
  GhostFilter wanted_;                                          // chunks that were read from a disk once
  std::uint64_t joined_reads_ = 0;
  std::uint64_t promoted_ = 0;
};

}  // namespace dfkv
