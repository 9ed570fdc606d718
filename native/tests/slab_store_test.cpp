// One directory of the disk tier: what is found again after a restart, what is refused, what faults do.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "slab/slab_store.h"

#include <doctest/doctest.h>

#include <fstream>
#include <random>
#include <thread>

#include "slab_samples.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {
constexpr auto kOk = Status::kOk;
constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * 1024;

std::string refusal(const SlabStoreOptions& options) {
  try {
    const SlabStore store(options);
  } catch (const StoreError& error) {
    return error.what();
  }
  return "";
}

bool says(const std::string& message, std::initializer_list<std::string_view> words) {
  INFO(message);
  return std::ranges::all_of(words,
                             [&](std::string_view word) { return message.find(word) != std::string::npos; });
}
}  // namespace

TEST_CASE("what was written is found again by the next start, of every size") {
  SlabTest t(256 * kMiB);
  const std::vector<std::size_t> sizes{1,       4095,      4096,      4097,      65'536,
                                       300'001, 1'048'576, 5'000'000, 8'388'608, 20'000'000};
  for (std::size_t i = 0; i < sizes.size(); ++i) CHECK(t.put(t.key(i), sizes[i]) == kOk);
  for (std::size_t i = 0; i < sizes.size(); ++i) CHECK(t.has(t.key(i), sizes[i]));
  const auto used = t.store->stats().used_bytes;
  t.check();
  for (int turn = 0; turn < 2; ++turn) {
    t.reopen();
    CHECK(t.store->recovery().objects == sizes.size());
    CHECK(t.store->recovery().dropped == 0);
    for (std::size_t i = 0; i < sizes.size(); ++i) CHECK(t.has(t.key(i), sizes[i]));
    CHECK(t.store->stats().used_bytes == used);
    const auto spaces = t.store->namespaces();
    REQUIRE(spaces.size() == 1);
    CHECK(spaces[0].label == "test");
    CHECK(spaces[0].objects == sizes.size());
    CHECK(spaces[0].descriptor == t.ns.descriptor);
    t.check();
  }
}

TEST_CASE("what was removed or erased stays away, and its space is used again") {
  SlabTest t;
  for (std::uint64_t i = 0; i < 40; ++i) CHECK(t.put(t.key(i / 4, i % 4), 50'000) == kOk);
  CHECK(t.remove(t.key(0, 1)) == 0);
  ObjectKey whole = t.key(3);
  whole.part = kAllParts;
  CHECK(t.remove(whole) == 0);
  CHECK(t.get(t.key(0, 1)) == Status::kMissNotFound);
  t.reopen();
  CHECK(t.store->recovery().objects == 35);
  CHECK(t.get(t.key(0, 1)) == Status::kMissNotFound);
  for (std::uint16_t stage = 0; stage < 4; ++stage) CHECK(t.get(t.key(3, stage)) == Status::kMissNotFound);
  CHECK(t.has(t.key(0, 0), 50'000));
  CHECK(t.store->erase(t.ns.id) == 35);
  CHECK(t.store->sync(false) == 0);
  CHECK(t.get(t.key(0, 0)) == Status::kMissNotFound);
  CHECK(t.put(t.key(0, 0), 60'000, 2) == kOk);
  t.store.reset();  // before anything was swept
  t.open();
  CHECK(t.store->recovery().objects == 1);
  CHECK(t.store->recovery().dropped == 34 + 1);
  CHECK(t.has(t.key(0, 0), 60'000, 2));
  CHECK(t.store->erase(t.ns.id) == 1);
  while (t.store->sweep()) {
  }
  CHECK(t.store->stats().used_bytes == 0);
  t.check();
}

TEST_CASE("a pinned slot keeps its payload whatever happens to its key") {
  SlabTest t;
  const auto key = t.key(1);
  CHECK(t.put(key, 100'000, 1) == kOk);
  const auto slot = t.store->pin(key);
  REQUIRE(slot);
  SlotRecord record;
  CHECK(t.store->read_record(*slot, key, record) == kOk);
  CHECK(t.put(key, 100'000, 2) == kOk);  // supersedes
  CHECK_FALSE(t.store->current(*slot, key));
  for (std::uint64_t i = 0; i < 600; ++i) CHECK(t.put(t.key(100 + i), 100'000) == kOk);
  Pages pages(102'400);
  CHECK(t.store->read_payload(*slot, record, pages) == kOk);
  CHECK(same_bytes(Bytes(pages).first(100'000), SlabTest::payload(key, 100'000, 1)));
  SlotRecord now;
  CHECK(t.store->read_record(*slot, key, now) == Status::kMissNotFound);
  t.store->unpin(*slot);
  t.check();
  CHECK(t.store->stats().corrupt == 0);
}

TEST_CASE("leases keep slots from eviction up to their share") {
  SlabTest t;
  CHECK(t.put(t.key(1), 1'000'000) == kOk);
  const auto slot = t.store->pin_for_lease(t.key(1));
  REQUIRE(slot);
  for (std::uint64_t i = 0; i < 100; ++i) CHECK(t.put(t.key(100 + i), 1'000'000) == kOk);
  CHECK(t.has(t.key(1), 1'000'000));
  CHECK(t.store->stats().leased_bytes == 1 << 20);
  t.store->unpin_for_lease(*slot);
  CHECK(t.store->stats().leased_bytes == 0);
  t.check();
  std::vector<SlotNumber> leased;
  for (std::uint64_t i = 0; i < 200; ++i) {
    if (const auto one = t.store->pin_for_lease(t.key(100 + i))) leased.push_back(*one);
  }
  CHECK(leased.size() == 16);  // half of 32 MiB
  for (const SlotNumber one : leased) t.store->unpin_for_lease(one);
  t.check();
}

TEST_CASE("a removal meets a write that is under way") {
  SlabTest t;
  const auto key = t.key(1);
  const auto source = SlabTest::payload(key, 5000);
  const Pages pages = pages_of(source);
  const SlabStore::Write what{0, 5000, xxh3_64(source), 0, pages};
  const auto pending = t.store->begin_write(key);
  auto removal = t.store->begin_remove(key);
  CHECK(removal.writes.size() == 1);
  CHECK(t.store->write(pending, what) == Status::kMissCancelled);
  CHECK(t.store->finish(std::move(removal)) == 0);
  CHECK(t.get(key) == Status::kMissNotFound);
  // The same while its record is being written, and with an erase.
  for (int turn = 0; turn < 20; ++turn) {
    t.table_faults.delay_us = 300;
    const auto late = t.store->begin_write(key);
    std::thread writer([&] { static_cast<void>(t.store->write(late, what)); });
    std::this_thread::sleep_for(std::chrono::microseconds(100 * turn));
    CHECK(t.store->finish(t.store->begin_remove(key)) == 0);
    CHECK(t.get(key) == Status::kMissNotFound);
    writer.join();
    CHECK(t.get(key) == Status::kMissNotFound);
    if (turn % 2 == 0) continue;
    const auto erased = t.store->begin_write(key);
    std::thread second([&] { static_cast<void>(t.store->write(erased, what)); });
    std::this_thread::sleep_for(std::chrono::microseconds(50 * turn));
    t.store->erase(t.ns.id);
    second.join();
    CHECK(t.get(key) == Status::kMissNotFound);
  }
  t.table_faults.delay_us = 0;
  while (t.store->sweep()) {
  }
  CHECK(t.store->stats().used_bytes == 0);
  t.check();
  t.reopen();
  CHECK(t.get(key) == Status::kMissNotFound);
}

TEST_CASE("a full store evicts what was used longest ago, chunks as a whole, and never what it just wrote") {
  SlabTest t(64 * kMiB);
  constexpr std::size_t kBytes = 256 * kKiB;
  constexpr std::uint64_t kChunks = 128;  // of two parts: all of the store
  for (std::uint64_t i = 0; i < kChunks; ++i) {
    for (std::uint16_t stage = 0; stage < 2; ++stage) CHECK(t.put(t.key(i, stage), kBytes) == kOk);
  }
  std::vector<BlockId> kept;
  for (std::uint64_t i = 0; i < 32; ++i) kept.push_back(make_block(i));
  for (std::uint64_t i = 0; i < 64; ++i) {
    t.store->touch(t.ns.id, kept);
    for (std::uint16_t stage = 0; stage < 2; ++stage) {
      CHECK(t.put(t.key(1000 + i, stage), kBytes) == kOk);
      CHECK(t.has(t.key(1000 + i, stage), kBytes));
    }
  }
  std::size_t halves = 0;
  std::size_t kept_here = 0;
  std::size_t new_here = 0;
  for (std::uint64_t i = 0; i < 2000; ++i) {
    const bool first = t.store->holds(t.key(i, 0));
    const bool second = t.store->holds(t.key(i, 1));
    if (first != second) ++halves;
    if (first && i < 32) ++kept_here;
    if (first && i >= 1000) ++new_here;
  }
  CHECK(halves == 0);
  CHECK(kept_here == 32);
  CHECK(new_here == 64);
  CHECK(t.store->evicted_lately({t.ns.id, make_block(40)}) != t.store->holds(t.key(40)));
  t.check();
}

TEST_CASE("sizes that shift leave few slots unused") {
  const auto seed = std::random_device{}();
  MESSAGE("seed ", seed);
  std::mt19937_64 random(seed);
  SlabTest t(512 * kMiB);
  std::uint64_t number = 0;
  for (int phase = 0; phase < 3; ++phase) {
    const double centre = 13.0 + 3.5 * ((phase * 2) % 3);  // log2 of 8 KiB, 1 MiB, 90 KiB
    std::normal_distribution<double> sizes(centre, 1.5);
    std::uint64_t written = 0;
    while (written < 640 * kMiB) {
      const auto bytes = static_cast<std::size_t>(std::clamp(std::exp2(sizes(random)), 4096.0, 8.0 * kMiB));
      const auto key = t.key(++number);
      const Pages pages((bytes + 4095) / 4096 * 4096);
      REQUIRE(t.store->write(t.store->begin_write(key),
                             {0, static_cast<std::uint32_t>(bytes), 0, 0, pages}) == kOk);
      REQUIRE(t.store->holds(key));
      written += slot_bytes_of(size_class_of(bytes));
    }
    const auto stats = t.store->stats();
    MESSAGE("phase ", phase, ": live / bound ", double(stats.used_bytes) / stats.bound_bytes,
            ", live / capacity ", double(stats.used_bytes) / stats.capacity_bytes);
    CHECK(static_cast<double>(stats.used_bytes) >= 0.85 * static_cast<double>(stats.bound_bytes));
  }
  t.check();
}

TEST_CASE("what does not fit the directory is refused, and it is said what to do") {
  TempDirectory directory;
  SlabStoreOptions options;
  options.path = directory.path();
  options.capacity_bytes = 32 * kMiB;
  options.node_id = "n-1";
  {
    const SlabStore first(options);
    CHECK(says(refusal(options), {"another node", std::to_string(::getpid()), "stop that one"}));
  }
  SlabStoreOptions other = options;
  other.capacity_bytes = 64 * kMiB;
  CHECK(says(refusal(other), {"33554432 bytes", "67108864 bytes", "old capacity"}));
  other = options;
  other.node_id = "n-2";
  CHECK(says(refusal(other), {"belongs to node n-1", "this is n-2", "--node-id n-1"}));
  other = options;
  other.path = directory.path() / "missing";
  CHECK(says(refusal(other), {"no such directory", "mkdir -p"}));
  other = options;
  other.capacity_bytes = 1000;
  CHECK(says(refusal(other), {"1000 bytes", "16777216"}));

  const auto table = directory.path() / "slots.tbl";
  std::filesystem::rename(table, directory.path() / "away");
  CHECK(says(refusal(options), {"no slots.tbl", "restore"}));
  { std::ofstream(table) << std::string(8192, 'x'); }
  CHECK(says(refusal(options), {"does not begin like a table"}));
  std::filesystem::copy_file(directory.path() / "away", table,
                             std::filesystem::copy_options::overwrite_existing);
  {
    std::fstream file(table, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(33);
    file.put('\x7F');
  }
  CHECK(says(refusal(options), {"header is damaged"}));
  // A table of another store.
  TempDirectory second;
  SlabStoreOptions another = options;
  another.path = second.path();
  { const SlabStore made(another); }
  std::filesystem::copy_file(second.path() / "slots.tbl", table,
                             std::filesystem::copy_options::overwrite_existing);
  CHECK(says(refusal(options), {"two stores"}));
  std::filesystem::copy_file(directory.path() / "away", table,
                             std::filesystem::copy_options::overwrite_existing);
  CHECK(refusal(options).empty());
}

TEST_CASE("faults of the disk are states: nothing is wrong, and it goes on when they end") {
  SlabTest t;
  for (std::uint64_t i = 0; i < 20; ++i) CHECK(t.put(t.key(i), 100'000) == kOk);
  const auto still_there = [&t] {
    for (std::uint64_t i = 0; i < 20; ++i) CHECK(t.has(t.key(i), 100'000));
  };
  const std::vector<std::pair<int, DiskState>> faults{
      {ENOSPC, DiskState::kFull}, {EROFS, DiskState::kReadOnly}, {EIO, DiskState::kFailing}};
  std::uint64_t next = 100;
  for (Faults* device : {&t.payload_faults, &t.table_faults}) {
    for (const auto& [error, state] : faults) {
      device->write_error = error;
      CHECK(t.put(t.key(next), 100'000) == Status::kAgainDisk);
      CHECK(t.store->stats().state == state);
      still_there();
      device->write_error = 0;
      CHECK(t.put(t.key(next), 100'000) == kOk);
      CHECK(t.store->stats().state == DiskState::kOk);
      CHECK(t.has(t.key(next++), 100'000));
      static_cast<void>(t.store->sweep());
      t.check();
    }
  }
  for (Faults* device : {&t.payload_faults, &t.table_faults}) {
    device->read_error = EIO;
    CHECK(t.get(t.key(3)) == Status::kAgainDisk);
    device->read_error = 0;
    still_there();
    device->short_moves = true;
    CHECK(t.put(t.key(next), 100'000) == kOk);
    CHECK(t.has(t.key(next++), 100'000));
    still_there();
    device->short_moves = false;
    device->sync_error = EIO;
    CHECK(t.store->sync(true) == EIO);
    device->sync_error = 0;
    CHECK(t.store->sync(true) == 0);
    device->delay_us = 2000;
    CHECK(t.put(t.key(next), 100'000) == kOk);
    CHECK(t.has(t.key(next++), 100'000));
    device->delay_us = 0;
  }
  t.check();
  CHECK(t.store->stats().corrupt == 0);
}

TEST_CASE("a removal that the disk does not take is reported, and is done when it does") {
  SlabTest t;
  CHECK(t.put(t.key(1), 100'000) == kOk);
  t.table_faults.write_error = EROFS;
  CHECK(t.remove(t.key(1)) == EROFS);
  CHECK(t.get(t.key(1)) == Status::kMissNotFound);
  CHECK(t.store->stats().used_bytes != 0);
  t.table_faults.write_error = 0;
  static_cast<void>(t.store->sweep());
  CHECK(t.store->stats().used_bytes == 0);
  t.reopen();
  CHECK(t.get(t.key(1)) == Status::kMissNotFound);
}

TEST_CASE("the n-th write fails, whichever it is") {
  for (int n = 1; n < 30; ++n) {
    SlabTest t;
    for (Faults* device : {&t.table_faults, &t.payload_faults}) device->writes_until_error = n;
    std::vector<bool> stored;
    for (std::uint64_t i = 0; i < 25; ++i) stored.push_back(t.put(t.key(i), 40'000 + 9000 * i) == kOk);
    static_cast<void>(t.store->sweep());
    t.check();
    t.reopen();
    for (std::uint64_t i = 0; i < 25; ++i) CHECK(t.has(t.key(i), 40'000 + 9000 * i) == stored[i]);
    CHECK(t.store->stats().corrupt == 0);
    t.check();
  }
}
