#include "wire/checksum.h"

#include <array>

#include "wire/portable.h"
#include "wire/xxh3_backend.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace dfkv {

namespace {

constexpr std::uint32_t kCastagnoliReflected = 0x82F63B78;

// table[k][b]: effect of byte b that is followed by k more bytes of the same 8-byte word.
constexpr std::array<std::array<std::uint32_t, 256>, 8> make_tables() {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kCastagnoliReflected : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}
constexpr auto kTables = make_tables();

}  // namespace

namespace detail {

std::uint32_t crc32c_portable(std::uint32_t crc, const std::byte* at, std::size_t size) {
  for (; size >= 8; size -= 8, at += 8) {
    const std::uint64_t word = load_le<std::uint64_t>(at) ^ crc;
    crc = 0;
    for (std::size_t i = 0; i < 8; ++i) crc ^= kTables[7 - i][word >> (8 * i) & 0xFF];
  }
  for (; size != 0; --size, ++at)
    crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<std::uint8_t>(*at)) & 0xFF];
  return crc;
}

}  // namespace detail

namespace {

using Crc = std::uint32_t (*)(std::uint32_t, const std::byte*, std::size_t);

#if defined(__x86_64__)

__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(std::uint32_t crc, const std::byte* at,
                                                             std::size_t size) {
  std::uint64_t wide = crc;
  for (; size >= 8; size -= 8, at += 8) wide = _mm_crc32_u64(wide, load_le<std::uint64_t>(at));
  crc = static_cast<std::uint32_t>(wide);
  for (; size != 0; --size, ++at) crc = _mm_crc32_u8(crc, static_cast<std::uint8_t>(*at));
  return crc;
}

Crc choose_crc() { return __builtin_cpu_supports("sse4.2") != 0 ? crc32c_sse42 : detail::crc32c_portable; }

const detail::Xxh3Backend& choose_xxh3() {
  // Older CPUs with AVX-512 lower their clock for it, which would slow the engine around us. VBMI2 came after
  // those.
  const bool avx512_is_free =
      __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512vbmi2") != 0;
  if (avx512_is_free) return detail::kXxh3Avx512;
  if (__builtin_cpu_supports("avx2") != 0) return detail::kXxh3Avx2;
  return detail::kXxh3Baseline;
}

#else

Crc choose_crc() { return detail::crc32c_portable; }
const detail::Xxh3Backend& choose_xxh3() { return detail::kXxh3Baseline; }

#endif

const detail::Xxh3Backend& xxh3() {
  static const detail::Xxh3Backend& chosen = choose_xxh3();
  return chosen;
}

}  // namespace

std::uint32_t crc32c(Bytes data, std::uint32_t previous) {
  static const Crc chosen = choose_crc();
  return ~chosen(~previous, data.data(), data.size());
}

std::uint64_t xxh3_64(Bytes data) { return xxh3().hash(data.data(), data.size()); }

struct StreamingChecksum::State {
  alignas(detail::kXxh3StateAlign) std::array<std::byte, detail::kXxh3StateBytes> bytes;
};

StreamingChecksum::StreamingChecksum() : state_(std::make_unique<State>()) { reset(); }
StreamingChecksum::~StreamingChecksum() = default;
StreamingChecksum::StreamingChecksum(StreamingChecksum&&) noexcept = default;
StreamingChecksum& StreamingChecksum::operator=(StreamingChecksum&&) noexcept = default;

void StreamingChecksum::reset() { xxh3().reset(state_->bytes.data()); }

void StreamingChecksum::update(Bytes piece) {
  if (!piece.empty()) xxh3().update(state_->bytes.data(), piece.data(), piece.size());
}

std::uint64_t StreamingChecksum::digest() const { return xxh3().digest(state_->bytes.data()); }

}  // namespace dfkv
