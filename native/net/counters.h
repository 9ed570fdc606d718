// What the server counts. One set per reactor, written by its thread alone and read by any: no shared cache
// lines on the hot path. The names that stats() gives them are in counters.cpp.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "wire/frame.h"
#include "wire/payloads.h"
#include "wire/status.h"

namespace dfkv {

class Counter {
 public:
  void add(std::uint64_t count = 1) {
    // Single writer: a plain load and store is enough, and cheaper than a locked addition.
    value_.store(value_.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

// Operations whose items are counted by status.
enum class ItemOp : std::uint8_t { kExists, kGet, kPut, kRemove };
inline constexpr std::size_t kItemOps = 4;
inline constexpr std::size_t kStatusSlots = 32;  // known statuses, then one for the rest

struct ServerCounters {
  static constexpr std::size_t kOpcodes = 20;  // by number; the last is every unknown one

  std::array<Counter, kOpcodes> requests;
  std::array<std::array<Counter, kStatusSlots>, kItemOps> items;
  std::array<Counter, 8> frame_faults;  // by FrameFault
  Counter meta_faults;                  // meta that could not be read: the request is refused
  Counter protocol_faults;              // frames that make no sense here: the connection closes
  Counter bytes_in, bytes_out;
  Counter payload_bytes_in, payload_bytes_out;
  Counter payload_copied_bytes;   // payload copied in user space; 0 on bulk connections
  Counter payload_drained_bytes;  // payload received and thrown away
  Counter connections_total, connections_refused;
  Counter connections_shed;  // not introduced yet, closed to make room for newer ones
  Counter handshake_failures, auth_failures, handshake_timeouts, stalls;
  Counter requests_busy;          // refused: too many in flight
  Counter put_waits;              // objects that waited for memory
  Counter queue_us, queue_waits;  // time between the arrival of a GET and its first item
  Counter cancelled;              // requests ended by CANCEL

  void count_request(std::uint8_t opcode) { requests[opcode < kOpcodes - 1 ? opcode : kOpcodes - 1].add(); }
  void count_item(ItemOp op, Status status) {
    items[static_cast<std::size_t>(op)][status_slot(status)].add();
  }
  void count_fault(FrameFault fault) { frame_faults[static_cast<std::size_t>(fault)].add(); }

  [[nodiscard]] static std::size_t status_slot(Status status);
};

// Appends the sum of all sets under their names.
void append_counters(const std::vector<const ServerCounters*>& sets, Counters& out);

}  // namespace dfkv
