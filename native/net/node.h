// A cache node: a RAM store, with or without disks behind it, and the server in front of it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "net/server.h"
#include "ram/ram_store.h"

namespace dfkv {

struct NodeOptions {
  server::ServerOptions server;  // incarnation and boot id are made here
  RamStoreOptions store;
};

class Node {
 public:
  // Maps the memory, opens the directories, binds and listens. Throws std::invalid_argument,
  // std::system_error.
  explicit Node(NodeOptions options);
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  void start() { server_.start(); }
  // Closes every connection, then writes to the disks what is not there yet. False: not all of it ended by
  // the deadline; call again. What is dirty at the deadline is lost, as after a crash.
  [[nodiscard]] bool stop(Clock::time_point deadline);
  void publish_view(Bytes view) { server_.publish_view(view); }
  [[nodiscard]] Counters stats() const { return server_.stats(); }
  [[nodiscard]] std::vector<NamespaceInfo> namespaces() const { return store_.list(); }
  [[nodiscard]] std::uint16_t port() const { return server_.port(); }
  [[nodiscard]] std::uint64_t incarnation() const { return server_.options().incarnation; }
  [[nodiscard]] const std::array<std::byte, 16>& boot_id() const { return server_.options().boot_id; }
  [[nodiscard]] const RamStore& store() const { return store_; }

 private:
  RamStore store_;
  server::Server server_;  // after the store: its threads end first
};

}  // namespace dfkv
