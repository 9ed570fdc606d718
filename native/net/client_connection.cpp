#include "net/client_connection.h"

#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace dfkv::client {

namespace {

using std::chrono::milliseconds;

// Leases go with a control connection: it is given up less easily.
constexpr std::uint32_t kControlStallFactor = 3;
// Moving is not enough: after this many stall times an abandoned request must have ended.
constexpr std::uint32_t kAbandonedFactor = 5;
constexpr milliseconds kUsefulAfter{1000};
constexpr milliseconds kRepairInterval{100};
// A peer whose machine vanished is given up after this, whatever the deadlines of the operations.
constexpr unsigned kUserTimeoutMs = 10'000;

void set_option(int fd, int level, int name, int value) {
  ::setsockopt(fd, level, name, &value, sizeof value);
}

std::string describe(const char* what, int error) {
  return std::string(what) + ": " + std::generic_category().message(error);
}

}  // namespace

Connection::Connection(Io& io, Owner& owner, Lane lane, std::string expected_node_id)
    : io_(io),
      owner_(owner),
      lane_(lane),
      serial_(io.next_serial++),
      handshake_(io.options, lane, std::move(expected_node_id)) {}

Connection::~Connection() { close(); }

void Connection::start(const SocketAddress& address) {
  state_ = State::kConnecting;
  handshake_timer_ = io_.loop.at(Clock::now() + milliseconds(io_.options.connect_timeout_ms), [this] {
    handshake_timer_ = 0;
    fail(FailureKind::kUnreachable, state_ == State::kConnecting ? "no answer to connect in time"
                                                                 : "the handshake was not over in time");
  });
  fd_ = Fd(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd_) return fail_later(FailureKind::kUnreachable, describe("socket", errno));
  set_option(fd_.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd_.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMs);
  set_option(fd_.get(), SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd_.get(), IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set_option(fd_.get(), IPPROTO_TCP, TCP_KEEPINTVL, 2);
  set_option(fd_.get(), IPPROTO_TCP, TCP_KEEPCNT, 3);
  const auto* to = reinterpret_cast<const sockaddr*>(&address.storage);
  if (::connect(fd_.get(), to, address.size) != 0 && errno != EINPROGRESS) {
    return fail_later(FailureKind::kUnreachable, describe("connect", errno));
  }
  try {
    io_.loop.add(
        fd_.get(), EPOLLIN | EPOLLOUT,
        [self = shared_from_this()](std::uint32_t events) { self->on_events(events); },
        lane_ == Lane::kControl ? EventLoop::For::kGuestsToo : EventLoop::For::kLoop);
  } catch (const std::system_error& error) {
    return fail_later(FailureKind::kUnreachable, error.what());
  }
  writable_wanted_ = true;
}

void Connection::release_socket() {
  if (fd_) {
    io_.loop.remove(fd_.get());
    // A forked child may hold a copy of the descriptor: the peer shall see the end all the same.
    ::shutdown(fd_.get(), SHUT_RDWR);
    fd_.reset();
  }
  if (handshake_timer_ != 0) io_.loop.cancel(std::exchange(handshake_timer_, 0));
  if (progress_timer_ != 0) io_.loop.cancel(std::exchange(progress_timer_, 0));
}

void Connection::close() {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  release_socket();
  inflight_.clear();
  puts_.clear();
  small_.clear();
  current_.reset();
}

std::vector<std::shared_ptr<Request>> Connection::take_requests() {
  std::vector<std::shared_ptr<Request>> requests;
  for (auto& [id, request] : inflight_) {
    // An item that was left half-way is void; a second try begins it anew.
    request->receiver.reset();
    request->sender.reset();
    requests.push_back(std::move(request));
  }
  inflight_.clear();
  puts_.clear();
  return requests;
}

void Connection::fail(FailureKind kind, std::string reason) {
  if (state_ == State::kClosed) return;
  const auto self = shared_from_this();
  Failure failure;
  failure.kind = state_ == State::kReady ? kind : FailureKind::kUnreachable;
  failure.reason = std::move(reason);
  failure.was_useful = state_ == State::kReady && kind != FailureKind::kProtocol &&
                       (replies_ > 0 || Clock::now() - ready_since_ >= kUsefulAfter);
  bump(failure.kind == FailureKind::kUnreachable ? io_.counters.connect_failures : io_.counters.disconnects);
  if (kind == FailureKind::kProtocol) bump(io_.counters.protocol_faults);
  if (kind == FailureKind::kStalled) bump(io_.counters.stalled_connections);
  failure.lost = take_requests();
  close();
  owner_.on_failed(*this, std::move(failure));
}

void Connection::fail_later(FailureKind kind, std::string reason) {
  io_.loop.post([self = shared_from_this(), kind, reason = std::move(reason)] { self->fail(kind, reason); });
}

void Connection::on_events(std::uint32_t events) {
  const auto self = shared_from_this();
  if (state_ == State::kConnecting) {
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return fail(FailureKind::kUnreachable, describe("connect", error));
    if ((events & EPOLLOUT) == 0) return;
    on_connected();
    return;
  }
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) on_readable();
  if (state_ != State::kClosed && (events & EPOLLOUT) != 0) flush();
}

void Connection::on_connected() {
  state_ = State::kHandshake;
  std::vector<std::byte> hello;
  try {
    handshake_.start(hello);
  } catch (const std::exception& error) {
    return fail(FailureKind::kUnreachable, error.what());
  }
  small_.push_back(std::move(hello));
  flush();
}

void Connection::become_ready() {
  io_.loop.cancel(std::exchange(handshake_timer_, 0));
  state_ = State::kReady;
  ready_since_ = Clock::now();
  bump(io_.counters.connects);
  owner_.on_ready(*this);
}

void Connection::register_namespace(const std::shared_ptr<const NamespaceBook::Entry>& entry) {
  auto request = std::make_shared<Request>();
  request->opcode = Opcode::kPutNs;
  request->meta.ns = entry->id;
  request->meta.descriptor = entry->descriptor;
  request->meta.label = entry->label;
  request->ended = [&io = io_, entry](Request&, Status status, const ReplyMeta* reply, Bytes) {
    if (reply == nullptr) return;
    bump(is_done(status) ? io.counters.namespaces_registered : io.counters.namespaces_refused);
    if (is_done(status)) io.namespaces.set_difference(entry->id, reply->nearest_differs_in);
  };
  send(std::move(request));
}

void Connection::repair_namespace(const Request& request, Status status, Bytes statuses) {
  if (request.keys.empty() || !request.meta.ns) return;
  if (!statuses.empty()) status = static_cast<Status>(load_le<std::uint16_t>(statuses.data()));
  if (status != Status::kMissNamespaceUnknown) return;
  const auto now = Clock::now();
  if (now - repaired_at_ < kRepairInterval) return;  // one answer for all requests that met this
  repaired_at_ = now;
  if (const auto entry = io_.namespaces.find(*request.meta.ns)) register_namespace(entry);
}

void Connection::release_late_lease(std::uint64_t lease_id) {
  bump(io_.counters.late_leases_released);
  auto request = std::make_shared<Request>();
  request->opcode = Opcode::kRelease;
  request->meta.lease_id = lease_id;
  send(std::move(request));
}

void Connection::send(std::shared_ptr<Request> request) {
  const auto id = next_id_++;
  request->id = id;
  request->state = Request::State::kInFlight;
  request->connection = weak_from_this();
  outstanding_bytes_ += request->payload_bytes;
  std::vector<std::byte> frame;
  encode_request_frame(*request, id, frame);
  if (request->opcode == Opcode::kPut) {
    const auto fragment = limits().max_fragment_bytes;
    request->sender = std::make_unique<PutSender>(request->op, request->keys, id, std::move(frame), fragment);
    puts_.push_back(request);
  } else {
    if (request->opcode == Opcode::kGet) {
      request->receiver = std::make_unique<GetReceiver>(request->op, request->keys, io_.counters);
    }
    small_.push_back(std::move(frame));
  }
  inflight_.emplace(id, std::move(request));
  flush();
}

void Connection::finish_request(std::uint64_t id) {
  const auto it = inflight_.find(id);
  if (it == inflight_.end()) return;
  outstanding_bytes_ -= it->second->payload_bytes;
  inflight_.erase(it);
  if (state_ == State::kReady) owner_.on_room(*this);
}

void Connection::abandon(const std::shared_ptr<Request>& request) {
  if (state_ != State::kReady || !inflight_.contains(request->id)) return;
  if (request->sender && !request->sender->started()) {
    // The node has not heard of it.
    puts_.erase(std::find(puts_.begin(), puts_.end(), request));
    finish_request(request->id);
    return;
  }
  Request cancel;
  cancel.opcode = Opcode::kCancel;
  cancel.meta.target_request = request->id;
  std::vector<std::byte> frame;
  encode_request_frame(cancel, next_id_++, frame);
  bump(io_.counters.cancels_sent);
  small_.push_back(std::move(frame));
  flush();
  if (progress_timer_ == 0) watch_progress();
}

void Connection::watch_progress() {
  moved_bytes_seen_ = moved_bytes_;
  received_bytes_seen_ = received_bytes_;
  const milliseconds stall_time(io_.options.stall_timeout_ms *
                                (lane_ == Lane::kBulk ? 1 : kControlStallFactor));
  progress_timer_ = io_.loop.at(Clock::now() + stall_time, [this, stall_time] {
    const auto self = shared_from_this();
    if (mark_.may_hide_bytes()) on_readable();
    progress_timer_ = 0;
    if (state_ == State::kClosed) return;
    const auto now = Clock::now();
    bool any = false;
    bool overdue = false;
    bool sending = false;
    for (const auto& [id, request] : inflight_) {
      any |= request->detached;
      sending |= request->detached && request->sender && !request->sender->finished();
      overdue |= request->detached && now >= request->detached_at + stall_time * kAbandonedFactor;
    }
    if (!any) return;
    // What this side sends says nothing of a peer that owes an answer: the kernel takes it from anybody.
    const bool moved =
        received_bytes_ != received_bytes_seen_ || (sending && moved_bytes_ != moved_bytes_seen_);
    if (overdue || !moved) {
      return fail(FailureKind::kStalled, "the node did not go on with a request whose deadline had passed");
    }
    watch_progress();
  });
}

}  // namespace dfkv::client
