// The plain C++ forms of what is otherwise done by special instructions: chosen on CPUs without them, and
// tested everywhere.
#pragma once

#include <array>
#include <cstdint>

#include "wire/bytes.h"

namespace dfkv::detail {

// `crc` without the initial and final inversion.
[[nodiscard]] std::uint32_t crc32c_portable(std::uint32_t crc, const std::byte* at, std::size_t size);

// Folds `blocks` blocks of 64 bytes into the state.
void sha256_compress_portable(std::array<std::uint32_t, 8>& state, const std::byte* data, std::size_t blocks);

}  // namespace dfkv::detail
