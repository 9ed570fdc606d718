// Receiving: frames off the socket, GET payload straight into the caller's segments.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "net/client_connection.h"

namespace dfkv::client {

namespace {
constexpr std::size_t kRuns = 64;
constexpr std::size_t kControlBufferBytes = 64 * 1024;
constexpr std::size_t kBulkBufferBytes = 4096;
// On the bulk lane little is read ahead: what comes after a header is payload, which shall not be copied
// twice.
constexpr std::size_t kBulkReadAheadBytes = 128;
// What one turn may receive before other connections and timers get theirs.
constexpr std::size_t kReceiveBudgetBytes = 1024 * 1024;
}  // namespace

bool Connection::receive(std::span<iovec> iov, std::size_t& got) {
  msghdr message{};
  message.msg_iov = iov.data();
  message.msg_iovlen = iov.size();
  ssize_t result = 0;
  do {
    result = ::recvmsg(fd_.get(), &message, 0);
  } while (result < 0 && errno == EINTR);
  got = 0;
  if (result > 0) {
    got = static_cast<std::size_t>(result);
    moved_bytes_ += got;
    received_bytes_ += got;
    bump(io_.counters.bytes_received, got);
    return true;
  }
  if (result == 0) {
    fail(FailureKind::kClosed, "the node closed the connection");
  } else if (errno != EAGAIN && errno != EWOULDBLOCK) {
    const int error = errno;
    fail(FailureKind::kClosed, "receive: " + std::generic_category().message(error));
  }
  return false;
}

void Connection::on_readable() {
  receive_some();
  if (state_ != State::kClosed) mark_.set(fd_.get(), in_frame_ ? payload_left_ : 1);
}

void Connection::receive_some() {
  const auto before = moved_bytes_;
  for (;;) {
    // First what is in the buffer.
    while (state_ != State::kClosed && buffer_begin_ < buffer_end_) {
      if (in_frame_) {
        take_buffered_payload();
      } else if (!take_head()) {
        break;
      }
    }
    if (state_ == State::kClosed || moved_bytes_ - before >= kReceiveBudgetBytes) return;
    std::size_t got = 0;
    std::size_t asked = 0;
    const bool any = in_frame_ ? receive_payload(got, asked) : receive_head(got, asked);
    if (!any || state_ == State::kClosed) return;
    // A short read has emptied the socket: epoll tells when there is more.
    if (got < asked && buffer_begin_ == buffer_end_) return;
  }
}

bool Connection::receive_head(std::size_t& got, std::size_t& asked) {
  if (buffer_.empty()) buffer_.resize(lane_ == Lane::kBulk ? kBulkBufferBytes : kControlBufferBytes);
  if (buffer_begin_ == buffer_end_) {
    buffer_begin_ = buffer_end_ = 0;
  } else if (buffer_begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + buffer_begin_, buffer_end_ - buffer_begin_);
    buffer_end_ -= buffer_begin_;
    buffer_begin_ = 0;
  }
  // A large meta does not fit: its size was checked against the limit when its header was read.
  const std::size_t needed = kFrameHeaderBytes + frame_.meta_bytes;
  if (buffer_end_ >= kFrameHeaderBytes && buffer_.size() < needed) buffer_.resize(needed);
  asked = buffer_.size() - buffer_end_;
  if (lane_ == Lane::kBulk && buffer_end_ < kFrameHeaderBytes) asked = std::min(asked, kBulkReadAheadBytes);
  iovec iov{buffer_.data() + buffer_end_, asked};
  if (!receive({&iov, 1}, got)) return false;
  buffer_end_ += got;
  return true;
}

bool Connection::take_head() {
  const std::size_t available = buffer_end_ - buffer_begin_;
  if (available < kFrameHeaderBytes) {
    frame_ = {};
    return false;
  }
  const std::byte* at = buffer_.data() + buffer_begin_;
  const FrameLimits limits = state_ == State::kReady ? this->limits() : FrameLimits{};
  const auto fault = decode_frame_header(std::span<const std::byte, kFrameHeaderBytes>(at, kFrameHeaderBytes),
                                         limits, frame_);
  if (fault != FrameFault::kNone) {
    fail(FailureKind::kProtocol, std::string("a frame header is wrong: ") + frame_fault_name(fault));
    return false;
  }
  if (available < kFrameHeaderBytes + frame_.meta_bytes) return false;
  buffer_begin_ += kFrameHeaderBytes + frame_.meta_bytes;
  if (!open_frame(frame_, {at + kFrameHeaderBytes, frame_.meta_bytes})) return false;
  payload_left_ = frame_.payload_bytes;
  in_frame_ = true;
  if (payload_left_ == 0) close_frame();
  return state_ != State::kClosed;
}

bool Connection::open_frame(const FrameHeader& header, Bytes meta) {
  sink_ = Sink::kNone;
  if (state_ == State::kHandshake) {
    std::vector<std::byte> answer;
    const auto step = handshake_.take(header, meta, answer);
    if (step == Handshake::Step::kRefused) {
      fail(FailureKind::kProtocol, handshake_.error());
      return false;
    }
    if (!answer.empty()) small_.push_back(std::move(answer));
    if (step == Handshake::Step::kDone) become_ready();
    if (state_ != State::kClosed) flush();
    return state_ != State::kClosed;
  }
  const auto it = inflight_.find(header.request_id);
  if (!header.is_reply() || it == inflight_.end() ||
      header.opcode != static_cast<std::uint8_t>(it->second->opcode) ||
      it->second->state == Request::State::kEnded) {
    fail(FailureKind::kProtocol, "a frame answers no request in flight (opcode " +
                                     std::to_string(header.opcode) + ", request " +
                                     std::to_string(header.request_id) + ")");
    return false;
  }
  current_ = it->second;
  if (header.item == kWholeRequest) return open_reply(header, meta);
  if (!current_->receiver || header.end_of_request() || header.is_error() ||
      !current_->receiver->begin_fragment(header, meta)) {
    fail(FailureKind::kProtocol, "a fragment of item " + std::to_string(header.item) + " is out of place");
    return false;
  }
  sink_ = Sink::kItem;
  return true;
}

bool Connection::open_reply(const FrameHeader& header, Bytes meta) {
  reply_ = {};
  const auto fault = decode_reply(meta, reply_);
  if (!header.end_of_request() || fault != MetaFault::kNone || !fits_reply(*current_, header.payload_bytes)) {
    fail(FailureKind::kProtocol, "the final frame of a request is malformed");
    return false;
  }
  collected_.clear();
  // fits_reply() and the negotiated fragment bound this.
  sink_ = current_->detached ? Sink::kDrain : Sink::kCollect;
  if (sink_ == Sink::kCollect) collected_.reserve(header.payload_bytes);
  return true;
}

std::size_t Connection::gather_payload(std::size_t limit, std::span<iovec> iov, std::size_t& bytes) {
  const auto most = std::min({payload_left_, limit, kPieceBytes});
  if (sink_ == Sink::kItem) return current_->receiver->gather(most, io_.scratch, iov, bytes);
  // Small replies: through the scratch buffer.
  iov[0] = {io_.scratch.data(), most};
  bytes = most;
  return 1;
}

void Connection::payload_arrived(std::span<const iovec> iov, std::size_t bytes) {
  payload_left_ -= bytes;
  if (sink_ == Sink::kItem) {
    current_->receiver->advance(iov, bytes);
  } else if (sink_ == Sink::kCollect) {
    const auto* from = static_cast<const std::byte*>(iov[0].iov_base);
    collected_.insert(collected_.end(), from, from + bytes);
  }
  if (payload_left_ == 0) close_frame();
}

void Connection::take_buffered_payload() {
  std::array<iovec, kRuns> iov;
  std::size_t bytes = 0;
  const auto runs = gather_payload(buffer_end_ - buffer_begin_, iov, bytes);
  for (std::size_t i = 0; i < runs; ++i) {
    std::memcpy(iov[i].iov_base, buffer_.data() + buffer_begin_, iov[i].iov_len);
    buffer_begin_ += iov[i].iov_len;
  }
  if (sink_ == Sink::kItem) bump(io_.counters.user_copied_bytes, bytes);
  payload_arrived(std::span(iov).first(runs), bytes);
}

bool Connection::receive_payload(std::size_t& got, std::size_t& asked) {
  std::array<iovec, kRuns + 1> iov;
  auto runs = gather_payload(kPieceBytes, std::span(iov).first(kRuns), asked);
  const std::size_t payload = asked;
  // Together with the end of a payload comes the next header.
  if (payload == payload_left_) {
    if (buffer_.empty()) buffer_.resize(lane_ == Lane::kBulk ? kBulkBufferBytes : kControlBufferBytes);
    buffer_begin_ = buffer_end_ = 0;
    iov[runs] = {buffer_.data(), kBulkReadAheadBytes};
    asked += kBulkReadAheadBytes;
    ++runs;
  }
  if (!receive(std::span(iov).first(runs), got)) return false;
  const auto taken = std::min(got, payload);
  buffer_end_ += got - taken;
  payload_arrived(std::span(iov).first(runs), taken);
  return true;
}

void Connection::close_frame() {
  in_frame_ = false;
  const auto request = std::move(current_);
  current_.reset();
  if (sink_ == Sink::kItem) {
    if (!request->receiver->end_fragment())
      fail(FailureKind::kProtocol, "an item ended before all of it had come");
    return;
  }
  if (sink_ == Sink::kNone) return;
  ++replies_;
  const bool late_lease = request->detached && reply_.lease_id != 0;
  const auto reply = std::move(reply_);
  // A PUT may be refused before all of it is sent: what is left is withdrawn, and its memory let go before
  // the operation ends. It keeps its id until the end of its stream.
  const bool sending = request->sender && !request->sender->finished();
  if (sending) request->sender->withdraw();
  repair_namespace(*request, reply.status, collected_);
  take_reply(io_, *request, frame_.is_error(), reply, collected_);
  if (late_lease) release_late_lease(reply.lease_id);
  if (sending) {
    flush();
  } else {
    finish_request(request->id);
  }
}

}  // namespace dfkv::client
