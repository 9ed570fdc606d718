// One request to one node: the part of an operation that this node owns, or one the client makes for itself.
// I/O thread only.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "net/client_io.h"
#include "net/client_receive.h"
#include "net/client_send.h"
#include "wire/frame.h"
#include "wire/meta.h"

namespace dfkv::client {

class Connection;

struct Request {
  enum class State : std::uint8_t { kQueued, kInFlight, kEnded };
  // The outcome of a request without keys. `reply` is null when there was none; `status` says why.
  using Ended = std::function<void(Request&, Status status, const ReplyMeta* reply, Bytes payload)>;

  Opcode opcode = Opcode::kPing;
  RequestMeta meta;  // deadline_us is filled in when it is sent
  Clock::time_point deadline = Clock::time_point::max();
  std::shared_ptr<Operation> op;  // null: made by the client itself, or detached
  std::vector<std::uint32_t>
      keys;  // positions in the operation, in wire order; empty for requests without a table
  std::uint64_t payload_bytes = 0;
  std::string node_id;  // whom it is for
  Ended ended;          // requests without keys

  State state = State::kQueued;
  bool detached = false;  // the operation has ended; only the wire needs this any more
  Clock::time_point detached_at{};
  bool retried = false;
  std::uint64_t min_serial = 0;  // connections older than this are not to be trusted with it
  std::uint64_t id = 0;          // on its connection
  std::weak_ptr<Connection> connection;

  std::unique_ptr<GetReceiver> receiver;  // GET, once sent
  std::unique_ptr<PutSender> sender;      // PUT, once sent

  // Asking again cannot change what the first time may have done.
  [[nodiscard]] bool idempotent() const { return !(opcode == Opcode::kPut && meta.replace); }
  [[nodiscard]] std::size_t table_bytes() const;
};

// Appends the frame of `request` with its table (PUT: without the items' payload).
void encode_request_frame(const Request& request, std::uint64_t id, std::vector<std::byte>& out);
void append_frame(const FrameHeader& header, Bytes meta, Bytes payload, std::vector<std::byte>& out);

// Whether a final frame with this payload can be an answer to the request.
[[nodiscard]] bool fits_reply(const Request& request, std::uint32_t payload_bytes);
// Takes the final frame: every key of the request ends, then the request.
void take_reply(Io& io, Request& request, bool error, const ReplyMeta& reply, Bytes payload);
// Ends the request without a reply.
void end_request(Io& io, Request& request, Status status);
// The operation has ended: forgets its memory. The request itself ends with its reply or its connection.
void detach(Request& request);
// A request for the keys of `request` from position `first` on; they leave `request`.
[[nodiscard]] std::shared_ptr<Request> split_request(Request& request, std::size_t first);

}  // namespace dfkv::client
