// Replaces the operators new and delete of the test program, which is one file, by ones that count, in all
// threads together.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

// ThreadSanitizer has operators of its own, which cannot be replaced: nothing is counted under it.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define DFKV_NOT_COUNTED
#endif
#endif

namespace dfkv::test {

inline std::atomic<std::uint64_t> g_allocations{0};
inline thread_local bool t_uncounted = false;  // set by a thread that is none of what is tested

inline std::uint64_t allocations() { return g_allocations.load(); }

}  // namespace dfkv::test

#ifndef DFKV_NOT_COUNTED
// Not inlined: the compiler would see malloc and free in the place of new and delete, and call it a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (!dfkv::test::t_uncounted) {
    ++dfkv::test::g_allocations;
#ifdef DFKV_TRACE_NEW
    DFKV_TRACE_NEW(bytes);
#endif
  }
  if (void* const memory = std::malloc(bytes != 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif
