// Memory for what lives shortly: what is given back serves the next that is as large, so that in the steady
// state nothing is allocated. There is never more of it than was in use at once, in each size. Any thread may
// give back what another took.
//
// For single objects: derive from Recycled<T>, or recycled_shared<T>(). For containers: the names below, or
// RecyclingAllocator. For functions: callback.h.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <set>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace dfkv {

class RecycledMemory {
 public:
  static constexpr std::size_t kMaxBytes = 64 * 1024;  // what is larger is allocated, and freed

  [[nodiscard]] static void* take(std::size_t bytes);
  static void give_back(void* memory, std::size_t bytes) noexcept;  // bytes: as it was taken
};

// T is final.
template <typename T>
class Recycled {
 public:
  static void* operator new(std::size_t bytes) {
    static_assert(std::is_final_v<T> && alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
    return RecycledMemory::take(bytes);
  }
  static void operator delete(void* memory, std::size_t bytes) noexcept {
    RecycledMemory::give_back(memory, bytes);
  }
};

template <typename T>
class RecyclingAllocator {
 public:
  using value_type = T;
  static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);

  RecyclingAllocator() = default;
  template <typename Other>
  RecyclingAllocator(const RecyclingAllocator<Other>& /*other*/) {}

  [[nodiscard]] T* allocate(std::size_t count) {
    if (count > ~std::size_t{0} / kBytes) throw std::bad_array_new_length();
    return static_cast<T*>(RecycledMemory::take(count * kBytes));
  }
  void deallocate(T* memory, std::size_t count) noexcept {
    RecycledMemory::give_back(memory, count * kBytes);
  }
  template <typename Other>
  bool operator==(const RecyclingAllocator<Other>& /*other*/) const {
    return true;
  }

 private:
  static constexpr std::size_t kBytes = sizeof(T);  // NOLINT(bugprone-sizeof-expression): T may be a pointer
};

template <typename T>
using RecycledVector = std::vector<T, RecyclingAllocator<T>>;
template <typename T>
using RecycledDeque = std::deque<T, RecyclingAllocator<T>>;
template <typename T>
using RecycledSet = std::set<T, std::less<>, RecyclingAllocator<T>>;
template <typename Key, typename Value>
using RecycledMap = std::unordered_map<Key, Value, std::hash<Key>, std::equal_to<>,
                                       RecyclingAllocator<std::pair<const Key, Value>>>;

template <typename T, typename... Arguments>
[[nodiscard]] std::shared_ptr<T> recycled_shared(Arguments&&... arguments) {
  return std::allocate_shared<T>(RecyclingAllocator<T>(), std::forward<Arguments>(arguments)...);
}
// The same owner, from now on shared.
template <typename T>
[[nodiscard]] std::shared_ptr<T> recycled_shared(std::unique_ptr<T> owner) {
  return {owner.release(), std::default_delete<T>(), RecyclingAllocator<T>()};
}

}  // namespace dfkv
