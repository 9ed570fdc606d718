// Plain types shared by the parts of the client.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "wire/frame.h"
#include "wire/identity.h"
#include "wire/meta.h"

namespace dfkv::client {

struct Endpoint {
  std::string host;
  std::uint16_t port = 0;
};

struct Options {
  std::vector<Endpoint> seeds;
  std::string name;
  std::string group;  // that a membership service among the seeds must keep; empty: any
  std::optional<std::vector<std::byte>> secret;
  std::uint32_t connections_per_node = 2;   // bulk lane; the control lane always has one
  std::uint32_t connect_timeout_ms = 1000;  // connect and handshake together
  std::uint32_t cooldown_ms = 500;  // the longest pause between two attempts to reach a node that is down
  std::uint32_t view_poll_ms = 10'000;
  // How long a connection may stand still while it owes the end of a request whose operation is over.
  std::uint32_t stall_timeout_ms = 400;
  std::uint64_t max_inflight_bytes = 1ULL << 30;
  std::uint32_t max_pending_operations = 4096;
  std::vector<std::byte> last_view;  // encoded; taken when no seed answers
  std::string last_view_path;        // where the last view is kept from start to start; empty: nowhere
};

// A run of the caller's memory. Address 0: the bytes are received, verified and thrown away (GET only).
struct Segment {
  std::uint64_t address = 0;
  std::uint64_t length = 0;
};
static_assert(sizeof(Segment) == 16);

enum class Kind : std::uint8_t { kExists, kGet, kPut, kRemove, kErase, kList, kStat, kPing, kSync };
inline constexpr std::size_t kKinds = 9;

[[nodiscard]] constexpr const char* kind_name(Kind kind) {
  constexpr const char* names[kKinds] = {"exists", "get",  "put",  "remove", "erase",
                                         "list",   "stat", "ping", "sync"};
  return names[static_cast<std::size_t>(kind)];
}

[[nodiscard]] constexpr Opcode opcode_of(Kind kind) {
  constexpr Opcode opcodes[kKinds] = {Opcode::kExists, Opcode::kGet,   Opcode::kPut,
                                      Opcode::kRemove, Opcode::kErase, Opcode::kList,
                                      Opcode::kStat,   Opcode::kPing,  Opcode::kSync};
  return opcodes[static_cast<std::size_t>(kind)];
}

// Kinds whose entries are chunks or items. The others ask every node, and have one status per node.
[[nodiscard]] constexpr bool is_keyed(Kind kind) { return kind <= Kind::kRemove; }

// Operations with payload have connections, and a thread, of their own.
[[nodiscard]] constexpr Lane lane_of(Kind kind) {
  return kind == Kind::kGet || kind == Kind::kPut ? Lane::kBulk : Lane::kControl;
}

struct Lease {
  std::string node_id;
  std::uint64_t id = 0;
};

// The largest piece received or sent by one system call: its checksum then runs over bytes that are still in
// cache.
inline constexpr std::size_t kPieceBytes = 256 * 1024;

}  // namespace dfkv::client
