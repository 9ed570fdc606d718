#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "slab/size_class.h"

#include <doctest/doctest.h>

using namespace dfkv;

TEST_CASE("slot sizes ascend in steps of the alignment") {
  for (std::size_t i = 0; i < kSizeClasses; ++i) {
    CHECK(slot_bytes_of(i) % kSlotAlignment == 0);
    if (i > 0) CHECK(slot_bytes_of(i) > slot_bytes_of(i - 1));
  }
  CHECK(slot_bytes_of(0) == 4096);
  CHECK(slot_bytes_of(7) == 32 * 1024);
  CHECK(slot_bytes_of(8) == 36 * 1024);
}

TEST_CASE("an object gets the smallest slot that holds it") {
  for (std::size_t i = 0; i < kSizeClasses; ++i) {
    CHECK(size_class_of(slot_bytes_of(i)) == i);
    CHECK(size_class_of(slot_bytes_of(i) - 1) == i);
    if (i + 1 < kSizeClasses) CHECK(size_class_of(slot_bytes_of(i) + 1) == i + 1);
  }
  CHECK(size_class_of(1) == 0);
}

TEST_CASE("from 32 KiB up an object wastes at most an eighth of itself") {
  for (std::size_t i = 7; i + 1 < kSizeClasses; ++i) {
    const std::uint64_t smallest = slot_bytes_of(i) + 1;  // the worst of its class
    const std::uint64_t slot = slot_bytes_of(size_class_of(smallest));
    CHECK((slot - smallest) * 8 <= smallest);
  }
}
