// Result of an operation on one key, or of a whole request. Unknown values are read by their range.
#pragma once

#include <cstdint>
#include <string_view>

namespace dfkv {

enum class Status : std::uint16_t {
  // 0-99: done.
  kOk = 0,
  kAlready = 1,  // PUT: the key is stored; the first complete write stands
  // 100-199: a miss, with its reason.
  kMissNotFound = 100,  // never stored, as far as the node knows
  kMissEvicted = 101,
  kMissCorrupt = 102,  // checksum or key did not match; the object is quarantined
  kMissNamespaceUnknown = 103,
  kMissPartMissing = 104,  // some part the reader needs is absent
  kMissNodeDown = 105,     // set by the client
  kMissDeadline = 106,
  kMissNotTaken = 107,  // set by the reuse policy: not worth it
  kMissLength = 108,    // stored length differs from the one asked for
  kMissCancelled = 109,
  kMissExpired = 110,
  // 200-299: try again later.
  kAgainBusy = 200,      // too many requests in flight
  kAgainNoMemory = 201,  // no slot can be freed now (all pinned or filling)
  kAgainDraining = 202,
  kAgainDisk = 203,  // the disk that holds it, or should, fails or is full
  // 300+: refused; the same request fails again.
  kRefusedUnsupported = 300,
  kRefusedBadRequest = 301,
  kRefusedTooLarge = 302,
  kRefusedOverQuota = 303,
  kRefusedUnauthenticated = 304,
  kRefusedChecksum = 305,   // PUT payload does not match its checksum
  kRefusedAborted = 306,    // PUT item withdrawn by its sender
  kRefusedNamespace = 307,  // descriptor and digest, or tenant, do not match
  kRefusedLimit = 308,      // beyond a negotiated limit
};

enum class StatusRange : std::uint8_t { kDone, kMiss, kAgain, kRefused };

[[nodiscard]] constexpr StatusRange range_of(Status status) {
  const auto value = static_cast<std::uint16_t>(status);
  return value < 100   ? StatusRange::kDone
         : value < 200 ? StatusRange::kMiss
         : value < 300 ? StatusRange::kAgain
                       : StatusRange::kRefused;
}

[[nodiscard]] constexpr bool is_done(Status status) { return range_of(status) == StatusRange::kDone; }

// Stable lower-case name ("ok", "already", "not_found", "evicted", ...), used as the label of metrics.
// Unknown values give "done_other", "miss_other", "again_other", "refused_other".
[[nodiscard]] std::string_view status_name(Status status);

}  // namespace dfkv
