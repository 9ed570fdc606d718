// The directories of a node and the threads that read and write them.
//
// Each directory has its own threads: readers, writers, and a keeper that makes things last (removals, syncs,
// saved namespaces) and sweeps what was erased. A directory that hangs or fails holds up none of the others.
// An object is looked for in every directory; new ones go to one by their chunk, among those that take
// writes.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "slab/callback.h"
#include "slab/recycled.h"
#include "slab/slab_store.h"
#include "slab/store.h"
#include "slab/worker_pool.h"

namespace dfkv {

struct DiskTierOptions {
  std::vector<SlabStoreOptions> directories;
  unsigned readers = 4;  // threads of each directory
  unsigned writers = 4;
};

class DiskTier {
 public:
  struct Ref {
    std::uint32_t directory = 0;
    SlotNumber slot = 0;
    [[nodiscard]] std::uint64_t packed() const { return std::uint64_t{directory} << 32 | slot; }
    static Ref unpack(std::uint64_t packed) {
      return {static_cast<std::uint32_t>(packed >> 32), static_cast<SlotNumber>(packed)};
    }
  };
  struct Removals {
    RecycledVector<SlabStore::Removal> by_directory;
    RecycledVector<bool> concerned;  // where a copy may have been; empty: every directory
  };
  using Done = Callback<void(int error)>;  // 0 or errno

  // Opens every directory, in parallel. Throws StoreError.
  explicit DiskTier(DiskTierOptions options);
  ~DiskTier();
  DiskTier(const DiskTier&) = delete;
  DiskTier& operator=(const DiskTier&) = delete;
  // Runs what is queued and ends the threads; every Done has been called then. Idempotent.
  void stop();

  [[nodiscard]] std::size_t directories() const { return stores_.size(); }
  [[nodiscard]] SlabStore& directory(std::size_t index) { return *stores_[index]; }
  [[nodiscard]] const SlabStore& directory(std::size_t index) const { return *stores_[index]; }

  // ---- no I/O, any thread
  [[nodiscard]] bool holds(const ObjectKey& key) const;
  [[nodiscard]] bool evicted_lately(const ChunkKey& key) const;
  [[nodiscard]] std::optional<Ref> pin(const ObjectKey& key);
  void unpin(Ref ref) { stores_[ref.directory]->unpin(ref.slot); }
  [[nodiscard]] std::optional<Ref> pin_for_lease(const ObjectKey& key);
  void unpin_for_lease(Ref ref) { stores_[ref.directory]->unpin_for_lease(ref.slot); }
  void touch(const NamespaceId& ns, std::span<const BlockId> batch);
  void put_namespace(const NamespaceInfo& info);
  [[nodiscard]] std::uint64_t erase(const NamespaceId& ns);
  // Where a new object of this size goes. nullopt: no directory takes it now.
  [[nodiscard]] std::optional<std::uint32_t> choose(const ChunkKey& key, std::uint64_t length) const;
  // True: it was on a disk. settle() follows.
  bool begin_remove(const ObjectKey& key, Removals& out);
  [[nodiscard]] bool unwritable() const;  // every directory
  void add_stats(DiskStats& out) const;

  // ---- later, on threads of the directory
  void read(std::uint32_t directory, WorkerPool::Task task);
  void write(std::uint32_t directory, WorkerPool::Task task);
  void quarantine(const ObjectKey& key);
  // Makes the removals, and all that was recorded before, last in every directory. payload: also what was
  // written.
  void settle(Removals removals, bool payload, Done done);
  // The same in one directory, without a removal.
  void sync(std::uint32_t directory, Done done);

 private:
  class Keeper;
  struct Threads;

  [[nodiscard]] std::optional<std::uint32_t> best_of(const ChunkKey& key,
                                                     const std::function<bool(const SlabStore&)>& fit) const;

  std::vector<std::unique_ptr<SlabStore>> stores_;
  std::vector<std::unique_ptr<Threads>> threads_;
};

}  // namespace dfkv
