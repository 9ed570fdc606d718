#include "wire/frame.h"

#include "wire/checksum.h"

namespace dfkv {

namespace {
constexpr std::size_t kCrcAt = 28;
}  // namespace

const char* frame_fault_name(FrameFault fault) {
  switch (fault) {
    case FrameFault::kNone:
      return "none";
    case FrameFault::kMagic:
      return "magic";
    case FrameFault::kMajor:
      return "major";
    case FrameFault::kCrc:
      return "crc";
    case FrameFault::kFlags:
      return "flags";
    case FrameFault::kMetaLimit:
      return "meta_limit";
    case FrameFault::kPayloadLimit:
      return "payload_limit";
  }
  return "unknown";
}

void encode_frame_header(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> out) {
  std::byte* at = out.data();
  store_le(at, kFrameMagic);
  store_le(at + 4, kFrameMajor);
  store_le(at + 5, header.opcode);
  store_le(at + 6, header.flags);
  store_le(at + 8, header.request_id);
  store_le(at + 16, header.item);
  store_le(at + 20, header.meta_bytes);
  store_le(at + 24, header.payload_bytes);
  store_le(at + kCrcAt, crc32c(out.first(kCrcAt)));
}

FrameFault decode_frame_header(std::span<const std::byte, kFrameHeaderBytes> in, const FrameLimits& limits,
                               FrameHeader& out) {
  const std::byte* at = in.data();
  if (load_le<std::uint32_t>(at) != kFrameMagic) return FrameFault::kMagic;
  if (load_le<std::uint32_t>(at + kCrcAt) != crc32c(in.first(kCrcAt))) return FrameFault::kCrc;
  if (load_le<std::uint8_t>(at + 4) != kFrameMajor) return FrameFault::kMajor;
  const auto flags = load_le<std::uint16_t>(at + 6);
  if ((flags & kFlagsMustBeZero) != 0) return FrameFault::kFlags;
  const auto meta_bytes = load_le<std::uint32_t>(at + 20);
  if (meta_bytes > limits.max_meta_bytes) return FrameFault::kMetaLimit;
  const auto payload_bytes = load_le<std::uint32_t>(at + 24);
  if (payload_bytes > limits.max_fragment_bytes) return FrameFault::kPayloadLimit;
  out.opcode = load_le<std::uint8_t>(at + 5);
  out.flags = flags;
  out.request_id = load_le<std::uint64_t>(at + 8);
  out.item = load_le<std::uint32_t>(at + 16);
  out.meta_bytes = meta_bytes;
  out.payload_bytes = payload_bytes;
  return FrameFault::kNone;
}

}  // namespace dfkv
