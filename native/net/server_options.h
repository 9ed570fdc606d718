// How a server is set up. Plain values; validated by Server.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "wire/bytes.h"
#include "wire/frame.h"

namespace dfkv::server {

struct ServerOptions {
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;
  std::string node_id;
  std::optional<std::vector<std::byte>> secret;  // clients and node prove to each other that they know it
  bool insecure = false;      // allows an address that other machines reach without a secret
  std::uint32_t threads = 2;  // that move payload; one more serves handshakes and the control lane
  std::uint32_t max_connections = 4096;
  std::uint32_t handshake_timeout_ms = 5000;
  std::uint32_t stall_timeout_ms = 30'000;
  FrameLimits limits;
  // Node-wide, for requests and answers in flight beyond kOwnBytes of each connection; payload has its slots.
  std::size_t max_request_bytes = std::size_t{256} * 1024 * 1024;
  std::uint64_t incarnation = 0;
  std::array<std::byte, 16> boot_id{};
};

// Limits of one connection that are not negotiated.
inline constexpr std::size_t kMaxRequestsInFlight = 256;
inline constexpr std::size_t kMaxTableBytesInFlight = 8 * 1024 * 1024;
inline constexpr std::size_t kOwnBytes =
    64 * 1024;  // of requests and answers, which every connection may hold
inline constexpr std::size_t kMaxLookupsPerRequest = 1 << 20;  // chunks times parts of one EXISTS
inline constexpr std::uint32_t kMinFragmentBytes = 16 * 1024;
inline constexpr std::uint32_t kMinMetaBytes = 4 * 1024;
inline constexpr std::uint32_t kMaxHandshakeMetaBytes = 4 * 1024;
inline constexpr std::uint32_t kMaxSubscribeWait_ms = 60'000;
inline constexpr std::uint32_t kRetryAfter_ms = 20;

// How much is moved at a time.
inline constexpr std::size_t kPieceBytes = 256 * 1024;       // received, then hashed while in cache
inline constexpr std::size_t kReceiveBudgetBytes = 4 << 20;  // before other connections get their turn
inline constexpr std::size_t kSendBudgetBytes = 4 << 20;
inline constexpr std::size_t kSendWindowBytes = 1 << 20;   // queued payload below which more is pinned
inline constexpr std::size_t kSendPieceBytes = 512 << 10;  // by one system call: lookups wait for its end
inline constexpr std::size_t kSendWindowFrames = 64;
inline constexpr std::size_t kReadsAhead = 16;       // items of one GET that are read from disks at once
inline constexpr std::uint64_t kReadAheadShare = 8;  // of the memory, one part in so many, for all of them
inline constexpr std::size_t kPauseReadingBytes = 1 << 20;  // replies that the peer does not take
inline constexpr std::size_t kReadAheadBytes = 16 * 1024;   // on control connections
inline constexpr std::size_t kStepsPerPump = 1024;

}  // namespace dfkv::server
