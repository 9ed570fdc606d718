#include "slab/recycled.h"

#include <algorithm>
#include <array>
#include <bit>
#include <mutex>
#include <type_traits>

// AddressSanitizer would see no use of what was given back.
#if defined(__SANITIZE_ADDRESS__)
#define DFKV_POISON_RECYCLED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DFKV_POISON_RECYCLED
#endif
#endif
#ifdef DFKV_POISON_RECYCLED
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(memory, bytes) (static_cast<void>(memory), static_cast<void>(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(memory, bytes) (static_cast<void>(memory), static_cast<void>(bytes))
#endif

namespace dfkv {

namespace {

// Four sizes from each power of two to the next: no block is more than a quarter larger than what it holds.
constexpr std::size_t kMinPower = 6;
constexpr std::size_t kMinBytes = 1 << kMinPower;
constexpr std::size_t kStepsShift = 2;

struct Size {
  std::size_t index = 0;
  std::size_t bytes = 0;  // of a block
};

constexpr Size size_for(std::size_t bytes) {
  if (bytes <= kMinBytes) return {0, kMinBytes};
  const auto power =
      static_cast<std::size_t>(std::bit_width(bytes - 1)) - 1;  // 2^power < bytes <= 2^(power + 1)
  const std::size_t step_shift = power - kStepsShift;
  const std::size_t steps = ((bytes - 1) >> step_shift) + 1;  // 5 to 8
  return {((power - kMinPower) << kStepsShift) + steps - 4, steps << step_shift};
}
constexpr std::size_t kSizes = size_for(RecycledMemory::kMaxBytes).index + 1;
static_assert(size_for(65).bytes == 80 && size_for(128).bytes == 128 &&
              size_for(129).index == size_for(128).index + 1);

struct Free {
  Free* next;
};
struct List {
  std::mutex mutex;
  Free* first = nullptr;
};
static_assert(std::is_trivially_destructible_v<List>);  // threads may end after static objects
constinit std::array<List, kSizes> g_lists;

}  // namespace

void* RecycledMemory::take(std::size_t bytes) {
  if (bytes > kMaxBytes) return ::operator new(bytes);
  const Size size = size_for(bytes);
  List& list = g_lists[size.index];
  {
    const std::lock_guard lock(list.mutex);
    if (Free* const block = list.first; block != nullptr) {
      list.first = block->next;
      ASAN_UNPOISON_MEMORY_REGION(block, size.bytes);
      return block;
    }
  }
  return ::operator new(size.bytes);
}

void RecycledMemory::give_back(void* memory, std::size_t bytes) noexcept {
  if (memory == nullptr) return;
  if (bytes > kMaxBytes) {
    ::operator delete(memory);
    return;
  }
  const Size size = size_for(bytes);
  List& list = g_lists[size.index];
  const std::lock_guard lock(list.mutex);
  list.first = new (memory) Free{list.first};
  // The link stays readable: what is reached through poisoned memory counts as leaked.
  ASAN_POISON_MEMORY_REGION(list.first + 1, size.bytes - sizeof(Free));
}

}  // namespace dfkv
