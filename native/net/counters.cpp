#include "net/counters.h"

#include <string>

namespace dfkv {

namespace {

constexpr std::array kStatuses{
    Status::kOk,
    Status::kAlready,
    Status::kMissNotFound,
    Status::kMissEvicted,
    Status::kMissCorrupt,
    Status::kMissNamespaceUnknown,
    Status::kMissPartMissing,
    Status::kMissDeadline,
    Status::kMissLength,
    Status::kMissCancelled,
    Status::kMissExpired,
    Status::kAgainBusy,
    Status::kAgainNoMemory,
    Status::kAgainDraining,
    Status::kAgainDisk,
    Status::kRefusedUnsupported,
    Status::kRefusedBadRequest,
    Status::kRefusedTooLarge,
    Status::kRefusedOverQuota,
    Status::kRefusedChecksum,
    Status::kRefusedAborted,
    Status::kRefusedNamespace,
    Status::kRefusedLimit,
};
static_assert(kStatuses.size() < kStatusSlots);

constexpr std::array<const char*, ServerCounters::kOpcodes> kOpcodeNames{
    nullptr,   "hello",  "auth",        "ping",     "put_ns",    "exists", "get",
    "put",     "remove", "erase",       "list",     "stat",      "sync",   "lease",
    "release", "cancel", "open_region", "prefetch", "subscribe", "unknown"};

constexpr std::array<const char*, kItemOps> kItemOpNames{"exists", "get", "put", "remove"};

using Sets = std::vector<const ServerCounters*>;

template <typename Get>
std::uint64_t sum(const Sets& sets, Get&& get) {
  std::uint64_t total = 0;
  for (const ServerCounters* set : sets) total += get(*set).get();
  return total;
}

}  // namespace

std::size_t ServerCounters::status_slot(Status status) {
  for (std::size_t i = 0; i < kStatuses.size(); ++i) {
    if (kStatuses[i] == status) return i;
  }
  return kStatusSlots - 1;
}

void append_counters(const Sets& sets, Counters& out) {
  const auto plain = [&](const char* name, Counter ServerCounters::*member) {
    out.emplace_back(
        name, sum(sets, [member](const ServerCounters& set) -> const Counter& { return set.*member; }));
  };
  for (std::size_t i = 1; i < kOpcodeNames.size(); ++i) {
    out.emplace_back(std::string("requests_") + kOpcodeNames[i],
                     sum(sets, [i](const ServerCounters& set) -> const Counter& { return set.requests[i]; }));
  }
  for (std::size_t op = 0; op < kItemOps; ++op) {
    const auto of = [&](std::size_t slot) {
      return sum(sets,
                 [op, slot](const ServerCounters& set) -> const Counter& { return set.items[op][slot]; });
    };
    const std::string prefix = std::string("items_") + kItemOpNames[op] + "_";
    for (std::size_t i = 0; i < kStatuses.size(); ++i)
      out.emplace_back(prefix + std::string(status_name(kStatuses[i])), of(i));
    out.emplace_back(prefix + "other", of(kStatusSlots - 1));
  }
  for (std::size_t i = 1; i <= static_cast<std::size_t>(FrameFault::kPayloadLimit); ++i) {
    out.emplace_back(
        std::string("frame_faults_") + frame_fault_name(static_cast<FrameFault>(i)),
        sum(sets, [i](const ServerCounters& set) -> const Counter& { return set.frame_faults[i]; }));
  }
  plain("meta_faults", &ServerCounters::meta_faults);
  plain("protocol_faults", &ServerCounters::protocol_faults);
  plain("bytes_in", &ServerCounters::bytes_in);
  plain("bytes_out", &ServerCounters::bytes_out);
  plain("payload_bytes_in", &ServerCounters::payload_bytes_in);
  plain("payload_bytes_out", &ServerCounters::payload_bytes_out);
  plain("payload_copied_bytes", &ServerCounters::payload_copied_bytes);
  plain("payload_drained_bytes", &ServerCounters::payload_drained_bytes);
  plain("connections_total", &ServerCounters::connections_total);
  plain("connections_refused", &ServerCounters::connections_refused);
  plain("connections_shed", &ServerCounters::connections_shed);
  plain("handshake_failures", &ServerCounters::handshake_failures);
  plain("auth_failures", &ServerCounters::auth_failures);
  plain("handshake_timeouts", &ServerCounters::handshake_timeouts);
  plain("stalls", &ServerCounters::stalls);
  plain("requests_busy", &ServerCounters::requests_busy);
  plain("put_waits", &ServerCounters::put_waits);
  plain("queue_us", &ServerCounters::queue_us);
  plain("queue_waits", &ServerCounters::queue_waits);
  plain("cancelled", &ServerCounters::cancelled);
}

}  // namespace dfkv
