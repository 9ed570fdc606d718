// What every part of one of the client's I/O threads shares, and what the threads share.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "net/client_counters.h"
#include "net/client_operation.h"
#include "net/client_types.h"
#include "net/event_loop.h"

namespace dfkv::client {

// The namespaces this client registers on each connection. add() and difference(): any thread; the rest: I/O
// thread.
class NamespaceBook {
 public:
  struct Entry {
    NamespaceId id;
    std::vector<std::byte> descriptor;
    std::string label;
  };

  [[nodiscard]] const std::vector<std::shared_ptr<const Entry>>& entries() const { return entries_; }
  [[nodiscard]] std::shared_ptr<const Entry> find(const NamespaceId& id) const;
  bool add(std::shared_ptr<const Entry> entry);  // false: it was there
  void set_difference(const NamespaceId& id, std::vector<std::uint16_t> tags);
  [[nodiscard]] std::optional<std::vector<std::uint16_t>> difference(const NamespaceId& id) const;

 private:
  std::vector<std::shared_ptr<const Entry>> entries_;
  mutable std::mutex mutex_;
  std::map<NamespaceId, std::vector<std::uint16_t>> differences_;
};

// Of one client, all its threads.
struct Common {
  explicit Common(Options opts) : options(std::move(opts)) {}

  const Options options;
  ClientCounters counters;
  const std::shared_ptr<CompletionQueue> completions = std::make_shared<CompletionQueue>();
};

// Of one thread.
struct Io {
  explicit Io(std::shared_ptr<Common> shared)
      : common(std::move(shared)),
        options(common->options),
        counters(common->counters),
        scratch(kPieceBytes) {}
  Io(const Io&) = delete;
  Io& operator=(const Io&) = delete;

  EventLoop loop;
  const std::shared_ptr<Common> common;
  const Options& options;
  ClientCounters& counters;
  NamespaceBook namespaces;
  std::vector<std::byte> scratch;  // where unwanted payload goes
  std::uint64_t next_serial = 1;   // of connections
  // Called on the I/O thread when the last request of an operation has ended.
  std::function<void(std::shared_ptr<Operation>)> complete;
};

}  // namespace dfkv::client
