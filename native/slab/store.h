// The storage interface that the server drives. RamStore implements it, with or without disks behind it.
//
// Threads: every method may be called from any reactor thread; the implementation locks. Nothing here blocks
// on I/O: what needs a disk completes later, through the callback that the call was given.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "slab/callback.h"
#include "wire/identity.h"
#include "wire/meta.h"
#include "wire/payloads.h"
#include "wire/status.h"

namespace dfkv {

// What a store calls exactly once for an operation: inline, or later from a thread of its own.
using StatusDone = Callback<void(Status)>;

// A live object pinned for reading. Move-only; the destructor unpins. While it lives the bytes neither move
// nor change.
class ReadPin {
 public:
  virtual ~ReadPin() = default;
  [[nodiscard]] virtual Bytes bytes() const = 0;
  [[nodiscard]] virtual std::uint64_t checksum() const = 0;
};

// A slot being filled. The caller writes into bytes(), then commits once. Destroying it uncommitted frees the
// slot and leaves nothing visible.
class WriteTicket {
 public:
  virtual ~WriteTicket() = default;
  [[nodiscard]] virtual MutableBytes bytes() = 0;
  // Publishes the object, once; bytes() is over with it. `done` gets kOk when the object is as safe as
  // PutOptions::ack says. kAlready: another writer was first (the slot is freed). kAgainDisk: visible, but
  // not on a disk.
  virtual void commit(std::uint64_t checksum, StatusDone done) = 0;
};

struct PutOptions {
  Ack ack = Ack::kRam;
  bool replace = false;
  std::uint64_t recompute_us = 0;
  bool asks_again = false;  // where there is no memory now: that is not refused yet
};
struct PutStart {
  Status status =
      Status::kOk;  // kOk with a ticket, or kAlready, kAgainNoMemory, kRefusedTooLarge, ... without
  std::unique_ptr<WriteTicket> ticket;
};
struct ReadResult {
  Status status = Status::kOk;
  std::unique_ptr<ReadPin> pin;
};
using ReadDone = Callback<void(ReadResult)>;
using RemoveDone = Callback<void(std::vector<Status>)>;  // one for each key
using EraseDone = Callback<void(Status, std::uint64_t objects)>;

struct ExistsResult {
  std::vector<Status> statuses;  // one per chunk: kOk, kMissPartMissing, kMissNotFound, kMissEvicted, ...
  std::uint32_t prefix = 0;      // leading chunks that are complete
  std::uint64_t lease_id = 0;    // 0: none was asked for, or none could be granted
  std::uint32_t lease_ms = 0;
};

// Of all directories together.
struct DiskStats {
  std::uint64_t directories = 0, directories_failing = 0;  // those that take no writes now
  std::uint64_t capacity_bytes = 0, used_bytes = 0, quarantined_bytes = 0, bound_bytes = 0;
  std::uint64_t objects = 0, quarantined = 0, pins = 0, leased_bytes = 0;
  std::uint64_t reads = 0, writes = 0, read_bytes = 0, written_bytes = 0;
  std::uint64_t read_errors = 0, write_errors = 0, corrupt = 0, evicted_objects = 0, evicted_bytes = 0;
  std::uint64_t dirty_objects = 0, dirty_bytes = 0;  // in memory, not on a disk yet
  std::uint64_t lost_writes = 0;                     // that no disk took: those objects are in memory only
  std::uint64_t joined_reads = 0, promoted = 0;
};

struct StoreStats {
  std::uint64_t capacity_bytes = 0, used_bytes = 0, stored_bytes = 0;  // used: whole slots; stored: payload
  std::uint64_t objects = 0, chunks = 0, namespaces = 0;
  std::uint64_t pins = 0, leases = 0, leased_bytes = 0, filling = 0, condemned = 0;
  std::uint64_t evicted_objects = 0, evicted_bytes = 0, put_already = 0, put_refused = 0;
  std::optional<DiskStats> disk;  // nullopt: memory only
};

class Store {
 public:
  virtual ~Store() = default;

  // Registers a namespace. kRefusedNamespace: descriptor not canonical or not what `id` digests.
  // `nearest_differs_in` gets the differing tags of the most similar other namespace, if any.
  virtual Status put_namespace(const NamespaceId& id, Bytes descriptor, std::string_view label,
                               std::vector<std::uint16_t>& nearest_differs_in) = 0;
  virtual PutStart begin_put(const ObjectKey& key, Route route, std::uint32_t length,
                             const PutOptions& options) = 0;
  // Calls `done` exactly once, inline or from a thread of the store.
  virtual void acquire(const ObjectKey& key, ReadDone done) = 0;
  // `owner` ties a lease to a connection; lease_ms 0 takes none. A lease pins every part of the leading
  // complete chunks.
  virtual ExistsResult exists(const NamespaceId& ns, const ExistsTable& table, std::uint32_t lease_ms,
                              std::uint64_t owner) = 0;
  virtual bool renew(std::uint64_t lease_id, std::uint32_t lease_ms) = 0;
  virtual bool release(std::uint64_t lease_id) = 0;
  virtual void release_owner(std::uint64_t owner) = 0;  // the connection ended
  // A batch was read: touched from its tail to its head, so that the head outlives the tail.
  virtual void touch(const NamespaceId& ns, std::span<const BlockId> batch) = 0;
  // A batch was written, or found written already: as recent as if it had been read, but no sign of reuse.
  virtual void stored(const NamespaceId& ns, std::span<const BlockId> batch) = 0;
  // Nothing of it is found any more when the call returns; `done` comes when it stays away after a crash too.
  // kAgainDisk: that cannot be promised. Part kAllParts: the chunk.
  virtual void remove(std::span<const ObjectKey> keys, RemoveDone done) = 0;
  virtual void erase(const NamespaceId& ns, EraseDone done) = 0;  // as remove; with the objects that went
  // Everything committed before survives a crash when `done` comes. kRefusedUnsupported: memory only.
  virtual void sync(StatusDone done) = 0;
  virtual void quarantine(const ObjectKey& key) = 0;  // a reader found it corrupt
  [[nodiscard]] virtual std::vector<NamespaceInfo> list() const = 0;
  [[nodiscard]] virtual StoreStats stats() const = 0;
  // Expires leases; called about every 100 ms by the node.
  virtual void tick() = 0;
};

}  // namespace dfkv
