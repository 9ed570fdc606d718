// The arena's pages: how many are there before they are written to, and that there are no more.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "ram/pages_ahead.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "ram/arena.h"

using namespace dfkv;
using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t kMiB = 1024 * 1024;
constexpr std::uint64_t kHugePageBytes = 2 * kMiB;  // whoever takes a byte of one takes all of it

std::uint64_t resident_bytes(MutableBytes memory) {
  const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages(memory.size() / page_bytes);
  REQUIRE(::mincore(memory.data(), memory.size(), pages.data()) == 0);
  return page_bytes * static_cast<std::uint64_t>(
                          std::ranges::count_if(pages, [](unsigned char page) { return (page & 1) != 0; }));
}

bool comes_true(const std::function<bool()>& condition) {
  for (const auto until = std::chrono::steady_clock::now() + 20s; std::chrono::steady_clock::now() < until;) {
    if (condition()) return true;
    std::this_thread::sleep_for(1ms);
  }
  return condition();
}

bool kernel_can() {
  Arena arena(4 * kMiB, 4 * kMiB);
  for (int i = 0; i < 1000 && arena.ready_bytes() == 0; ++i) std::this_thread::sleep_for(1ms);
  return arena.ready_bytes() != 0;
}

}  // namespace

TEST_CASE("an arena that is not used has as many pages as are kept ahead") {
  if (!kernel_can()) return;
  Arena arena(256 * kMiB, 24 * kMiB);
  const MutableBytes all(arena.slice(0, 0).data(), arena.capacity_bytes());
  CHECK(comes_true([&] { return arena.ready_bytes() == 24 * kMiB; }));
  std::this_thread::sleep_for(50ms);
  CHECK(arena.ready_bytes() == 24 * kMiB);
  CHECK(resident_bytes(all.first(24 * kMiB)) == 24 * kMiB);
  CHECK(resident_bytes(all) <= 24 * kMiB + kHugePageBytes);
}

TEST_CASE("use draws the pages along, by as much as is kept ahead, and not beyond the end") {
  if (!kernel_can()) return;
  Arena arena(256 * kMiB, 24 * kMiB);
  const MutableBytes all(arena.slice(0, 0).data(), arena.capacity_bytes());
  std::uint64_t highest = 0;
  for (const std::uint64_t used : {40 * kMiB, 41 * kMiB, 100 * kMiB, 90 * kMiB, 239 * kMiB, 256 * kMiB}) {
    CAPTURE(used);
    (void)arena.slice(used - kMiB, kMiB);
    CHECK(comes_true([&] { return arena.ready_bytes() >= std::min(256 * kMiB, used + 8 * kMiB); }));
    CHECK(resident_bytes(all.first(used)) == used);
    highest = std::max(highest, used);
    std::this_thread::sleep_for(30ms);
    CHECK(resident_bytes(all) <= std::min(256 * kMiB, highest + 24 * kMiB) + kHugePageBytes);
  }
  CHECK(comes_true([&] { return arena.ready_bytes() == arena.capacity_bytes(); }));
}

TEST_CASE("pages keep up with a use that never pauses") {
  if (!kernel_can()) return;
  Arena arena(160 * kMiB, 32 * kMiB);
  REQUIRE(comes_true([&] { return arena.ready_bytes() == 32 * kMiB; }));
  int ahead = 0;
  int steps = 0;
  for (std::uint64_t used = 0; used < 128 * kMiB; used += 65536, ++steps) {
    (void)arena.slice(used, 65536);
    if (arena.ready_bytes() >= used + 4 * kMiB) ++ahead;
    std::this_thread::sleep_for(100us);
  }
  CHECK(ahead > steps * 3 / 4);
}

TEST_CASE("what is stored stays as it is while pages are made ready around it") {
  Arena arena(64 * kMiB, 16 * kMiB);
  std::vector<std::thread> writers;
  for (std::uint64_t writer = 0; writer < 4; ++writer) {
    writers.emplace_back([&arena, writer] {
      for (std::uint64_t at = writer; at < 64; at += 4) {
        std::ranges::fill(arena.slice(at * kMiB, kMiB), std::byte(at + 1));
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  for (std::uint64_t at = 0; at < 64; ++at) {
    const MutableBytes slice = arena.slice(at * kMiB, kMiB);
    CHECK(std::ranges::all_of(slice, [at](std::byte each) { return each == std::byte(at + 1); }));
  }
}

TEST_CASE("without pages ahead, only what is written to is there") {
  Arena arena(64 * kMiB);
  const MutableBytes all(arena.slice(0, 0).data(), arena.capacity_bytes());
  std::ranges::fill(arena.slice(32 * kMiB, 4096), std::byte{1});
  std::this_thread::sleep_for(20ms);
  CHECK(arena.ready_bytes() == 0);
  CHECK(resident_bytes(all) <= kHugePageBytes);
}

TEST_CASE("a forked child does not get the pages") {
  Arena arena(8 * kMiB);
  const MutableBytes slice = arena.slice(0, 4096);
  slice[0] = std::byte{1};
  const pid_t child = ::fork();
  if (child == 0) {
    unsigned char page = 0;
    ::_exit(::mincore(slice.data(), 4096, &page) == 0 ? 1 : 0);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}
