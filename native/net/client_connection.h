// One connection to one node: connect, handshake, frames out and in, and the requests in flight on it.
// I/O thread only.
#pragma once

#include <sys/uio.h>

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "net/client_address.h"
#include "net/client_handshake.h"
#include "net/client_io.h"
#include "net/client_request.h"
#include "net/receive_mark.h"

namespace dfkv::client {

enum class FailureKind : std::uint8_t {
  kUnreachable,  // connect or handshake did not succeed
  kClosed,       // the peer closed it, or the transport broke
  kStalled,      // the peer did not go on
  kProtocol,     // the peer sent what cannot be
};

struct Failure {
  FailureKind kind = FailureKind::kClosed;
  std::string reason;
  bool was_useful = false;                     // it answered at least one request, or stood for a while
  std::vector<std::shared_ptr<Request>> lost;  // not ended; detached ones are among them
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // Called on the I/O thread. At most one call of on_failed(), and nothing after it.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void on_ready(Connection& connection) = 0;
    virtual void on_room(Connection& connection) = 0;  // a request has ended: another may be sent
    virtual void on_failed(Connection& connection, Failure failure) = 0;
  };

  static constexpr std::size_t kMaxInFlight = 128;

  // `owner` outlives the connection or calls close() first.
  Connection(Io& io, Owner& owner, Lane lane, std::string expected_node_id);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void start(const SocketAddress& address);
  void close();  // now, without callbacks; requests in flight are forgotten
  [[nodiscard]] std::vector<std::shared_ptr<Request>> take_requests();  // before close(): what has not ended

  [[nodiscard]] bool ready() const { return state_ == State::kReady; }
  [[nodiscard]] bool has_room() const { return ready() && inflight_.size() < kMaxInFlight; }
  [[nodiscard]] bool idle() const { return inflight_.empty() && !sending(); }
  [[nodiscard]] Lane lane() const { return lane_; }
  [[nodiscard]] std::uint64_t serial() const { return serial_; }
  [[nodiscard]] std::uint64_t outstanding_bytes() const { return outstanding_bytes_; }
  [[nodiscard]] const FrameLimits& limits() const { return handshake_.limits(); }
  [[nodiscard]] const HelloMeta& peer() const { return handshake_.peer(); }

  // The request is encoded now; ready() only. Its end comes through take_reply() or on_failed().
  void send(std::shared_ptr<Request> request);
  // The request has been detached from its operation: asks the node to stop, and watches that it does.
  void abandon(const std::shared_ptr<Request>& request);
  // Puts a namespace on this connection before whatever is sent later.
  void register_namespace(const std::shared_ptr<const NamespaceBook::Entry>& entry);

 private:
  enum class State : std::uint8_t { kNew, kConnecting, kHandshake, kReady, kClosed };
  enum class Sink : std::uint8_t { kNone, kItem, kCollect, kDrain };

  void fail(FailureKind kind, std::string reason);
  void fail_later(FailureKind kind, std::string reason);
  void release_socket();
  void on_events(std::uint32_t events);
  void on_connected();
  void become_ready();
  [[nodiscard]] bool sending() const { return !small_.empty() || !puts_.empty(); }
  void finish_request(std::uint64_t id);
  void watch_progress();
  // The node has forgotten the namespace (it was erased there): tells it again, for the requests to come.
  void repair_namespace(const Request& request, Status status, Bytes statuses);
  // The lookup that asked for this lease has ended without it.
  void release_late_lease(std::uint64_t lease_id);

  // Sending (client_connection_send.cpp).
  void flush();
  [[nodiscard]] bool send_some(std::span<iovec> iov, std::size_t& sent);
  [[nodiscard]] bool flush_small();
  [[nodiscard]] bool flush_put();
  void want_writable(bool wanted);

  // Receiving (client_connection_receive.cpp).
  void on_readable();
  void receive_some();
  [[nodiscard]] bool take_head();  // false: more bytes are needed, or the connection has failed
  [[nodiscard]] bool open_frame(const FrameHeader& header, Bytes meta);
  [[nodiscard]] bool open_reply(const FrameHeader& header, Bytes meta);
  void take_buffered_payload();
  [[nodiscard]] bool receive(std::span<iovec> iov, std::size_t& got);
  [[nodiscard]] bool receive_payload(std::size_t& got, std::size_t& asked);
  [[nodiscard]] bool receive_head(std::size_t& got, std::size_t& asked);
  void payload_arrived(std::span<const iovec> iov, std::size_t bytes);
  std::size_t gather_payload(std::size_t limit, std::span<iovec> iov, std::size_t& bytes);
  void close_frame();

  Io& io_;
  Owner& owner_;
  const Lane lane_;
  const std::uint64_t serial_;
  State state_ = State::kNew;
  Fd fd_;
  ReceiveMark mark_;
  Handshake handshake_;
  EventLoop::TimerId handshake_timer_ = 0;
  Clock::time_point ready_since_{};
  Clock::time_point repaired_at_{};
  std::uint64_t replies_ = 0;
  bool writable_wanted_ = false;

  std::unordered_map<std::uint64_t, std::shared_ptr<Request>> inflight_;
  std::uint64_t next_id_ = 1;
  std::uint64_t outstanding_bytes_ = 0;

  // Out: small frames go between the frames of PUT streams, so that nothing small waits for a batch.
  std::deque<std::vector<std::byte>> small_;
  std::size_t small_sent_ = 0;
  std::deque<std::shared_ptr<Request>> puts_;

  // In.
  std::vector<std::byte> buffer_;
  std::size_t buffer_begin_ = 0;
  std::size_t buffer_end_ = 0;
  Sink sink_ = Sink::kNone;
  FrameHeader frame_;
  std::shared_ptr<Request> current_;  // whose frame is being received
  ReplyMeta reply_;
  std::vector<std::byte> collected_;
  std::size_t payload_left_ = 0;
  bool in_frame_ = false;

  // Abandoned requests must end soon, or the connection does.
  EventLoop::TimerId progress_timer_ = 0;
  std::uint64_t moved_bytes_ = 0;
  std::uint64_t moved_bytes_seen_ = 0;
  std::uint64_t received_bytes_ = 0;
  std::uint64_t received_bytes_seen_ = 0;
};

}  // namespace dfkv::client
