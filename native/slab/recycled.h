// Memory for short-lived objects of one type: what one gives back serves the next, so that in the steady
// state none is allocated. There is never more of it than was in use at once. Any thread.
//
// T derives from Recycled<T> and is final.
#pragma once

#include <cassert>
#include <cstddef>
#include <mutex>
#include <new>

namespace dfkv {

template <typename T>
class Recycled {
 public:
  static void* operator new(std::size_t bytes) {
    assert(bytes == sizeof(T));
    {
      const std::lock_guard lock(mutex_);
      if (Free* const first = free_; first != nullptr) {
        free_ = first->next;
        return first;
      }
    }
    return ::operator new(bytes);
  }
  static void operator delete(void* memory) noexcept {
    if (memory == nullptr) return;
    const std::lock_guard lock(mutex_);
    free_ = new (memory) Free{free_};
  }

 private:
  struct Free {
    Free* next;
  };
  static inline std::mutex mutex_;
  static inline Free* free_ = nullptr;
};

}  // namespace dfkv
