// Names to addresses without blocking the I/O thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "net/client_address.h"
#include "net/event_loop.h"

namespace dfkv::client {

// Numeric addresses are answered at once. Names go to threads of their own, a few at most: the system's
// resolver cannot be interrupted, so such a thread owns all it touches and may outlive the resolver by as
// long as the system's own time-out.
class Resolver {
 public:
  using Done = std::function<void(std::vector<SocketAddress>)>;  // on the loop's thread; empty: not found

  explicit Resolver(EventLoop& loop);
  ~Resolver();  // answers still under way are dropped

  void resolve(const Endpoint& endpoint, Done done);  // loop's thread only

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace dfkv::client
