// Little-endian loads and stores over raw bytes. Everything on the wire and on disk is little-endian.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace dfkv {

static_assert(std::endian::native == std::endian::little, "dfkv supports little-endian hosts only");

using Bytes = std::span<const std::byte>;
using MutableBytes = std::span<std::byte>;

template <typename T>
[[nodiscard]] inline T load_le(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <typename T>
inline void store_le(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

inline Bytes as_bytes(const void* data, std::size_t size) {
  return {static_cast<const std::byte*>(data), size};
}

}  // namespace dfkv
