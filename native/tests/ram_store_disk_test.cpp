// The RAM store with directories behind it: what is on which tier when, and what faults of one of them do.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <thread>

#include "ram/ram_store.h"
#include "slab_samples.h"
#include "store_calls.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

constexpr auto kOk = Status::kOk;
constexpr std::uint64_t kMiB = 1024 * 1024;

struct Tiers {
  TestNamespace ns{"tiers"};
  std::vector<std::unique_ptr<TempDirectory>> directories;
  std::vector<std::unique_ptr<Faults>> faults;
  std::uint64_t ram_bytes;
  std::uint64_t disk_bytes;
  std::unique_ptr<RamStore> store;

  explicit Tiers(std::size_t count = 1, std::uint64_t ram = 8 * kMiB, std::uint64_t disk = 64 * kMiB)
      : ram_bytes(ram), disk_bytes(disk) {
    for (std::size_t i = 0; i < count; ++i) {
      directories.push_back(std::make_unique<TempDirectory>());
      faults.push_back(std::make_unique<Faults>());
    }
    open();
  }
  void open() {
    RamStoreOptions options;
    options.catalog.capacity_bytes = ram_bytes;
    options.disk.emplace();
    for (std::size_t i = 0; i < directories.size(); ++i) {
      SlabStoreOptions one = faulty_directory(directories[i]->path(), disk_bytes, "n-1", *faults[i]);
      one.retry_ms = 50;
      options.disk->directories.push_back(std::move(one));
    }
    store = std::make_unique<RamStore>(std::move(options));
    std::vector<std::uint16_t> differs;
    REQUIRE(store->put_namespace(ns.id, ns.descriptor, "tiers", differs) == kOk);
  }
  void reopen() {
    store->close(std::chrono::steady_clock::now() + std::chrono::seconds(30));
    store.reset();
    open();
  }
  [[nodiscard]] ObjectKey key(std::uint64_t block, std::uint16_t stage = 0) const {
    return {ns.id, make_block(block), make_part(stage)};
  }
  Status put(const ObjectKey& at, std::size_t bytes, PutOptions options = {}, std::uint64_t version = 0) {
    auto start = store->begin_put(at, route_of(at.block), static_cast<std::uint32_t>(bytes), options);
    for (int i = 0; i < 3000 && start.status == Status::kAgainNoMemory; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      start = store->begin_put(at, route_of(at.block), static_cast<std::uint32_t>(bytes), options);
    }
    if (!start.ticket) return start.status;
    const auto source = SlabTest::payload(at, bytes, version);
    std::ranges::copy(source, start.ticket->bytes().begin());
    return committed(*start.ticket, xxh3_64(source));
  }
  bool holds(const ObjectKey& at, std::size_t bytes, std::uint64_t version = 0) {
    const auto read = acquired(*store, at);
    return read.pin && same_bytes(read.pin->bytes(), SlabTest::payload(at, bytes, version)) &&
           read.pin->checksum() == xxh3_64(read.pin->bytes());
  }
  [[nodiscard]] DiskStats disk() const { return *store->stats().disk; }
  [[nodiscard]] std::uint64_t reads() const {
    std::uint64_t sum = 0;
    for (const auto& one : faults) sum += one->reads;
    return sum;
  }
  void check_at_rest() {
    for (int i = 0; i < 500 && !store->violations(true).empty(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(store->violations(true) == std::vector<std::string>{});
    CHECK(store->stats().pins == 0);
  }
};

PutOptions durable() {
  PutOptions options;
  options.ack = Ack::kDisk;
  return options;
}
PutOptions replacing() {
  PutOptions options;
  options.replace = true;
  return options;
}

}  // namespace

TEST_CASE("what is put goes to disk behind that, and a restart is warm") {
  Tiers t(2);
  for (std::uint64_t i = 0; i < 100; ++i) CHECK(t.put(t.key(i), 200'000 + i) == kOk);
  CHECK(t.put(t.key(0), 200'000) == Status::kAlready);
  for (std::uint64_t i = 0; i < 100; ++i) CHECK(t.holds(t.key(i), 200'000 + i));  // most are only on disk
  CHECK(synced(*t.store) == kOk);
  CHECK(t.disk().objects == 100);
  CHECK(t.disk().dirty_bytes == 0);
  CHECK(t.disk().reads > 50);
  const auto* disk = t.store->disk();
  CHECK(disk->directory(0).stats().objects > 20);
  CHECK(disk->directory(1).stats().objects > 20);
  t.check_at_rest();
  t.reopen();
  CHECK(t.store->stats().objects == 0);
  for (std::uint64_t i = 0; i < 100; ++i) CHECK(t.holds(t.key(i), 200'000 + i));
  const auto listed = t.store->list();
  REQUIRE(listed.size() == 1);
  CHECK(listed[0].objects == 100);
  CHECK(t.put(t.key(5), 10) == Status::kAlready);
  t.check_at_rest();
}

TEST_CASE("removals, replacements and erasures hold on both tiers and after a restart") {
  Tiers t;
  for (std::uint64_t i = 0; i < 60; ++i) CHECK(t.put(t.key(i), 100'000) == kOk);
  CHECK(removed(*t.store, t.key(59)) == kOk);  // dirty, or nearly
  CHECK(synced(*t.store) == kOk);
  CHECK(removed(*t.store, t.key(1)) == kOk);
  CHECK(removed(*t.store, t.key(1)) == Status::kMissNotFound);
  CHECK(t.put(t.key(2), 120'000, replacing(), 7) == kOk);
  CHECK(t.holds(t.key(2), 120'000, 7));
  CHECK(t.put(t.key(58), 50'000, replacing(), 8) == kOk);
  t.reopen();
  CHECK(acquired(*t.store, t.key(59)).status == Status::kMissNotFound);
  CHECK(acquired(*t.store, t.key(1)).status == Status::kMissNotFound);
  CHECK(t.holds(t.key(2), 120'000, 7));
  CHECK(t.holds(t.key(58), 50'000, 8));
  CHECK(t.holds(t.key(3), 100'000));
  const auto gone = erased(*t.store, t.ns.id);
  CHECK(gone.first == kOk);
  CHECK(gone.second == 58);
  CHECK(acquired(*t.store, t.key(3)).status == Status::kMissNotFound);
  CHECK(t.put(t.key(3), 70'000, {}, 3) == kOk);
  t.reopen();
  CHECK(t.holds(t.key(3), 70'000, 3));
  CHECK(acquired(*t.store, t.key(2)).status == Status::kMissNotFound);
  t.check_at_rest();
}

TEST_CASE("an acknowledgement from disk comes after the sync, and not at all from one that fails") {
  Tiers t;
  const auto before = t.faults[0]->syncs.load();
  CHECK(t.put(t.key(1), 100'000, durable()) == kOk);
  CHECK(t.faults[0]->syncs > before);
  t.faults[0]->sync_error = EIO;
  CHECK(t.put(t.key(2), 100'000, durable()) == Status::kAgainDisk);
  CHECK(t.holds(t.key(2), 100'000));  // visible all the same
  t.faults[0]->sync_error = 0;
  t.faults[0]->write_error = ENOSPC;
  CHECK(t.put(t.key(3), 100'000, durable()) == Status::kAgainDisk);
  CHECK(t.put(t.key(4), 100'000) == kOk);
  CHECK(t.holds(t.key(4), 100'000));
  CHECK(synced(*t.store) == Status::kAgainDisk);
  t.faults[0]->write_error = 0;
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  CHECK(t.put(t.key(5), 100'000, durable()) == kOk);
  CHECK(synced(*t.store) == kOk);
  t.check_at_rest();
}

TEST_CASE("many readers of one cold object make one read, and the second time it stays in memory") {
  Tiers t;
  CHECK(t.put(t.key(1), 1'000'000, durable()) == kOk);
  CHECK(t.put(t.key(2), 1'000'000, durable()) == kOk);
  t.reopen();
  t.faults[0]->delay_us = 20'000;
  const auto before = t.reads();
  {
    std::vector<std::thread> readers;
    std::atomic<int> good{0};
    for (int i = 0; i < 64; ++i) {
      readers.emplace_back([&t, &good] {
        if (t.holds(t.key(1), 1'000'000)) ++good;
      });
    }
    for (std::thread& reader : readers) reader.join();
    CHECK(good == 64);
  }
  t.faults[0]->delay_us = 0;
  CHECK(t.reads() == before + 1);
  CHECK(t.disk().joined_reads >= 1);
  CHECK(t.holds(t.key(2), 1'000'000));
  CHECK(t.store->stats().objects == 1);  // the first was wanted again, the second was not
  CHECK(t.holds(t.key(2), 1'000'000));
  CHECK(t.reads() == before + 3);
  CHECK(t.store->stats().objects == 2);
  CHECK(t.holds(t.key(2), 1'000'000));
  CHECK(t.holds(t.key(1), 1'000'000));
  CHECK(t.reads() == before + 3);
  CHECK(t.disk().promoted == 2);
  t.check_at_rest();
}

TEST_CASE("what waits for a slow disk is bounded, and nothing of it is lost") {
  Tiers t;
  t.faults[0]->delay_us = 3000;
  std::atomic<bool> done{false};
  std::uint64_t most = 0;
  std::thread watcher([&] {
    while (!done) most = std::max(most, t.disk().dirty_bytes);
  });
  for (std::uint64_t i = 0; i < 150; ++i) CHECK(t.put(t.key(i), 250'000) == kOk);
  done = true;
  watcher.join();
  CHECK(most <= 4 * kMiB);
  t.faults[0]->delay_us = 0;
  CHECK(synced(*t.store) == kOk);
  CHECK(t.disk().lost_writes == 0);
  for (std::uint64_t i = 0; i < 150; ++i) CHECK(t.holds(t.key(i), 250'000));
  t.check_at_rest();
}

TEST_CASE("a directory that fails leaves the others alone") {
  Tiers t(2);
  for (std::uint64_t i = 0; i < 40; ++i) CHECK(t.put(t.key(i), 200'000, durable()) == kOk);
  t.faults[0]->write_error = EIO;
  t.faults[0]->read_error = EIO;
  std::size_t refused = 0;
  for (std::uint64_t i = 100; i < 140; ++i) {
    if (t.put(t.key(i), 200'000, durable()) != kOk) ++refused;
  }
  CHECK(refused < 20);  // only those that met it before it was known, and one for each retry
  CHECK(t.disk().directories_failing == 1);
  std::size_t unreadable = 0;
  for (std::uint64_t i = 0; i < 40; ++i) {
    const auto read = acquired(*t.store, t.key(i));
    if (!read.pin) {
      CHECK(read.status == Status::kAgainDisk);
      ++unreadable;
    }
  }
  CHECK(unreadable > 0);
  CHECK(unreadable < 40);
  t.faults[0]->write_error = 0;
  t.faults[0]->read_error = 0;
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  for (std::uint64_t i = 0; i < 40; ++i) CHECK(t.holds(t.key(i), 200'000));
  for (std::uint64_t i = 200; i < 240; ++i) CHECK(t.put(t.key(i), 200'000, durable()) == kOk);
  CHECK(t.disk().directories_failing == 0);
  CHECK(t.disk().corrupt == 0);
  t.check_at_rest();
}

TEST_CASE("a lease keeps what is on disk, and a chunk may be on both tiers") {
  Tiers t(1, 4 * kMiB, 16 * kMiB);
  for (std::uint16_t stage = 0; stage < 2; ++stage) CHECK(t.put(t.key(1, stage), 300'000, durable()) == kOk);
  t.reopen();
  CHECK(t.put(t.key(1, 2), 300'000, durable()) == kOk);
  ExistsTable table;
  for (std::uint16_t stage = 0; stage < 3; ++stage) table.parts.push_back(make_part(stage));
  table.chunks = {{make_block(1), 0}, {make_block(2), 0}};
  const auto found = t.store->exists(t.ns.id, table, 60'000, 1);
  CHECK(found.prefix == 1);
  CHECK(found.statuses == std::vector<Status>{kOk, Status::kMissNotFound});
  REQUIRE(found.lease_id != 0);
  CHECK(t.disk().leased_bytes > 0);
  for (std::uint64_t i = 10; i < 110; ++i) CHECK(t.put(t.key(i), 300'000) == kOk);
  CHECK(t.disk().evicted_objects > 20);
  for (std::uint16_t stage = 0; stage < 3; ++stage) CHECK(t.holds(t.key(1, stage), 300'000));
  CHECK(t.store->release(found.lease_id));
  CHECK(t.disk().leased_bytes == 0);
  for (std::uint64_t i = 200; i < 300; ++i) CHECK(t.put(t.key(i), 300'000) == kOk);
  CHECK(synced(*t.store) == kOk);
  CHECK(t.disk().lost_writes == 0);
  CHECK(acquired(*t.store, t.key(1)).status == Status::kMissEvicted);
  t.check_at_rest();
}
