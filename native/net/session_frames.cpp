// What a frame is, where its payload goes, and which operation it asks for.
#include <algorithm>
#include <string>
#include <utility>

#include "net/session.h"

namespace dfkv::server {

namespace {

constexpr std::size_t kKeptTableBytes = 16 * 1024;  // a larger buffer is given back after use

constexpr std::uint8_t raw(Opcode opcode) { return static_cast<std::uint8_t>(opcode); }

bool is_item_frame(const FrameHeader& header) {
  return header.opcode == raw(Opcode::kPut) && header.item != kWholeRequest;
}

bool has_table(std::uint8_t opcode) {
  return opcode == raw(Opcode::kExists) || opcode == raw(Opcode::kGet) || opcode == raw(Opcode::kPut) ||
         opcode == raw(Opcode::kRemove);
}

}  // namespace

void Session::on_fault(FrameFault fault) {
  counters_->count_fault(fault);
  if (stage_ == Stage::kHello || stage_ == Stage::kAuth) counters_->handshake_failures.add();
  close();
}

bool Session::on_header(const FrameHeader& header) {
  if (header.is_reply()) return protocol_fault();
  if (stage_ == Stage::kHello || stage_ == Stage::kAuth) {
    const Opcode expected = stage_ == Stage::kHello ? Opcode::kHello : Opcode::kAuth;
    if (header.opcode != raw(expected)) {
      if (stage_ == Stage::kAuth) counters_->auth_failures.add();
      return fail_handshake(
          header, Status::kRefusedUnauthenticated,
          stage_ == Stage::kHello ? "begin with HELLO" : "this node has a secret: answer with AUTH");
    }
    if (header.meta_bytes > kMaxHandshakeMetaBytes || header.payload_bytes != 0 || !header.end_of_request()) {
      return fail_handshake(header, Status::kRefusedBadRequest,
                            "HELLO and AUTH are one small frame without payload");
    }
    return true;
  }
  if (header.request_id == 0) return protocol_fault();
  if (!held_.take(header.meta_bytes)) {
    // Meta this large is rare, and would have to be received before it could be refused with a reason.
    counters_->requests_busy.add();
    close();
    return false;
  }
  meta_held_ = header.meta_bytes;
  return true;
}

bool Session::on_meta(const FrameHeader& header, Bytes meta) {
  held_.give_back(std::exchange(meta_held_, 0));
  put_ = nullptr;
  answered_ = stage_ != Stage::kReady;
  if (stage_ == Stage::kHello) return on_hello(header, meta);
  if (stage_ == Stage::kAuth) return on_auth(header, meta);
  payload_ = Payload::kDrain;
  frame_refused_ = Status::kOk;
  if (is_item_frame(header)) return on_put_meta(header, meta);

  const auto known = requests_.find(header.request_id);
  if (header.opcode == raw(Opcode::kPut) && known != requests_.end()) {
    // The empty frame that ends a PUT whose last item did not.
    put_ = std::get_if<PutRequest>(&known->second);
    if (put_ == nullptr || put_->ended || !header.end_of_request() || header.payload_bytes != 0) {
      return protocol_fault();
    }
    return true;
  }
  if (known != requests_.end()) return protocol_fault();

  counters_->count_request(header.opcode);
  meta_ = {};
  if (!meta.empty()) {
    if (const MetaFault fault = decode_request(meta, meta_); fault != MetaFault::kNone) {
      counters_->meta_faults.add();
      frame_refused_ =
          fault == MetaFault::kUnknownCritical ? Status::kRefusedUnsupported : Status::kRefusedBadRequest;
      refusal_ = std::string("the meta cannot be read: ") + meta_fault_name(fault);
    }
  }
  if (has_table(header.opcode) && frame_refused_ == Status::kOk) {
    if (held_.take(header.payload_bytes)) {
      table_held_ = header.payload_bytes;
      payload_ = Payload::kTable;
      table_.resize(header.payload_bytes);
      table_have_ = 0;
    } else {
      counters_->requests_busy.add();
      frame_refused_ = Status::kAgainBusy;
      refusal_ = "this node holds too many requests: ask for less at a time";
    }
  }
  return true;
}

void Session::drop_table() {
  held_.give_back(std::exchange(table_held_, 0));
  table_.clear();
  if (table_.capacity() > kKeptTableBytes) table_ = {};
}

MutableBytes Session::payload_space(std::size_t left) {
  const std::size_t piece = std::min(left, kPieceBytes);
  switch (payload_) {
    case Payload::kTable:
      return MutableBytes(table_).subspan(table_have_);
    case Payload::kSlot:
      return put_->ticket->bytes().subspan(put_->received, piece);
    case Payload::kDrain:
      break;
  }
  return context_->scratch.first(std::min(left, context_->scratch.size()));
}

bool Session::on_payload(MutableBytes written, bool copied) {
  switch (payload_) {
    case Payload::kTable:
      table_have_ += written.size();
      return true;
    case Payload::kSlot:
      put_->checksum.update(written);
      put_->received += written.size();
      counters_->payload_bytes_in.add(written.size());
      if (copied) counters_->payload_copied_bytes.add(written.size());
      return true;
    case Payload::kDrain:
      counters_->payload_drained_bytes.add(written.size());
      return true;
  }
  return true;
}

bool Session::on_frame_end(const FrameHeader& header) {
  if (answered_) return !leaving_;
  const bool go_on = put_ != nullptr ? on_put_end(header) : dispatch(header);
  put_ = nullptr;
  drop_table();
  // A peer that does not take its replies is not answered further for now.
  if (go_on && out_.owned_bytes() > pause_reading_bytes()) flush();
  return go_on && stage_ == Stage::kReady && !reading_paused_;
}

// A request other than a PUT's items is one frame for the whole.
bool Session::check_request_frame(const FrameHeader& header) {
  if (frame_refused_ == Status::kOk && header.item != kWholeRequest) {
    frame_refused_ = Status::kRefusedBadRequest;
    refusal_ = "a request names no item";
  }
  if (frame_refused_ == Status::kOk && !header.end_of_request()) {
    frame_refused_ = Status::kRefusedBadRequest;
    refusal_ = "this request is one frame, with end_of_request";
  }
  if (frame_refused_ == Status::kOk) return true;
  refuse(header, frame_refused_, refusal_);
  return false;
}

bool Session::dispatch(const FrameHeader& header) {
  switch (static_cast<Opcode>(header.opcode)) {
    case Opcode::kPut:
      begin_put(header);
      return stage_ == Stage::kReady;
    case Opcode::kHello:
    case Opcode::kAuth:
      refuse(header, Status::kRefusedBadRequest, "the handshake is over");
      return true;
    case Opcode::kCancel:
      do_cancel();
      return true;
    case Opcode::kOpenRegion:
    case Opcode::kPrefetch:
      break;
    case Opcode::kPing:
    case Opcode::kPutNs:
    case Opcode::kExists:
    case Opcode::kGet:
    case Opcode::kRemove:
    case Opcode::kErase:
    case Opcode::kSync:
    case Opcode::kList:
    case Opcode::kStat:
    case Opcode::kLease:
    case Opcode::kRelease:
    case Opcode::kSubscribe:
      if (check_request_frame(header)) dispatch_known(header);
      return stage_ == Stage::kReady;
  }
  // An operation of another version may take several frames: it is answered at its end.
  if (header.end_of_request())
    refuse(header, Status::kRefusedUnsupported, "this node does not have the operation");
  return true;
}

void Session::dispatch_known(const FrameHeader& header) {
  switch (static_cast<Opcode>(header.opcode)) {
    case Opcode::kPutNs:
      return do_put_ns(header);
    case Opcode::kExists:
      return do_exists(header);
    case Opcode::kGet:
      return begin_get(header);
    case Opcode::kRemove:
      return do_remove(header);
    case Opcode::kErase:
      return do_erase(header);
    case Opcode::kSync:
      return do_sync(header);
    case Opcode::kList:
      return do_list(header);
    case Opcode::kStat:
      return do_stat(header);
    case Opcode::kLease:
      return do_lease(header);
    case Opcode::kRelease:
      return do_release(header);
    case Opcode::kSubscribe:
      return do_subscribe(header);
    default:  // PING
      return reply(header, {});
  }
}

}  // namespace dfkv::server
