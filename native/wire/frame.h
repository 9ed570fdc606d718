// The 32-byte frame header. See docs/formats.md for the bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "wire/bytes.h"

namespace dfkv {

inline constexpr std::size_t kFrameHeaderBytes = 32;
inline constexpr std::uint32_t kFrameMagic = 0x314B4644;  // "DFK1"
inline constexpr std::uint8_t kFrameMajor = 1;
inline constexpr std::uint32_t kWholeRequest = 0xFFFFFFFF;
inline constexpr std::uint32_t kDefaultMaxMetaBytes = 256 * 1024;
inline constexpr std::uint32_t kDefaultMaxFragmentBytes = 1024 * 1024;

enum class Opcode : std::uint8_t {
  kHello = 1,
  kAuth = 2,
  kPing = 3,
  kPutNs = 4,
  kExists = 5,
  kGet = 6,
  kPut = 7,
  kRemove = 8,
  kErase = 9,
  kList = 10,
  kStat = 11,
  kSync = 12,
  kLease = 13,
  kRelease = 14,
  kCancel = 15,
  kOpenRegion = 16,
  kPrefetch = 17,
  kSubscribe = 18,
};

// Bits of FrameHeader::flags. Bits 4-7 must be zero, 8-15 may be ignored.
inline constexpr std::uint16_t kFlagReply = 1;
inline constexpr std::uint16_t kFlagLastOfItem = 2;
inline constexpr std::uint16_t kFlagEndOfRequest = 4;
inline constexpr std::uint16_t kFlagError = 8;
inline constexpr std::uint16_t kFlagsMustBeZero = 0x00F0;

struct FrameHeader {
  std::uint8_t opcode = 0;  // raw: an unknown opcode is a typed error, not a framing error
  std::uint16_t flags = 0;
  std::uint64_t request_id = 0;
  std::uint32_t item = kWholeRequest;
  std::uint32_t meta_bytes = 0;
  std::uint32_t payload_bytes = 0;

  [[nodiscard]] bool is_reply() const { return (flags & kFlagReply) != 0; }
  [[nodiscard]] bool last_of_item() const { return (flags & kFlagLastOfItem) != 0; }
  [[nodiscard]] bool end_of_request() const { return (flags & kFlagEndOfRequest) != 0; }
  [[nodiscard]] bool is_error() const { return (flags & kFlagError) != 0; }
};

struct FrameLimits {
  std::uint32_t max_meta_bytes = kDefaultMaxMetaBytes;
  std::uint32_t max_fragment_bytes = kDefaultMaxFragmentBytes;
};

// Why a header cannot be accepted. Each of these closes the connection.
enum class FrameFault : std::uint8_t { kNone, kMagic, kMajor, kCrc, kFlags, kMetaLimit, kPayloadLimit };

[[nodiscard]] const char* frame_fault_name(FrameFault fault);

void encode_frame_header(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> out);

// Checks magic, CRC, major, must-be-zero flags and limits, in that order.
[[nodiscard]] FrameFault decode_frame_header(std::span<const std::byte, kFrameHeaderBytes> in,
                                             const FrameLimits& limits, FrameHeader& out);

}  // namespace dfkv
