// Sending: small frames and PUT streams onto the socket.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <system_error>

#include "net/client_connection.h"

namespace dfkv::client {

namespace {
constexpr std::size_t kRuns = 64;
// What one turn may send before other connections and timers get theirs.
constexpr std::size_t kSendBudgetBytes = 1024 * 1024;
}  // namespace

void Connection::want_writable(bool wanted) {
  if (wanted == writable_wanted_) return;
  writable_wanted_ = wanted;
  io_.loop.modify(fd_.get(), EPOLLIN | (wanted ? EPOLLOUT : 0U));
}

bool Connection::send_some(std::span<iovec> iov, std::size_t& sent) {
  msghdr message{};
  message.msg_iov = iov.data();
  message.msg_iovlen = iov.size();
  std::size_t total = 0;
  for (const auto& run : iov) total += run.iov_len;
  ssize_t result = 0;
  do {
    result = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
  } while (result < 0 && errno == EINTR);
  sent = result > 0 ? static_cast<std::size_t>(result) : 0;
  moved_bytes_ += sent;
  bump(io_.counters.bytes_sent, sent);
  if (result < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
    const int error = errno;
    fail_later(FailureKind::kClosed, "send: " + std::generic_category().message(error));
    return false;
  }
  return sent == total;
}

bool Connection::flush_small() {
  std::array<iovec, kRuns> iov;
  std::size_t used = 0;
  for (auto at = small_.begin(); at != small_.end() && used < iov.size(); ++at) {
    const auto skip = used == 0 ? small_sent_ : 0;
    iov[used++] = {at->data() + skip, at->size() - skip};
  }
  std::size_t sent = 0;
  const bool all = send_some(std::span(iov).first(used), sent);
  while (sent > 0) {
    const auto left = small_.front().size() - small_sent_;
    if (sent < left) {
      small_sent_ += sent;
      break;
    }
    sent -= left;
    small_sent_ = 0;
    small_.pop_front();
  }
  return all;
}

bool Connection::flush_put() {
  const auto request = puts_.front();
  std::array<iovec, kRuns> iov;
  const auto used = request->sender->gather(iov);
  bool all = true;
  if (used > 0) {
    std::size_t sent = 0;
    all = send_some(std::span(iov).first(used), sent);
    request->sender->advance(sent);
  }
  if (request->sender->finished()) {
    puts_.pop_front();
    // The reply may have come before the end of the stream: the node refused the whole batch.
    if (request->state == Request::State::kEnded) finish_request(request->id);
  }
  return all;
}

void Connection::flush() {
  if (state_ != State::kReady && state_ != State::kHandshake) return;
  const auto before = moved_bytes_;
  while (sending() && moved_bytes_ - before < kSendBudgetBytes) {
    const bool in_put = !puts_.empty() && puts_.front()->sender->mid_frame();
    const bool in_small = small_sent_ > 0;
    const bool put = in_put || (small_.empty() && !in_small);
    if (!(put ? flush_put() : flush_small())) break;
  }
  if (state_ != State::kClosed) want_writable(sending());
}

}  // namespace dfkv::client
