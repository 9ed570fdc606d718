// SHA-256 and HMAC-SHA-256 (FIPS 180-4, RFC 2104). Uses the SHA extensions where the CPU has them.
#pragma once

#include <array>
#include <cstdint>

#include "wire/bytes.h"

namespace dfkv {

using Sha256Digest = std::array<std::byte, 32>;

class Sha256 {
 public:
  Sha256() { reset(); }
  void reset();
  void update(Bytes data);
  [[nodiscard]] Sha256Digest finish();  // reset() before further use

 private:
  std::array<std::uint32_t, 8> state_;
  std::array<std::byte, 64> pending_;
  std::uint64_t total_bytes_;
};

[[nodiscard]] Sha256Digest sha256(Bytes data);
[[nodiscard]] Sha256Digest hmac_sha256(Bytes key, Bytes message);
// Compares without a data-dependent branch.
[[nodiscard]] bool equal_constant_time(Bytes a, Bytes b);

}  // namespace dfkv
