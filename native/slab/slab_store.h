// One directory of the disk tier: a table of slot records (slots.tbl), the extents that hold payload
// (extents.dat), and the namespaces (namespaces.tbl). Formats in docs/formats.md.
//
// Write order: the old record of a slot is made free, the payload is written, then the new record. A record
// that is found with its CRC in its place says what the slot should hold; the checksum of the payload says
// whether it does. What is not exactly right is a miss, and its slot is quarantined.
//
// Threads: methods under "index" do no I/O and may be called from any thread; those under "I/O" block, and
// are for threads of the disk tier. One mutex guards index and allocator and is never held during I/O.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "slab/allocator.h"
#include "slab/device.h"
#include "slab/ghost.h"
#include "slab/record.h"
#include "slab/recycled.h"
#include "slab/slab_directory.h"
#include "slab/slot_index.h"
#include "wire/identity.h"
#include "wire/status.h"

namespace dfkv {

enum class DiskState : std::uint8_t { kOk, kFull, kReadOnly, kFailing };

struct SlabStoreOptions {
  std::filesystem::path path;
  std::uint64_t capacity_bytes = 0;
  std::string node_id;
  double max_leased_fraction = 0.5;
  DeviceWrapper wrap;             // null: the files themselves
  bool keep_payload = true;       // false: payload is neither written nor reserved, to measure recovery
  std::uint32_t retry_ms = 1000;  // a directory that failed a write gets the next one after this time
};

struct SlabStats {
  DiskState state = DiskState::kOk;
  std::uint64_t capacity_bytes = 0, used_bytes = 0, quarantined_bytes = 0;  // whole slots
  std::uint64_t objects = 0, quarantined = 0, pins = 0, leased_bytes = 0;
  std::uint64_t bound_bytes = 0;  // of all slots, free ones included, of extents that have a size class
  std::uint64_t reads = 0, writes = 0, read_bytes = 0, written_bytes = 0;
  std::uint64_t read_errors = 0, write_errors = 0, corrupt = 0;
  std::uint64_t evicted_objects = 0, evicted_bytes = 0;
};

struct RecoveryReport {
  bool created = false;
  std::uint64_t objects = 0;
  std::uint64_t dropped = 0;      // records of no use: superseded, erased, of an unknown namespace
  std::uint64_t faulty = 0;       // records that are damaged
  std::uint64_t quarantined = 0;  // slots found corrupt before, which are free again
  double seconds = 0;
  std::uint64_t table_bytes = 0;  // of the table that were read
  std::string remark;             // what somebody should know, or empty
};

class SlabStore {
 public:
  using SlotList = RecycledVector<SlotNumber>;
  // What a write is told by a removal that comes between. Made by begin_write().
  struct Pending {
    ObjectKey key;
    std::uint64_t tag = 0;
    std::uint32_t owner = 0;
    std::uint32_t generation = 0;
    bool cancelled = false;
    bool done = false;
  };
  struct Removal {
    SlotList slots;  // no longer found, still in the table
    RecycledVector<std::shared_ptr<Pending>> writes;
    [[nodiscard]] bool empty() const { return slots.empty() && writes.empty(); }
  };
  struct Write {
    Route route = 0;
    std::uint32_t length = 0;
    std::uint64_t checksum = 0;
    std::uint64_t recompute_us = 0;
    Bytes payload;  // whole pages, the last filled up with zeros
  };

  // Opens or makes the store and recovers what it holds. Throws StoreError, which says what to do.
  explicit SlabStore(SlabStoreOptions options);
  ~SlabStore();
  SlabStore(const SlabStore&) = delete;
  SlabStore& operator=(const SlabStore&) = delete;

  // ---- index
  [[nodiscard]] bool holds(const ObjectKey& key) const;
  [[nodiscard]] bool evicted_lately(const ChunkKey& key) const;
  // A pinned slot keeps its payload until unpin(), whatever happens to its key. nullopt: not here.
  [[nodiscard]] std::optional<SlotNumber> pin(const ObjectKey& key);
  void unpin(SlotNumber slot);
  // nullopt: leases would hold more than their share.
  [[nodiscard]] std::optional<SlotNumber> pin_for_lease(const ObjectKey& key);
  void unpin_for_lease(SlotNumber slot);
  // Whether `slot`, pinned by the caller, is still where the key is found.
  [[nodiscard]] bool current(SlotNumber slot, const ObjectKey& key) const;
  // Used in the order of the prefix: touched from the tail, so that the head outlives it.
  void touch(const NamespaceId& ns, std::span<const BlockId> batch);
  [[nodiscard]] bool fits(std::uint64_t length) const;
  [[nodiscard]] std::uint64_t capacity_bytes() const { return geometry_.capacity_bytes(); }
  // Takes writes now, as far as known.
  [[nodiscard]] bool writable() const;
  // The key (kAllParts: the chunk) is not found any more, nor will a write under way make it so. finish()
  // follows.
  [[nodiscard]] Removal begin_remove(const ObjectKey& key);
  // Every write is announced before it is queued for a thread, so that begin_remove() meets it.
  [[nodiscard]] std::shared_ptr<Pending> begin_write(const ObjectKey& key);
  void abandon_write(const std::shared_ptr<Pending>& pending);  // instead of write()
  void put_namespace(const NamespaceInfo& info);
  // Returns the number of objects that went. sync(), which makes it last, and sweep() follow.
  std::uint64_t erase(const NamespaceId& ns);
  [[nodiscard]] std::vector<NamespaceInfo> namespaces()
      const;  // with objects, and slot bytes as stored bytes
  [[nodiscard]] SlabStats stats() const;
  [[nodiscard]] const RecoveryReport& recovery() const { return recovery_; }
  [[nodiscard]] const std::filesystem::path& path() const { return options_.path; }

  // ---- I/O
  // kOk; kMissCancelled: removed meanwhile; kAgainNoMemory: nothing can be evicted; kAgainDisk. Once for each
  // begin_write().
  [[nodiscard]] Status write(const std::shared_ptr<Pending>& pending, const Write& what);
  // The record of a pinned slot, if it is that of the key. kMissCorrupt: it is not, and the slot is
  // quarantined.
  [[nodiscard]] Status read_record(SlotNumber slot, const ObjectKey& key, SlotRecord& out);
  // Fills `into`, whole pages, and checks it against the record. kMissCorrupt, kAgainDisk.
  [[nodiscard]] Status read_payload(SlotNumber slot, const SlotRecord& record, MutableBytes into);
  void quarantine(const ObjectKey& key);
  // Frees the records of what was removed, waits for the writes it met and for evictions that had begun:
  // sync() then makes the removal last, also of a key that was being evicted. 0 or errno.
  [[nodiscard]] int finish(const Removal& removal);
  // Everything written so far survives the loss of power. 0 or errno. payload: not for records alone.
  [[nodiscard]] int sync(bool payload);
  // Frees slots of erased namespaces, a bounded number at a time. False: none is left.
  [[nodiscard]] bool sweep();
  // Saves namespaces that are new or changed. 0 or errno.
  [[nodiscard]] int save_namespaces();
  // A clean end: everything is synced, and the next start need not doubt the table.
  void close();

  // Recounts everything; slow, for tests. At rest no slot is being written or pinned.
  [[nodiscard]] std::vector<std::string> violations(bool at_rest) const;

  // Reads every live record and its payload, at low depth. Calls `progress` about once a second and at the
  // end.
  struct ScrubReport {
    std::uint64_t slots = 0, objects = 0, bytes = 0, corrupt = 0, unreadable = 0;
  };
  using ScrubProgress = std::function<bool(const ScrubReport&)>;  // false: stop here
  ScrubReport scrub(const ScrubProgress& progress);

 private:
  struct Pins {
    std::uint32_t reads = 0;
    std::uint32_t leases = 0;
    bool condemned = false;  // its key is gone; the record is free once `freed` is set
    bool freed = false;
  };
  struct Space {
    NamespaceInfo info;
    std::uint32_t generation = 0;
    std::uint64_t objects = 0;
    std::uint64_t slot_bytes = 0;
    bool stale = false;  // slots of earlier generations are left
  };
  using Lock = std::unique_lock<std::mutex>;
  // Owners that no namespace has.
  static constexpr std::uint32_t kQuarantinedOwner = ~std::uint32_t{1};
  static constexpr std::uint32_t kUselessOwner = ~std::uint32_t{2};
  enum SlabReady : std::uint8_t { kUnready = 0, kReady = 1, kBroken = 2 };

  // ---- numbers and names (slab_store.cpp, slab_spaces.cpp)
  [[nodiscard]] static std::uint64_t record_at(SlotNumber slot) {
    return kSlotTableHeaderBytes + std::uint64_t{slot} * kSlotRecordBytes;
  }
  [[nodiscard]] SlotRef ref_of(SlotNumber slot) const;
  [[nodiscard]] SlotNumber number_of(SlotRef ref) const;
  [[nodiscard]] std::uint64_t payload_at(SlotNumber slot) const { return allocator_.offset_of(ref_of(slot)); }
  [[nodiscard]] std::uint64_t chunk_tag(const NamespaceId& ns, std::uint32_t generation,
                                        const BlockId& block) const;
  [[nodiscard]] std::uint64_t tag_of(std::uint64_t chunk, Part part) const;
  [[nodiscard]] std::optional<std::uint64_t> tag_of(
      const ObjectKey& key) const;  // nullopt: namespace unknown
  [[nodiscard]] static std::uint32_t owner_of(std::uint32_t space, std::uint32_t generation);
  [[nodiscard]] static std::uint64_t ghost_hash(std::uint64_t tag);
  [[nodiscard]] std::uint32_t add_space(const NamespaceInfo& info, std::uint32_t generation);

  // ---- slots (slab_slots.cpp); all expect the mutex to be held
  void link(SlotNumber slot, std::uint64_t tag, std::uint32_t owner);
  void unlink(SlotNumber slot);  // the slot stays taken until release()
  void release(SlotNumber slot);
  void condemn(SlotNumber slot);  // after unlink(), before its record is freed
  void settle(SlotNumber slot);   // after its record is freed
  void drop_pins(SlotNumber slot);
  [[nodiscard]] bool may_write() const;
  [[nodiscard]] bool choose_victims(std::size_t size_class, SlotList& victims);
  [[nodiscard]] bool evict_chunk(SlotNumber member, SlotList& victims);
  [[nodiscard]] SlotNumber oldest_of(std::size_t size_class);
  [[nodiscard]] std::optional<SlabAllocator::Run> older_run(std::size_t size_class, std::uint32_t age);
  void clear_run(SlabAllocator::Run run, SlotList& victims);
  [[nodiscard]] std::uint32_t age_of(SlotNumber slot) const {
    return static_cast<std::uint32_t>(clock_) - index_.node(slot).stamp;
  }
  [[nodiscard]] bool evictable(SlotRef ref) const;
  [[nodiscard]] std::uint64_t random();

  // ---- I/O (slab_store.cpp, slab_write.cpp, slab_read.cpp)
  [[nodiscard]] Status take_slot(Lock& lock, std::size_t size_class, std::uint32_t owner, SlotNumber& out);
  void bind_slab(Lock& lock, std::uint32_t slab, std::size_t size_class);
  [[nodiscard]] int free_records(Lock& lock, std::span<const SlotNumber> slots);  // and settles them
  [[nodiscard]] int write_record(SlotNumber slot, const SlotRecord& record);
  [[nodiscard]] SlotRecord free_record(SlotNumber slot);  // expects the mutex
  void recorded(std::uint64_t sequence);                  // expects the mutex
  void note_write(int error);                             // expects the mutex
  void quarantine_slot(Lock& lock, SlotNumber slot, const SlotRecord& record);
  void end_write(const std::shared_ptr<Pending>& pending);    // expects the mutex
  [[nodiscard]] bool void_now(const Pending& pending) const;  // expects the mutex
  [[nodiscard]] Status publish(Lock& lock, Pending& pending, SlotNumber slot, const Write& what);

  // ---- recovery (slab_recover.cpp)
  struct Found {
    SlotNumber slot = 0;
    RecordFault fault = RecordFault::kNone;
    SlotRecord record;
  };
  struct Recovery;
  void recover();
  void read_table(const std::function<void(const Found&)>& visit);
  void find_bindings(Recovery& work);
  void take_slab(Recovery& work, std::uint32_t slab, const std::vector<Found>& found);
  void drop_useless(Recovery& work);
  void scrub_slot(SlotNumber slot, std::vector<std::byte>& memory, ScrubReport& report);

  const SlabStoreOptions options_;
  SlabDirectory directory_;
  const SlabGeometry geometry_;
  const unsigned record_shift_;  // log2 of records of an extent
  std::uint64_t seed_[2];
  std::unique_ptr<Device> table_;
  std::unique_ptr<Device> payload_;
  RecoveryReport recovery_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a slab became ready, a pending write ended
  SlabAllocator allocator_;
  SlotIndex index_;
  std::array<std::vector<std::uint32_t>, kSizeClasses> class_slabs_;
  std::vector<std::uint32_t> slab_generation_;  // by first extent
  std::vector<std::uint8_t> slab_ready_;        // its records are free or live, none is of an earlier binding
  RecycledMap<SlotNumber, Pins> pins_;
  std::vector<std::shared_ptr<Pending>> pending_;
  std::vector<std::uint64_t> frees_;  // numbers of the batches of records being freed, ascending
  std::uint64_t frees_begun_ = 0;
  std::vector<SlotNumber> stuck_;  // their records could not be freed: again later
  std::vector<Space> spaces_;
  std::unordered_map<NamespaceId, std::uint32_t, Id16Hash> space_index_;
  std::uint64_t spaces_version_ = 0;
  std::uint64_t spaces_saved_ = 0;
  GhostFilter ghost_;
  std::uint64_t sequence_ = 0;           // the latest given out
  std::uint64_t recorded_sequence_ = 0;  // the latest that is in the table
  std::uint64_t synced_sequence_ = 0;    // and on the disk
  std::uint64_t changes_ = 1;            // records written; an earlier process may have left some
  std::uint64_t changes_synced_ = 0;     // of those, on the disk for sure
  std::uint32_t binding_ = 0;            // the latest extent generation
  std::uint64_t clock_ = 0;              // counts uses
  std::uint32_t evictions_ = 0;
  std::uint64_t random_state_;
  std::uint64_t filling_ = 0;
  DiskState state_ = DiskState::kOk;
  std::chrono::steady_clock::time_point retry_at_;
  SlabStats counts_;
  bool closed_ = false;

  std::mutex save_mutex_;  // one save at a time
};

}  // namespace dfkv
