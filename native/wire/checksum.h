// CRC-32C of headers and records, and xxh3-64 of payloads.
#pragma once

#include <cstdint>
#include <memory>

#include "wire/bytes.h"

namespace dfkv {

// CRC-32C (Castagnoli), reflected, initial and final xor 0xFFFFFFFF. Uses SSE4.2 where the CPU has it.
[[nodiscard]] std::uint32_t crc32c(Bytes data, std::uint32_t previous = 0);

// xxh3-64, seed 0, in one go.
[[nodiscard]] std::uint64_t xxh3_64(Bytes data);

// xxh3-64 over pieces, so that each piece is hashed while it is still in cache. Reusable after reset().
class StreamingChecksum {
 public:
  StreamingChecksum();
  ~StreamingChecksum();
  StreamingChecksum(StreamingChecksum&&) noexcept;
  StreamingChecksum& operator=(StreamingChecksum&&) noexcept;
  StreamingChecksum(const StreamingChecksum&) = delete;
  StreamingChecksum& operator=(const StreamingChecksum&) = delete;

  void reset();
  void update(Bytes piece);
  [[nodiscard]] std::uint64_t digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace dfkv
