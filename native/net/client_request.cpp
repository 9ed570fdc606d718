#include "net/client_request.h"

namespace dfkv::client {

std::size_t Request::table_bytes() const {
  if (keys.empty()) return 0;
  if (opcode == Opcode::kExists)
    return 8 + op->input.parts.size() * sizeof(Part) + keys.size() * kChunkRefBytes;
  return 8 + keys.size() * kItemRefBytes;
}

void append_frame(const FrameHeader& header, Bytes meta, Bytes payload, std::vector<std::byte>& out) {
  const auto at = out.size();
  out.resize(at + kFrameHeaderBytes);
  encode_frame_header(header, std::span<std::byte, kFrameHeaderBytes>(out.data() + at, kFrameHeaderBytes));
  out.insert(out.end(), meta.begin(), meta.end());
  out.insert(out.end(), payload.begin(), payload.end());
}

void encode_request_frame(const Request& request, std::uint64_t id, std::vector<std::byte>& out) {
  RequestMeta meta = request.meta;
  if (request.deadline != Clock::time_point::max()) {
    const auto left =
        std::chrono::duration_cast<std::chrono::microseconds>(request.deadline - Clock::now()).count();
    meta.deadline_us = left > 1 ? static_cast<std::uint64_t>(left) : 1;
  }
  std::vector<std::byte> encoded;
  encode_request(meta, encoded);

  FrameHeader header;
  header.opcode = static_cast<std::uint8_t>(request.opcode);
  header.flags = request.opcode == Opcode::kPut ? 0 : kFlagEndOfRequest;
  header.request_id = id;
  header.meta_bytes = static_cast<std::uint32_t>(encoded.size());
  const auto table = request.table_bytes();
  header.payload_bytes = static_cast<std::uint32_t>(table);
  out.reserve(out.size() + kFrameHeaderBytes + encoded.size() + table);
  append_frame(header, encoded, {}, out);
  if (table == 0) return;

  // The entries are in wire form already: the table is put together without decoding them.
  const Input& input = request.op->input;
  const auto number = [&out](std::uint32_t value) {
    const auto bytes = as_bytes(&value, sizeof value);
    out.insert(out.end(), bytes.begin(), bytes.end());
  };
  number(static_cast<std::uint32_t>(request.keys.size()));
  number(static_cast<std::uint32_t>(input.parts.size()));
  const auto parts = as_bytes(input.parts.data(), input.parts.size() * sizeof(Part));
  out.insert(out.end(), parts.begin(), parts.end());
  for (const auto key : request.keys) {
    const auto entry = input.entry(key);
    out.insert(out.end(), entry.begin(), entry.end());
  }
}

bool fits_reply(const Request& request, std::uint32_t payload_bytes) {
  return request.keys.empty() || payload_bytes == 0 || payload_bytes == request.keys.size() * 2;
}

namespace {

void close_request(Io& io, Request& request) {
  request.state = Request::State::kEnded;
  request.receiver.reset();
  const auto op = std::move(request.op);
  request.op.reset();
  if (!op || request.detached) return;
  if (--op->open_requests == 0) io.complete(op);
}

// What a key gets that the final table says is done although its payload never came.
Status checked_for(Opcode opcode, Status status) {
  return opcode == Opcode::kGet && is_done(status) ? Status::kMissCorrupt : status;
}

}  // namespace

void take_reply(Io& io, Request& request, bool error, const ReplyMeta& reply, Bytes payload) {
  if (request.state == Request::State::kEnded) return;
  bump(io.counters.round_trips);
  if (request.keys.empty()) {
    const auto status = error && is_done(reply.status) ? Status::kRefusedBadRequest : reply.status;
    const auto ended = std::move(request.ended);
    if (ended) ended(request, status, &reply, payload);
    close_request(io, request);
    return;
  }
  if (request.op && !request.detached) {
    Operation& op = *request.op;
    op.count_round_trip();
    if (reply.lease_id != 0) op.add_lease({request.node_id, reply.lease_id});
    for (std::size_t i = 0; i < request.keys.size(); ++i) {
      Status status = reply.status;
      if (!payload.empty()) {
        status = static_cast<Status>(load_le<std::uint16_t>(payload.data() + i * 2));
      } else if (is_done(status)) {
        status = Status::kRefusedBadRequest;  // an "ok" without a table says nothing about the keys
      }
      op.end_key(request.keys[i], checked_for(request.opcode, status));
    }
  }
  close_request(io, request);
}

void end_request(Io& io, Request& request, Status status) {
  if (request.state == Request::State::kEnded) return;
  if (request.keys.empty()) {
    const auto ended = std::move(request.ended);
    if (ended) ended(request, status, nullptr, {});
  } else if (request.op && !request.detached) {
    for (const auto key : request.keys) request.op->end_key(key, status);
  }
  close_request(io, request);
}

void detach(Request& request) {
  request.detached = true;
  request.detached_at = Clock::now();
  request.op.reset();
  if (request.receiver) request.receiver->detach();
  if (request.sender) request.sender->withdraw();
}

std::shared_ptr<Request> split_request(Request& request, std::size_t first) {
  auto rest = std::make_shared<Request>();
  rest->opcode = request.opcode;
  rest->meta = request.meta;
  rest->deadline = request.deadline;
  rest->node_id = request.node_id;
  rest->op = request.op;
  rest->retried = request.retried;
  rest->min_serial = request.min_serial;
  rest->keys.assign(request.keys.begin() + static_cast<std::ptrdiff_t>(first), request.keys.end());
  request.keys.resize(first);
  const auto moved = request.payload_bytes * rest->keys.size() / (first + rest->keys.size());
  rest->payload_bytes = moved;
  request.payload_bytes -= moved;
  request.op->requests.push_back(rest);
  ++request.op->open_requests;
  return rest;
}

}  // namespace dfkv::client
