// The TCP server: accepts connections, spreads them over its reactors, drives a Store.
//
// The first reactor is the lobby: the listener, handshakes and the control lane, whose requests are small.
// The others, as many as options.threads, move payload. A lookup thus never waits for the megabytes of a GET.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "net/reactor.h"
#include "net/server_options.h"
#include "net/socket.h"
#include "net/view_board.h"
#include "slab/store.h"

namespace dfkv::server {

class Server {
 public:
  // Binds and listens, so that the port is known; nothing is accepted before start(). The store must outlive
  // the server. Throws std::invalid_argument for options out of range and for an address that others reach
  // without a secret, std::system_error when the address cannot be had.
  Server(Store& store, ServerOptions options);
  ~Server();  // waits for the end of its threads
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Once. Throws std::logic_error when it ran before.
  void start();
  // Stops listening, closes every connection, joins the threads. False: not all of them ended by the
  // deadline; call again. Idempotent, any thread.
  [[nodiscard]] bool stop(Clock::time_point deadline);

  // Any thread. Throws std::invalid_argument when the bytes are no view.
  void publish_view(Bytes view);
  // Counters and gauges of server and store.
  [[nodiscard]] Counters stats() const;
  [[nodiscard]] std::uint16_t port() const { return listener_.port; }
  [[nodiscard]] const ServerOptions& options() const { return options_; }

 private:
  enum class Stage : std::uint8_t { kNew, kRunning, kStopping, kStopped };

  void on_listener();
  void resume_listener();
  bool make_room(std::size_t connections);
  void tick();

  Store& store_;
  const ServerOptions options_;
  Listener listener_;
  ViewBoard views_;
  RequestBudget budget_;
  RequestBudget reads_ahead_;
  std::atomic<std::uint32_t> open_{0};
  std::uint64_t next_id_ = 1;     // reactor 0's thread only
  std::size_t next_reactor_ = 1;  // reactor 0's thread only: who takes the next bulk session
  std::vector<std::unique_ptr<Reactor>> reactors_;
  std::mutex mutex_;  // start and stop
  Stage stage_ = Stage::kNew;
};

}  // namespace dfkv::server
