#include "net/put_queue.h"

#include <utility>

#include "net/session.h"

namespace dfkv::server {

namespace {
// What frees memory happens on many threads, so that it is asked for again rather than announced.
constexpr std::chrono::milliseconds kAskAgain(1);
}  // namespace

void PutQueue::wait(std::weak_ptr<Session> session) {
  waiting_.push_back(std::move(session));
  if (waiting_.size() == 1) offer_soon();
}

void PutQueue::offer() {
  while (!waiting_.empty()) {
    const auto session = waiting_.front().lock();
    if (session && !session->take_room(Clock::now())) break;
    waiting_.pop_front();
  }
  if (!waiting_.empty()) offer_soon();
}

void PutQueue::offer_soon() {
  loop_.at(Clock::now() + kAskAgain, [this] { offer(); });
}

}  // namespace dfkv::server
