// One build of xxh3 per instruction set, chosen at run time. All of them give the same digests.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dfkv::detail {

inline constexpr std::size_t kXxh3StateBytes = 1024;
inline constexpr std::size_t kXxh3StateAlign = 64;

// `state` is kXxh3StateBytes bytes at kXxh3StateAlign; only the backend that reset it may use it.
struct Xxh3Backend {
  std::uint64_t (*hash)(const void* data, std::size_t size);
  void (*reset)(void* state);
  void (*update)(void* state, const void* data, std::size_t size);
  std::uint64_t (*digest)(const void* state);
};

extern const Xxh3Backend kXxh3Baseline;
#if defined(__x86_64__)
extern const Xxh3Backend kXxh3Avx2;
extern const Xxh3Backend kXxh3Avx512;
#endif

}  // namespace dfkv::detail
