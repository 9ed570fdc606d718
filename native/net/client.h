// The native client: connections to the cache nodes, driven by one I/O thread for lookups and other small
// operations and one for payload. Methods may be called from any thread.
#pragma once

#include <sys/types.h>

#include <array>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "net/client_core.h"

namespace dfkv::client {

struct NodeReport {
  std::string node_id;
  std::string address;
  bool control_down = false;
  bool bulk_down = false;
  std::uint32_t connections = 0;
  std::string last_error;
};

class Client {
 public:
  // Starts the threads and connects in the background. Throws std::invalid_argument for options that cannot
  // be, and std::system_error when the machine has no thread or descriptor left.
  explicit Client(Options options);
  ~Client();  // close()
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Every operation ends (unfinished keys are cancelled) and the threads are joined. Idempotent. They never
  // block, so this takes as long as their current turn. False: one did not end in time (the machine is
  // out of breath); another close() waits again.
  bool close(std::chrono::nanoseconds timeout = std::chrono::seconds(10));
  [[nodiscard]] bool wait_ready(std::chrono::nanoseconds timeout);
  // Throws std::invalid_argument when the descriptor is not canonical.
  NamespaceId add_namespace(std::vector<std::byte> descriptor, std::string label);
  [[nodiscard]] std::optional<std::vector<std::uint16_t>> namespace_difference(const NamespaceId& id);
  // Throws std::invalid_argument when the input does not fit together, std::runtime_error when closed. The
  // segments are read or written until the operation is done.
  [[nodiscard]] std::shared_ptr<Operation> submit(Input input, std::chrono::nanoseconds deadline);
  // The same, and waits for its end so long: sooner over than submit() and Operation::wait() are, for
  // requests without payload.
  [[nodiscard]] std::shared_ptr<Operation> ask(Input input, std::chrono::nanoseconds deadline,
                                               std::chrono::nanoseconds wait);
  void release(std::vector<Lease> leases);

  [[nodiscard]] std::vector<std::byte> encoded_view() const;
  [[nodiscard]] std::vector<NodeReport> report() const;
  [[nodiscard]] ClientCounters& counters() { return common_->counters; }
  [[nodiscard]] const std::shared_ptr<CompletionQueue>& completions() const { return common_->completions; }

  // The process that made the client; a forked child has its memory but not its thread.
  [[nodiscard]] bool in_own_process() const;
  // Throws std::runtime_error in a forked child.
  void check_process() const;

 private:
  struct Worker {
    std::shared_ptr<Core> core;
    std::thread thread;
  };
  void end();
  [[nodiscard]] Core& core_for(Lane lane) const { return *(*workers_)[static_cast<std::size_t>(lane)].core; }

  const pid_t pid_;
  std::shared_ptr<Common> common_;
  std::unique_ptr<std::array<Worker, 2>> workers_;  // by lane
  std::mutex close_mutex_;
};

}  // namespace dfkv::client
