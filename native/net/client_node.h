// One lane to one node: its connections, whether it is to be used, and requests that wait for a connection.
// I/O thread only.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "net/client_address.h"
#include "net/client_connection.h"
#include "net/client_resolve.h"

namespace dfkv::client {

// Milliseconds until attempt number `failures` (from 1) after that many failures in a row.
[[nodiscard]] std::uint32_t reconnect_delay_ms(std::uint32_t failures, std::uint32_t cooldown_ms);

class NodeLink : public Connection::Owner {
 public:
  NodeLink(Io& io, Resolver& resolver, Lane lane, std::string node_id, std::vector<Endpoint> endpoints);
  ~NodeLink() override;

  void start();
  // Sends it, keeps it until there is a connection, or ends it at once when the node is down.
  void submit(std::shared_ptr<Request> request);
  void register_namespace(const std::shared_ptr<const NamespaceBook::Entry>& entry);
  void shut();  // ends what waits and what is in flight; nothing happens after it

  [[nodiscard]] const std::string& node_id() const { return node_id_; }
  [[nodiscard]] const std::vector<Endpoint>& endpoints() const { return endpoints_; }
  [[nodiscard]] std::uint32_t ready_connections() const;
  [[nodiscard]] bool reachable() const { return ready_connections() > 0; }
  [[nodiscard]] bool down() const { return down_; }
  [[nodiscard]] const std::string& last_error() const { return last_error_; }
  [[nodiscard]] bool idle() const;

  void on_ready(Connection& connection) override;
  void on_room(Connection& connection) override;
  void on_failed(Connection& connection, Failure failure) override;

 private:
  struct Slot {
    std::shared_ptr<Connection> connection;  // null between attempts
    EventLoop::TimerId retry_timer = 0;
    std::uint32_t failures = 0;  // in a row
    bool was_ready = false;      // ever
  };
  void connect(std::size_t slot);
  void connect_to(std::size_t slot, const std::vector<SocketAddress>& addresses);
  void retry_later(std::size_t slot, std::uint32_t delay_ms);
  void attempt_failed(std::size_t slot, const std::string& reason);
  void give_back(std::vector<std::shared_ptr<Request>> lost, FailureKind kind);
  void dispatch();
  [[nodiscard]] std::shared_ptr<Connection> pick(const Request& request) const;
  [[nodiscard]] bool split_to_fit(const Connection& connection, const std::shared_ptr<Request>& request);

  Io& io_;
  Resolver& resolver_;
  const Lane lane_;
  const std::string node_id_;
  const std::vector<Endpoint> endpoints_;
  std::size_t next_endpoint_ = 0;
  std::vector<Slot> slots_;
  std::deque<std::shared_ptr<Request>> queue_;
  bool down_ = false;  // the last attempt failed and no connection is ready: keys are a miss at once
  std::string last_error_;
  bool shut_ = false;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // for answers that come late
};

}  // namespace dfkv::client
