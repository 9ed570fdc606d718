// In the steady state the memory tier allocates nothing for an object: not for a PUT, which evicts, not for a
// GET, and a lookup only the vector with its answers.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <random>

#include "counted_new.h"
#include "ram/ram_store.h"
#include "store_samples.h"
#include "wire/checksum.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

constexpr std::uint64_t kMiB = 1024 * 1024;

struct Steady {
  TestNamespace ns{"steady"};
  RamStoreOptions options;
  std::unique_ptr<RamStore> store;
  std::mt19937_64 random{20261129};
  std::uint64_t next = 0;

  Steady() {
    options.catalog.capacity_bytes = 32 * kMiB;
    store = std::make_unique<RamStore>(std::move(options));
    std::vector<std::uint16_t> differs;
    REQUIRE(store->put_namespace(ns.id, ns.descriptor, "steady", differs) == Status::kOk);
  }
  [[nodiscard]] ObjectKey key(std::uint64_t number) const {
    return {ns.id, make_block(number / 2), make_part(static_cast<std::uint16_t>(number % 2))};
  }
  // Of sizes that change with time, so that extents change hands.
  void put() {
    const std::uint64_t number = next++;
    const auto length =
        static_cast<std::uint32_t>(1000 + random() % (number / 2000 % 2 == 0 ? 20'000 : 200'000));
    Status status = Status::kAgainBusy;
    const ObjectKey at = key(number);
    auto start = store->begin_put(at, route_of(at.block), length, {});
    if (start.ticket) start.ticket->commit(number, [&status](Status done) { status = done; });
    if (status != Status::kOk) ++failures;
  }
  void get(std::uint64_t back) {
    bool found = false;
    const ObjectKey at = key(next - 1 - back);
    store->acquire(at, [&found](const ReadResult& result) { found = result.pin != nullptr; });
    store->touch(ns.id, std::span(&at.block, 1));
    if (found) ++hits;
  }
  std::uint64_t failures = 0, hits = 0;
};

}  // namespace

TEST_CASE("what is put and got allocates nothing") {
  Steady t;
  const auto round = [&t] {
    t.put();
    t.get(t.random() % 60);
  };
  for (int i = 0; i < 40'000; ++i) round();
  const std::uint64_t evicted = t.store->stats().evicted_objects;
  CHECK(evicted > 10'000);
  t.hits = 0;
  // A segment of a hash table grows when chance fills it more than ever before, which becomes rare and ends.
  // One allocation for each object would be 800'000.
  const std::uint64_t before = allocations();
  for (int i = 0; i < 400'000; ++i) round();
  CHECK(allocations() - before <= 200);
  CHECK(t.failures == 0);
  CHECK(t.hits > 200'000);
  CHECK(t.store->stats().evicted_objects > evicted + 300'000);
}

TEST_CASE("a lookup allocates its answer, however many chunks it asks for") {
  Steady t;
  for (int i = 0; i < 200; ++i) t.put();
  ExistsTable table;
  table.parts = {make_part(0), make_part(1)};
  for (std::uint64_t block = 0; block < 100; ++block) table.chunks.push_back({make_block(block), 0});
  (void)t.store->exists(t.ns.id, table, 0, 1);
  const std::uint64_t before = allocations();
  const auto result = t.store->exists(t.ns.id, table, 0, 1);
  CHECK(allocations() - before <= 1);
  CHECK(result.prefix == 100);
}
