#include "wire/sha256.h"

#include <algorithm>

#include "wire/portable.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace dfkv {

namespace {

constexpr std::size_t kBlockBytes = 64;

alignas(64) constexpr std::array<std::uint32_t, 64> kRound{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t load_be(const std::byte* at) { return __builtin_bswap32(load_le<std::uint32_t>(at)); }

}  // namespace

namespace detail {

void sha256_compress_portable(std::array<std::uint32_t, 8>& state, const std::byte* data,
                              std::size_t blocks) {
  for (; blocks != 0; --blocks, data += kBlockBytes) {
    std::array<std::uint32_t, 64> w;
    for (std::size_t i = 0; i < 16; ++i) w[i] = load_be(data + 4 * i);
    for (std::size_t i = 16; i < 64; ++i) {
      const std::uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const std::uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const std::uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
      const std::uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const std::uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
  }
}

}  // namespace detail

namespace {

using Compress = void (*)(std::array<std::uint32_t, 8>&, const std::byte*, std::size_t);

#if defined(__x86_64__)

// The SHA extensions keep the state as the two vectors ABEF and CDGH and do two rounds an instruction.
__attribute__((target("sha,sse4.1,ssse3"))) void compress_sha_ni(std::array<std::uint32_t, 8>& state,
                                                                 const std::byte* data, std::size_t blocks) {
  const __m128i byte_swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const auto* from = reinterpret_cast<const __m128i*>(state.data());
  const __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128(from), 0xB1);
  const __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(from + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(badc, hgfe, 8);
  __m128i cdgh = _mm_blend_epi16(hgfe, badc, 0xF0);
  for (; blocks != 0; --blocks, data += kBlockBytes) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i w[4];
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {
      const int now = group & 3;
      if (group < 4) {
        w[now] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + group), byte_swap);
      } else {
        // w[now] holds the four words of 16 rounds ago; w[(now + 3) & 3] the last four.
        const __m128i last = w[(now + 3) & 3];
        const __m128i seven_ago = _mm_alignr_epi8(last, w[(now + 2) & 3], 4);
        const __m128i partial = _mm_add_epi32(_mm_sha256msg1_epu32(w[now], w[(now + 1) & 3]), seven_ago);
        w[now] = _mm_sha256msg2_epu32(partial, last);
      }
      const __m128i constants = _mm_load_si128(reinterpret_cast<const __m128i*>(kRound.data()) + group);
      const __m128i words = _mm_add_epi32(w[now], constants);
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, words);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(words, 0x0E));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  auto* to = reinterpret_cast<__m128i*>(state.data());
  _mm_storeu_si128(to, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(to + 1, _mm_alignr_epi8(dchg, feba, 8));
}

bool cpu_has_sha() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned kShaBit = 1u << 29;
  return (ebx & kShaBit) != 0 && __builtin_cpu_supports("sse4.1") != 0 &&
         __builtin_cpu_supports("ssse3") != 0;
}

Compress choose() { return cpu_has_sha() ? compress_sha_ni : detail::sha256_compress_portable; }

#else

Compress choose() { return detail::sha256_compress_portable; }

#endif

void compress(std::array<std::uint32_t, 8>& state, const std::byte* data, std::size_t blocks) {
  static const Compress chosen = choose();
  chosen(state, data, blocks);
}

}  // namespace

void Sha256::reset() {
  state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  total_bytes_ = 0;
}

void Sha256::update(Bytes data) {
  if (data.empty()) return;
  const std::size_t held = total_bytes_ % kBlockBytes;
  total_bytes_ += data.size();
  if (held != 0) {
    const std::size_t taken = std::min(data.size(), kBlockBytes - held);
    std::memcpy(pending_.data() + held, data.data(), taken);
    data = data.subspan(taken);
    if (held + taken < kBlockBytes) return;
    compress(state_, pending_.data(), 1);
  }
  const std::size_t whole = data.size() / kBlockBytes;
  if (whole != 0) compress(state_, data.data(), whole);
  data = data.subspan(whole * kBlockBytes);
  if (!data.empty()) std::memcpy(pending_.data(), data.data(), data.size());
}

Sha256Digest Sha256::finish() {
  const std::uint64_t bits = total_bytes_ * 8;
  std::size_t held = total_bytes_ % kBlockBytes;
  pending_[held++] = std::byte{0x80};
  if (held > kBlockBytes - 8) {
    std::memset(pending_.data() + held, 0, kBlockBytes - held);
    compress(state_, pending_.data(), 1);
    held = 0;
  }
  std::memset(pending_.data() + held, 0, kBlockBytes - 8 - held);
  store_le(pending_.data() + kBlockBytes - 8, __builtin_bswap64(bits));
  compress(state_, pending_.data(), 1);
  Sha256Digest digest;
  for (std::size_t i = 0; i < state_.size(); ++i)
    store_le(digest.data() + 4 * i, __builtin_bswap32(state_[i]));
  return digest;
}

Sha256Digest sha256(Bytes data) {
  Sha256 hash;
  hash.update(data);
  return hash.finish();
}

Sha256Digest hmac_sha256(Bytes key, Bytes message) {
  std::array<std::byte, kBlockBytes> padded{};
  if (key.size() > kBlockBytes) {
    const Sha256Digest digest = sha256(key);
    std::ranges::copy(digest, padded.begin());
  } else {
    std::ranges::copy(key, padded.begin());
  }
  std::array<std::byte, kBlockBytes> inner_pad;
  std::array<std::byte, kBlockBytes> outer_pad;
  for (std::size_t i = 0; i < kBlockBytes; ++i) {
    inner_pad[i] = padded[i] ^ std::byte{0x36};
    outer_pad[i] = padded[i] ^ std::byte{0x5C};
  }
  Sha256 hash;
  hash.update(inner_pad);
  hash.update(message);
  const Sha256Digest inner = hash.finish();
  hash.reset();
  hash.update(outer_pad);
  hash.update(inner);
  return hash.finish();
}

bool equal_constant_time(Bytes a, Bytes b) {
  if (a.size() != b.size()) return false;
  volatile std::uint8_t difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference = difference | static_cast<std::uint8_t>(a[i] ^ b[i]);
  }
  return difference == 0;
}

}  // namespace dfkv
