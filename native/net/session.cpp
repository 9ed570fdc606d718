#include "net/session.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace dfkv::server {

namespace {
constexpr std::chrono::milliseconds kLingerTime(1000);
}  // namespace

Session::Session(SessionContext& context, Fd fd, std::uint64_t id)
    : context_(&context),
      counters_(&context.counters),
      fd_(std::move(fd)),
      id_(id),
      receiver_(fd_.get(), *this),
      limits_(context.options.limits),
      held_(context.budget),
      connected_(Clock::now()),
      last_received_(connected_),
      last_sent_(connected_) {
  receiver_.set_limits(limits_);
}

Session::~Session() = default;

void Session::start() {
  interest_ = EPOLLIN;
  context_->loop.add(fd_.get(), interest_,
                     [self = shared_from_this()](std::uint32_t events) { self->on_event(events); });
}

void Session::move_to(SessionContext& context) {
  context_ = &context;
  counters_ = &context.counters;
  leaving_ = false;
  last_received_ = last_sent_ = Clock::now();
  start();
}

void Session::close() {
  if (stage_ == Stage::kClosed) return;
  stage_ = Stage::kClosed;
  const auto self =
      shared_from_this();  // the loop's handler and the reactor's list may hold the last references
  context_->loop.remove(fd_.get());
  for (auto& [id, request] : requests_) {
    if (auto* subscription = std::get_if<Subscription>(&request)) context_->loop.cancel(subscription->timer);
  }
  put_ = nullptr;
  room_until_.reset();
  requests_.clear();
  gets_.clear();
  out_.clear();
  context_->store.release_owner(id_);
  context_->forget(id_);
  fd_.reset();  // last: when the peer sees the end, nothing of it is left here
}

void Session::on_event(std::uint32_t events) {
  guarded([this, events] {
    if ((events & (EPOLLERR | EPOLLHUP)) != 0) return close();
    if ((events & EPOLLIN) != 0 || std::exchange(resume_reading_, false)) on_readable();
  });
}

void Session::on_readable() {
  if (stage_ == Stage::kLingering) {
    discard_input();
    return;
  }
  arrived_ = Clock::now();
  const ReceiveResult result = receiver_.run(kReceiveBudgetBytes);
  const std::uint64_t received = receiver_.bytes_received();
  if (received != seen_received_) {
    counters_->bytes_in.add(received - seen_received_);
    seen_received_ = received;
    last_received_ = arrived_;
  }
  if (result != ReceiveResult::kEnded) return;
  // A peer without a secret leaves when it is asked for one.
  if (stage_ == Stage::kAuth) counters_->auth_failures.add();
  close();
}

// Queues what can be sent, sends it, and settles which events are wanted next.
void Session::flush() {
  if (stage_ == Stage::kClosed) return;
  const std::uint64_t stop_at = out_.bytes_sent() + kSendBudgetBytes;
  SendResult result = SendResult::kDrained;
  do {
    if (stage_ == Stage::kReady) pump_gets();
    if (out_.empty()) break;
    // The kernel often takes only a part: a full window is offered again and again until it takes nothing.
    result = out_.flush(fd_.get(), kSendWindowBytes);
  } while ((result == SendResult::kDrained || result == SendResult::kBudget) && out_.bytes_sent() < stop_at);
  // All of it went out and the budget is spent: no event will announce that the next items may follow.
  if (result == SendResult::kDrained && out_.bytes_sent() >= stop_at && !gets_.empty()) continue_later();
  const std::uint64_t sent = out_.bytes_sent();
  if (sent != seen_sent_) {
    counters_->bytes_out.add(sent - seen_sent_);
    counters_->payload_bytes_out.add(out_.payload_bytes_sent() - seen_payload_sent_);
    seen_sent_ = sent;
    seen_payload_sent_ = out_.payload_bytes_sent();
    last_sent_ = Clock::now();
  }
  if (result == SendResult::kBroken) {
    close();
    return;
  }
  if (out_.empty() && stage_ == Stage::kLingering) ::shutdown(fd_.get(), SHUT_WR);
  if (stage_ == Stage::kReady) pump_gets();  // what the budget cut short goes on with the next event
  const bool blocked = !out_.empty();
  if (blocked && !write_blocked_) last_sent_ = Clock::now();  // the stall is measured from here
  write_blocked_ = blocked;
  update_interest();
  leave_when_answered();
}

// Nothing may follow a departure: the next event belongs to another thread.
void Session::leave_when_answered() {
  if (!leaving_ || !out_.empty() || continuing_) return;
  context_->loop.remove(fd_.get());
  context_->settle(id_);
}

void Session::update_interest() {
  // A peer that does not take its replies gets no more of them.
  if (out_.owned_bytes() > pause_reading_bytes()) reading_paused_ = true;
  if (out_.owned_bytes() < pause_reading_bytes() / 2 && reading_paused_) {
    reading_paused_ = false;
    last_received_ = Clock::now();
    resume_reading_ = true;
    continue_later();
  }
  const std::uint32_t wanted =
      (reading_paused_ || leaving_ || room_until_ ? 0U : EPOLLIN) | (out_.empty() ? 0U : EPOLLOUT);
  if (wanted == interest_) return;
  interest_ = wanted;
  context_->loop.modify(fd_.get(), wanted);
}

void Session::continue_later() {
  if (continuing_) return;
  continuing_ = true;
  context_->loop.post([weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    self->continuing_ = false;
    self->on_event(0);
  });
}

// The last answer goes out, then the peer has a moment to read it: closing with input unread would reset the
// connection and take the answer away.
void Session::linger() {
  stage_ = Stage::kLingering;
  context_->loop.at(Clock::now() + kLingerTime, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->close();
  });
}

void Session::discard_input() {
  while (true) {
    const ssize_t count = ::recv(fd_.get(), context_->scratch.data(), context_->scratch.size(), 0);
    if (count > 0) {
      counters_->bytes_in.add(static_cast<std::uint64_t>(count));
      return;
    }
    if (count < 0 && errno == EINTR) continue;
    if (count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) close();
    return;
  }
}

void Session::check_deadlines(Clock::time_point now) {
  const auto handshake_timeout = std::chrono::milliseconds(context_->options.handshake_timeout_ms);
  const auto stall_timeout = std::chrono::milliseconds(context_->options.stall_timeout_ms);
  if (stage_ == Stage::kHello || stage_ == Stage::kAuth) {
    if (now - connected_ < handshake_timeout) return;
    counters_->handshake_timeouts.add();
    close();
    return;
  }
  if (stage_ != Stage::kReady) return;
  const bool owes_bytes = receiver_.in_frame() || open_puts_ > 0;
  const auto receiving_stalled = [&] {
    return owes_bytes && !reading_paused_ && !room_until_ && now - last_received_ >= stall_timeout;
  };
  if (receiving_stalled() && receiver_.may_have_more()) {
    guarded([this] { on_readable(); });
    if (stage_ == Stage::kClosed) return;
  }
  const bool sending_stalled = write_blocked_ && now - last_sent_ >= stall_timeout;
  if (!sending_stalled && !receiving_stalled()) return;
  counters_->stalls.add();
  close();
}

bool Session::protocol_fault() {
  counters_->protocol_faults.add();
  close();
  return false;
}

void Session::reply(std::uint8_t opcode, std::uint64_t request_id, const ReplyMeta& meta, Bytes payload,
                    bool error) {
  std::vector<std::byte> frame;
  frame.reserve(kFrameHeaderBytes + 64 + payload.size());
  frame.resize(kFrameHeaderBytes);
  encode_reply(meta, frame);
  FrameHeader header;
  header.opcode = opcode;
  header.flags = kFlagReply | kFlagEndOfRequest | (error ? kFlagError : 0);
  header.request_id = request_id;
  header.meta_bytes = static_cast<std::uint32_t>(frame.size() - kFrameHeaderBytes);
  header.payload_bytes = static_cast<std::uint32_t>(payload.size());
  frame.insert(frame.end(), payload.begin(), payload.end());
  encode_frame_header(header, std::span<std::byte, kFrameHeaderBytes>(frame.data(), kFrameHeaderBytes));
  out_.push(std::move(frame));
}

void Session::reply(const FrameHeader& to, const ReplyMeta& meta, Bytes payload, bool error) {
  reply(to.opcode, to.request_id, meta, payload, error);
}

void Session::refuse(const FrameHeader& to, Status status, std::string_view reason) {
  ReplyMeta meta;
  meta.status = status;
  meta.reason = reason;
  if (range_of(status) == StatusRange::kAgain) meta.retry_after_ms = kRetryAfter_ms;
  reply(to, meta, {}, true);
}

std::optional<Clock::time_point> Session::deadline_of(const RequestMeta& meta) const {
  if (meta.deadline_us == 0) return std::nullopt;
  constexpr std::uint64_t kDay_us = 86'400'000'000;
  return arrived_ + std::chrono::microseconds(std::min(meta.deadline_us, kDay_us));
}

// Answers that nobody takes are memory too: with little of it left there are fewer of them.
std::size_t Session::pause_reading_bytes() const {
  return held_.budget_is_short() ? kOwnBytes : kPauseReadingBytes;
}

bool Session::has_room() const {
  return requests_.size() < kMaxRequestsInFlight && table_bytes_ < kMaxTableBytesInFlight;
}

}  // namespace dfkv::server
