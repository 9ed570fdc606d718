// The RAM tier: a Store over one arena.
//
// One mutex guards the catalog and the leases; it is held for index and list work only, never while payload
// is moved: readers and writers use the arena through pinned and filling slots. Long batches give it up
// between slices. Pins and tickets must be gone before the store is.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ram/arena.h"
#include "ram/catalog.h"
#include "ram/leases.h"
#include "ram/namespaces.h"
#include "slab/store.h"

namespace dfkv {

struct RamStoreOptions {
  CatalogOptions catalog;
  NamespaceRegistry::Limits namespaces;
  std::optional<std::vector<std::byte>> tenant;  // the only one that descriptors may name; nullopt: any
  std::uint32_t max_lease_ms = 60'000;
  std::uint32_t max_leases = 65'536;
  std::uint32_t max_objects_per_lease = 65'536;
  std::function<LeaseTable::Clock::time_point()> now = LeaseTable::Clock::now;  // tests step it
};

class RamStore final : public Store {
 public:
  // Throws std::invalid_argument for options out of range, std::system_error when the memory cannot be had.
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
  Status remove(const ObjectKey& key) override;
  std::uint64_t erase(const NamespaceId& ns) override;
  void quarantine(const ObjectKey& key) override;
  [[nodiscard]] std::vector<NamespaceInfo> list() const override;
  [[nodiscard]] StoreStats stats() const override;
  void tick() override;

  // Recounts everything; slow, for tests. Returns what is inconsistent, empty when nothing is. At rest there
  // are also no pins, no leases, no fillings and no condemned slots.
  [[nodiscard]] std::vector<std::string> violations(bool at_rest) const;

 private:
  class Pin;
  class Ticket;
  using Use = void (Catalog::*)(std::span<const Catalog::ChunkId>);

  void unpin(Catalog::ObjectId id);
  void used(const NamespaceId& ns_id, std::span<const BlockId> batch, Use use);
  // These two expect the mutex to be held.
  [[nodiscard]] Status probe(NamespaceRegistry::Index ns, const ChunkKey& key, std::span<const Part> parts,
                             std::vector<Catalog::ObjectId>& found);
  [[nodiscard]] bool extend_lease(std::span<const Catalog::ObjectId> found,
                                  std::vector<Catalog::ObjectId>& leased);
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
  std::uint64_t put_already_ = 0;
  std::uint64_t put_refused_ = 0;
};

}  // namespace dfkv
