// Counters of one client. Written by the I/O thread (and by submitting threads), read by any.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "net/client_types.h"
#include "wire/status.h"

namespace dfkv::client {

struct ClientCounters {
  using Counter = std::atomic<std::uint64_t>;

  // Per kind.
  struct PerKind {
    Counter operations{0};
    Counter payload_bytes{0};             // of keys that ended well
    std::array<Counter, 516> statuses{};  // by value below 512, then one per range for what is larger
  };
  std::array<PerKind, kKinds> kinds;

  Counter bytes_received{0}, bytes_sent{0};
  Counter round_trips{0};
  Counter connects{0}, connect_failures{0}, reconnects{0}, disconnects{0};
  Counter cooldowns{0};  // times a lane of a node went out of use
  Counter retries{0}, cancels_sent{0};
  Counter deadline_hits{0}, cancelled{0}, refused_busy{0};
  Counter checksum_failures{0}, length_mismatches{0}, protocol_faults{0}, stalled_connections{0};
  Counter drained_bytes{0};      // payload of abandoned or unwanted items
  Counter user_copied_bytes{0};  // payload that passed through a buffer of the client
  Counter namespaces_registered{0}, namespaces_refused{0};
  Counter views_taken{0}, views_refused{0};
  Counter late_leases_released{0};
  Counter gil_acquisitions{0};                        // by the Python bindings
  Counter gil_held_ns{0};                             // by their calls on batches
  Counter inflight_operations{0}, inflight_bytes{0};  // gauges

  // Everything but the counters per kind, by the name it has in stats().
  [[nodiscard]] std::vector<std::pair<const char*, const Counter*>> named() const {
    return {{"bytes_received", &bytes_received},
            {"bytes_sent", &bytes_sent},
            {"round_trips", &round_trips},
            {"connects", &connects},
            {"connect_failures", &connect_failures},
            {"reconnects", &reconnects},
            {"disconnects", &disconnects},
            {"cooldowns", &cooldowns},
            {"retries", &retries},
            {"cancels_sent", &cancels_sent},
            {"deadline_hits", &deadline_hits},
            {"cancelled", &cancelled},
            {"refused_busy", &refused_busy},
            {"checksum_failures", &checksum_failures},
            {"length_mismatches", &length_mismatches},
            {"protocol_faults", &protocol_faults},
            {"stalled_connections", &stalled_connections},
            {"drained_bytes", &drained_bytes},
            {"user_copied_bytes", &user_copied_bytes},
            {"namespaces_registered", &namespaces_registered},
            {"namespaces_refused", &namespaces_refused},
            {"views_taken", &views_taken},
            {"views_refused", &views_refused},
            {"late_leases_released", &late_leases_released},
            {"gil_acquisitions", &gil_acquisitions},
            {"gil_held_ns", &gil_held_ns},
            {"inflight_operations", &inflight_operations},
            {"inflight_bytes", &inflight_bytes}};
  }

  // The value whose name is that of a slot.
  [[nodiscard]] static Status status_of_slot(std::size_t slot) {
    constexpr std::uint16_t kOthers[] = {99, 199, 299, 0xFFFF};
    return static_cast<Status>(slot < 512 ? slot : kOthers[slot - 512]);
  }
  [[nodiscard]] static std::size_t status_slot(Status status) {
    const auto value = static_cast<std::uint16_t>(status);
    return value < 512 ? value : 512 + static_cast<std::size_t>(range_of(status));
  }
};

inline void bump(ClientCounters::Counter& counter, std::uint64_t by = 1) {
  counter.fetch_add(by, std::memory_order_relaxed);
}
inline void drop(ClientCounters::Counter& counter, std::uint64_t by) {
  counter.fetch_sub(by, std::memory_order_relaxed);
}

}  // namespace dfkv::client
