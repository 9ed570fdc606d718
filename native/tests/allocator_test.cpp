#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "slab/allocator.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <stdexcept>

using namespace dfkv;

namespace {

constexpr std::uint64_t kMiB = 1024 * 1024;
constexpr SlabGeometry kSmall{kMiB, 16};

std::vector<SlotRef> fill(SlabAllocator& allocator, std::size_t size_class, std::uint32_t first_owner) {
  std::vector<SlotRef> slots;
  while (const auto slot =
             allocator.allocate(size_class, first_owner + static_cast<std::uint32_t>(slots.size()))) {
    slots.push_back(*slot);
  }
  return slots;
}

}  // namespace

TEST_CASE("the geometry suits the capacity") {
  for (const std::uint64_t capacity :
       {kMiB, 8 * kMiB, 100 * kMiB, 1024 * kMiB, 65536 * kMiB, (1 << 20) * kMiB}) {
    CAPTURE(capacity);
    const auto geometry = SlabGeometry::for_capacity(capacity);
    CHECK(geometry.capacity_bytes() <= capacity);
    CHECK(geometry.capacity_bytes() * 100 > capacity * 75);
    CHECK(geometry.extent_bytes % kSlotAlignment == 0);
    CHECK(geometry.extent_bytes <= 32 * kMiB);
    if (capacity >= 64 * kMiB) CHECK(geometry.extent_count >= 64);
  }
  CHECK_THROWS_AS((void)SlabGeometry::for_capacity(kMinCapacityBytes - 1), std::invalid_argument);
}

TEST_CASE("slots are distinct, aligned and inside the arena") {
  SlabAllocator allocator(kSmall);
  const std::size_t size_class = size_class_of(100 * 1024);
  const auto slots = fill(allocator, size_class, 0);
  CHECK(slots.size() >= 140);  // 16 MiB of 104 KiB slots, less the ends of the extents
  std::set<std::uint64_t> offsets;
  for (const SlotRef slot : slots) {
    const std::uint64_t offset = allocator.offset_of(slot);
    CHECK(offset % kSlotAlignment == 0);
    CHECK(offset + allocator.slot_bytes(slot) <= kSmall.capacity_bytes());
    for (const std::uint64_t other : offsets) {
      CHECK((other >= offset + allocator.slot_bytes(slot) || offset >= other + allocator.slot_bytes(slot)));
    }
    offsets.insert(offset);
  }
  CHECK(allocator.used_bytes() == slots.size() * slot_bytes_of(size_class));
  CHECK(allocator.violations().empty());
}

TEST_CASE("a class whose last slot is freed gives its extents to the others") {
  SlabAllocator allocator(kSmall);
  const auto small = fill(allocator, 0, 0);
  CHECK(small.size() == kSmall.capacity_bytes() / 4096);
  const std::size_t large = size_class_of(300 * 1024);
  CHECK_FALSE(allocator.allocate(large, 1));
  for (const SlotRef slot : small) allocator.release(slot);
  CHECK(allocator.free_extents() == kSmall.extent_count);
  CHECK(allocator.slabs_of(0) == 0);
  CHECK(fill(allocator, large, 0).size() >= 48);
  CHECK(allocator.violations().empty());
}

TEST_CASE("objects larger than an extent take a run of extents") {
  SlabAllocator allocator(kSmall);
  const std::size_t size_class = size_class_of(5 * kMiB);
  CHECK(allocator.extents_per_slab(size_class) == 5);
  const auto slots = fill(allocator, size_class, 0);
  CHECK(slots.size() == 3);
  CHECK(allocator.free_extents() == 1);
  allocator.release(slots[1]);
  CHECK(allocator.allocate(size_class_of(kMiB), 7));  // breaks the free run, or takes the last extent
  CHECK(allocator.violations().empty());
  CHECK_FALSE(allocator.fits(size_class_of(17 * kMiB)));
}

TEST_CASE("large slots share a longer run where one extent would waste more") {
  SlabAllocator allocator({kMiB, 64});
  const std::size_t size_class = size_class_of(700 * 1024);  // alone in an extent it would leave 30 % unused
  const std::uint64_t run = allocator.extents_per_slab(size_class) * kMiB;
  const std::uint64_t slots = allocator.slots_per_slab(size_class) * slot_bytes_of(size_class);
  CHECK((run - slots) * 8 <= run);
}

TEST_CASE("the run to clear is the one used longest ago, and never one with a busy slot") {
  SlabAllocator allocator({kMiB, 4});
  const std::size_t size_class = size_class_of(256 * 1024);
  const auto slots = fill(allocator, size_class, 0);
  REQUIRE(slots.size() == 16);
  for (std::size_t i = 0; i < slots.size(); ++i) allocator.heat(slots[i], 100 + i);
  allocator.heat(slots[0], 1000);  // the first slab has one hot object
  const std::size_t other = size_class_of(64 * 1024);
  auto runs = allocator.coldest_runs(other, 8);
  REQUIRE(runs.size() == 4);
  CHECK(runs[0].first == slots[4].slab);
  CHECK(runs[3].first == slots[0].slab);
  allocator.set_busy(slots[5], true);
  runs = allocator.coldest_runs(other, 8);
  CHECK(runs.size() == 3);
  CHECK(std::ranges::none_of(runs, [&](auto run) { return run.first == slots[4].slab; }));
  std::vector<SlabAllocator::Owner> owners;
  allocator.owners_in(runs[0], owners);
  CHECK(owners == std::vector<std::uint32_t>{8, 9, 10, 11});
  for (const auto owner : owners) allocator.release(slots[owner]);
  CHECK(allocator.allocate(other, 99));
  CHECK(allocator.violations().empty());
}

TEST_CASE("a run to clear for a large object holds whole slabs") {
  SlabAllocator allocator({kMiB, 8});
  const std::size_t two = size_class_of(2 * kMiB);
  const auto slots = fill(allocator, two, 0);
  REQUIRE(slots.size() == 4);
  for (std::size_t i = 0; i < slots.size(); ++i) allocator.heat(slots[i], 10 - i);
  const std::size_t three = size_class_of(3 * kMiB);
  const auto runs = allocator.coldest_runs(three, 8);
  REQUIRE(!runs.empty());
  CHECK(runs[0].first == 4);  // extents 4-7: slabs 2 and 3, used longest ago
  CHECK(runs[0].count == 4);
  std::vector<SlabAllocator::Owner> owners;
  allocator.owners_in(runs[0], owners);
  for (const auto owner : owners) allocator.release(slots[owner]);
  CHECK(allocator.allocate(three, 50));
}

TEST_CASE("random use keeps the books") {
  const std::uint64_t seed = std::random_device{}();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  SlabAllocator allocator({kMiB, 24});
  std::map<std::uint32_t, SlotRef> held;
  std::uint64_t used = 0;
  for (std::uint32_t step = 0; step < 20000; ++step) {
    if (held.size() < 40 || random() % 2 == 0) {
      const std::size_t size_class = random() % 48;
      if (const auto slot = allocator.allocate(size_class, step)) {
        REQUIRE(allocator.owner_of(*slot) == step);
        held.emplace(step, *slot);
        used += slot_bytes_of(size_class);
      }
    }
    if (!held.empty() && random() % 2 == 0) {
      const auto it = std::next(held.begin(), static_cast<std::ptrdiff_t>(random() % held.size()));
      used -= allocator.slot_bytes(it->second);
      allocator.release(it->second);
      held.erase(it);
    }
    REQUIRE(allocator.used_bytes() == used);
    if (step % 1000 == 0) REQUIRE(allocator.violations() == std::vector<std::string>{});
  }
}
