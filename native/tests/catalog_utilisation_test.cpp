// Sizes from 4 KiB to 8 MiB whose distribution shifts, again and again: how much of the arena live slots
// hold, and what a full store evicts.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <random>

#include "ram/catalog.h"
#include "store_samples.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

constexpr std::uint64_t kMiB = 1024 * 1024;
constexpr std::uint64_t kCapacity = 1024 * kMiB;
constexpr std::size_t kKept = 32;  // of the latest objects

}  // namespace

TEST_CASE("live slots hold most of the arena while sizes shift, and the newest objects stay") {
  const auto seed = std::random_device{}();
  MESSAGE("seed ", seed);
  std::mt19937_64 random(seed);
  TestNamespace ns{"shift"};
  CatalogOptions options;
  options.capacity_bytes = kCapacity;
  Catalog catalog(std::move(options));
  std::deque<ObjectKey> newest;
  std::uint64_t number = 0;
  double worst = 1;
  double sum = 0;
  int looks = 0;
  for (int phase = 0; phase < 5; ++phase) {
    const double centre = 13.0 + 3.5 * ((phase * 2) % 3);  // log2 of 8 KiB, 1 MiB, 90 KiB
    std::normal_distribution<double> sizes(centre, 1.5);
    std::uint64_t written = 0;
    std::uint64_t look_at = 0;
    while (written < kCapacity * 3 / 2) {
      const auto bytes = static_cast<std::uint32_t>(std::clamp(std::exp2(sizes(random)), 4096.0, 8.0 * kMiB));
      const ObjectKey key{ns.id, make_block(++number), make_part(0)};
      const auto fill = catalog.begin_fill(0, bytes);
      REQUIRE(fill.status == Status::kOk);
      REQUIRE(catalog.publish(fill.object, 0, fill.generation, key, 0, 0, 0, false) == Status::kOk);
      newest.push_back(key);
      if (newest.size() > kKept) newest.pop_front();
      for (const ObjectKey& one : newest) REQUIRE(catalog.find(0, one) != Catalog::kNone);
      written += slot_bytes_of(size_class_of(bytes));
      if (written < look_at || (phase == 0 && written < kCapacity)) continue;
      look_at = written + kCapacity / 20;
      const double live = static_cast<double>(catalog.used_bytes()) / static_cast<double>(kCapacity);
      worst = std::min(worst, live);
      sum += live;
      ++looks;
    }
    MESSAGE("phase ", phase, ": ",
            static_cast<double>(catalog.used_bytes()) / static_cast<double>(kCapacity));
    CHECK(static_cast<double>(catalog.used_bytes()) >= 0.85 * static_cast<double>(kCapacity));
  }
  MESSAGE("on the way: mean ", sum / looks, ", worst ", worst);
  CHECK(sum / looks >= 0.85);
  CHECK(worst >= 0.75);
  CHECK(catalog.violations() == std::vector<std::string>{});
}

TEST_CASE("larger objects than before come to have all of the arena: no gap keeps what nobody asks for") {
  TestNamespace ns{"larger"};
  CatalogOptions options;
  options.capacity_bytes = kCapacity;
  Catalog catalog(std::move(options));
  const auto seed = std::random_device{}();
  MESSAGE("seed ", seed);
  std::mt19937_64 random(seed);
  std::uint64_t number = 0;
  const auto fill = [&](std::uint64_t bytes, std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) {
      const ObjectKey key{ns.id, make_block(++number), make_part(0)};
      const auto filled = catalog.begin_fill(0, static_cast<std::uint32_t>(bytes));
      REQUIRE(filled.status == Status::kOk);
      REQUIRE(catalog.publish(filled.object, 0, filled.generation, key, 0, 0, 0, false) == Status::kOk);
      // Some are used, so that what is coldest is not side by side.
      const ObjectKey used{ns.id, make_block(number - random() % std::min<std::uint64_t>(number, 300)),
                           make_part(0)};
      const auto chunk = catalog.find_chunk(0, {ns.id, used.block});
      if (chunk != Catalog::kNone) catalog.touch(std::array{chunk});
    }
  };
  fill(kMiB, 3 * kCapacity / kMiB);
  fill(4 * kMiB, 3 * kCapacity / (4 * kMiB));
  std::uint64_t of_before = 0;
  for (std::uint64_t n = 1; n <= 3 * kCapacity / kMiB; ++n) {
    if (catalog.find(0, {ns.id, make_block(n), make_part(0)}) != Catalog::kNone) ++of_before;
  }
  CHECK(of_before * kMiB <= kCapacity / 20);
  CHECK(static_cast<double>(catalog.used_bytes()) >= 0.95 * static_cast<double>(kCapacity));
  CHECK(catalog.violations() == std::vector<std::string>{});
}
