// The fixed lattice of slot sizes: every node and every store file of one lattice id agrees on it.
//
// 4 KiB steps up to 32 KiB, then eight steps per power of two, all multiples of 4 KiB: an object of 32 KiB or
// more wastes at most 12.5 % of itself.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace dfkv {

inline constexpr std::uint32_t kLatticeId = 1;
inline constexpr std::uint64_t kSlotAlignment = 4096;
inline constexpr std::size_t kSizeClasses = 128;
inline constexpr std::uint64_t kMaxSlotBytes = std::uint64_t{1} << 30;  // slot_bytes_of(kSizeClasses - 1)

// The smallest class whose slots hold `bytes`. Precondition: 0 < bytes <= kMaxSlotBytes.
[[nodiscard]] constexpr std::size_t size_class_of(std::uint64_t bytes) {
  constexpr std::uint64_t kLinear = 8 * kSlotAlignment;
  if (bytes <= kLinear) return (bytes + kSlotAlignment - 1) / kSlotAlignment - 1;
  const auto power =
      static_cast<std::uint64_t>(std::bit_width(bytes - 1)) - 1;  // 2^power < bytes <= 2^(power + 1)
  const std::uint64_t step_shift = power - 3;
  const std::uint64_t steps = ((bytes - 1) >> step_shift) + 1;  // 9..16
  return 8 + (power - 15) * 8 + (steps - 9);
}

// Precondition: size_class < kSizeClasses.
[[nodiscard]] constexpr std::uint64_t slot_bytes_of(std::size_t size_class) {
  if (size_class < 8) return (size_class + 1) * kSlotAlignment;
  const std::uint64_t power = 15 + (size_class - 8) / 8;
  const std::uint64_t steps = 9 + (size_class - 8) % 8;
  return steps << (power - 3);
}

static_assert(slot_bytes_of(kSizeClasses - 1) == kMaxSlotBytes);
static_assert(size_class_of(kMaxSlotBytes) == kSizeClasses - 1);

}  // namespace dfkv
