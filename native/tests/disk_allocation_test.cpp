// In the steady state the disk tier allocates nothing for an object: not for a PUT that is written behind
// into a full directory, not for what is evicted for it, not for a GET that reads from the disk and keeps the
// object in memory, and a removal only the vector with its answer.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <random>

#include "counted_new.h"
#include "ram/ram_store.h"
#include "slab_samples.h"
#include "store_samples.h"
#include "wire/checksum.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

constexpr std::uint64_t kMiB = 1024 * 1024;
#ifdef DFKV_NOT_COUNTED
constexpr std::uint64_t kRounds = 300;
#else
constexpr std::uint64_t kRounds = 5000;
#endif

// Waits for callbacks of other threads, and allocates nothing for it.
class Outstanding {
 public:
  void begin() { left_.fetch_add(1); }
  void end() {
    if (left_.fetch_sub(1) == 1) left_.notify_all();
  }
  void wait() {
    for (int left = left_.load(); left != 0; left = left_.load()) left_.wait(left);
  }

 private:
  std::atomic<int> left_{0};
};

struct Steady {
  TestNamespace ns{"steady"};
  TempDirectory directory;
  Faults faults;
  RamStoreOptions options;
  std::unique_ptr<RamStore> store;
  std::mt19937_64 random{20261130};
  std::vector<std::byte> source = make_payload(1, 256 * 1024);
  Outstanding outstanding;
  std::uint64_t next = 0;
  std::uint64_t removals = 0, failures = 0;
  std::atomic<std::uint64_t> hits{0}, wrong{0}, failed_later{0};

  Steady() {
    options.catalog.capacity_bytes = 8 * kMiB;
    options.disk.emplace();
    options.disk->directories.push_back(faulty_directory(directory.path(), 32 * kMiB, "n-1", faults));
    store = std::make_unique<RamStore>(std::move(options));
    std::vector<std::uint16_t> differs;
    REQUIRE(store->put_namespace(ns.id, ns.descriptor, "steady", differs) == Status::kOk);
  }
  [[nodiscard]] ObjectKey key(std::uint64_t number) const {
    return {ns.id, make_block(number / 2), make_part(static_cast<std::uint16_t>(number % 2))};
  }
  // Of sizes that change with time, so that extents change hands.
  [[nodiscard]] std::uint32_t length() {
    constexpr std::array<std::uint32_t, 6> kLengths = {7000, 12'000, 20'000, 30'000, 45'000, 60'000};
    return kLengths[random() % 4 + next / 2000 % 2 * 2];
  }
  void put(std::uint64_t number, const PutOptions& how) {
    const ObjectKey at = key(number);
    const std::uint32_t bytes = length();
    auto start = store->begin_put(at, route_of(at.block), bytes, how);
    if (!start.ticket) {
      ++failures;
      return;
    }
    const Bytes from = Bytes(source).first(bytes);
    std::ranges::copy(from, start.ticket->bytes().begin());
    outstanding.begin();
    start.ticket->commit(xxh3_64(from), [this](Status status) {
      if (status != Status::kOk) ++failed_later;
      outstanding.end();
    });
  }
  void get(std::uint64_t number) {
    outstanding.begin();
    store->acquire(key(number), [this](ReadResult result) {
      if (result.pin) {
        ++hits;
        if (xxh3_64(result.pin->bytes()) != result.pin->checksum()) ++wrong;
      }
      result.pin.reset();
      outstanding.end();
    });
  }
  void remove(std::uint64_t number) {
    const ObjectKey at = key(number);
    ++removals;
    outstanding.begin();
    store->remove(std::span(&at, 1), [this](const std::vector<Status>& statuses) {
      if (statuses[0] == Status::kAgainDisk) ++failed_later;
      outstanding.end();
    });
  }
  void sync() {
    outstanding.begin();
    store->sync([this](Status status) {
      if (status != Status::kOk) ++failed_later;
      outstanding.end();
    });
  }
  // As much waits for the disk as may: later, one that is slow for a moment asks for nothing new.
  void crowd() {
    faults.delay_us = 2000;
    for (int i = 0; i < 600; ++i) put(next++, {Ack::kDisk, true, 0, false});
    outstanding.wait();
    faults.delay_us = 0;
    failures = 0;  // what was too much was refused
  }
  // Eight objects come, eight that have left the memory are read, some of them by several readers at a time.
  void round(std::uint64_t count) {
    for (int i = 0; i < 8; ++i)
      put(next++, {i == 7 && count % 8 == 0 ? Ack::kDisk : Ack::kRam, false, 0, false});
    if (count % 8 == 2) put(next - 20 - random() % 100, {Ack::kRam, true, 0, false});
    outstanding.wait();
    const std::uint64_t oldest = std::min<std::uint64_t>(next, 900);
    for (int i = 0; i < 4; ++i) {
      const std::uint64_t number = next - 1 - random() % oldest;
      get(number);
      get(number);
    }
    outstanding.wait();
    if (count % 8 == 4) remove(next - 1 - random() % oldest);
    if (count % 8 == 6) sync();
    outstanding.wait();
  }
};

}  // namespace

TEST_CASE("what goes to a disk and comes from it allocates nothing") {
  Steady t;
  t.crowd();
  std::uint64_t rounds = 0;
  while (rounds < kRounds) t.round(rounds++);
  const DiskStats before = *t.store->stats().disk;
  const std::uint64_t hits = t.hits;
  const std::uint64_t answers = t.removals;
  const std::uint64_t allocated = allocations();
  while (rounds < 2 * kRounds) t.round(rounds++);
  // A table grows when chance fills it more than ever before, which becomes rare and ends. One allocation for
  // each object would be 80'000.
  CHECK(allocations() - allocated <= t.removals - answers + 100);
  const DiskStats after = *t.store->stats().disk;
  CHECK(t.failures == 0);
  CHECK(t.wrong == 0);
  // All of what a class has in so small a directory may be in use for a moment: then a write finds no slot.
  CHECK(after.lost_writes < 50);
  CHECK(t.failed_later <= after.lost_writes * 2);
  CHECK(t.hits - hits > 5 * kRounds);
  CHECK(after.writes - before.writes >= 8 * kRounds);
  CHECK(after.evicted_objects - before.evicted_objects > 5 * kRounds);
  CHECK(after.reads - before.reads > kRounds);
  CHECK(after.promoted - before.promoted > kRounds);
  CHECK(after.joined_reads - before.joined_reads > kRounds);
  t.sync();
  t.outstanding.wait();
  CHECK(t.store->violations(true) == std::vector<std::string>{});
}
