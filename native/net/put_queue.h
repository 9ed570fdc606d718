// The PUTs of one reactor that wait for memory, first come first served: their connections are not read
// meanwhile, so that the peers wait instead of sending what would be thrown away.
#pragma once

#include <deque>
#include <memory>

#include "net/event_loop.h"

namespace dfkv::server {

class Session;

// The reactor's thread.
class PutQueue {
 public:
  explicit PutQueue(EventLoop& loop) : loop_(loop) {}
  PutQueue(const PutQueue&) = delete;
  PutQueue& operator=(const PutQueue&) = delete;

  // Whoever comes now has to wait behind others.
  [[nodiscard]] bool busy() const { return !waiting_.empty(); }
  void wait(std::weak_ptr<Session> session);

 private:
  void offer();
  void offer_soon();

  EventLoop& loop_;
  std::deque<std::weak_ptr<Session>> waiting_;
};

}  // namespace dfkv::server
