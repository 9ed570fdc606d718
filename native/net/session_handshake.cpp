// HELLO and AUTH: limits are settled, and both sides prove that they know the secret.
#include <sys/random.h>

#include <algorithm>
#include <string>

#include "net/session.h"

namespace dfkv::server {

namespace {
constexpr std::uint64_t kFeatures = 0;  // none is defined yet
}  // namespace

bool Session::fail_handshake(const FrameHeader& header, Status status, std::string_view reason) {
  counters_->handshake_failures.add();
  refuse(header, status, reason);
  linger();
  return false;
}

bool Session::on_hello(const FrameHeader& header, Bytes meta) {
  HelloMeta theirs;
  if (const MetaFault fault = decode_hello(meta, theirs); fault != MetaFault::kNone) {
    return fail_handshake(header, Status::kRefusedBadRequest,
                          std::string("the meta of HELLO cannot be read: ") + meta_fault_name(fault));
  }
  if ((theirs.features_required & ~kFeatures) != 0) {
    return fail_handshake(header, Status::kRefusedUnsupported,
                          "features are required that this node does not have: upgrade it");
  }
  if (theirs.max_meta_bytes != 0)
    limits_.max_meta_bytes = std::min(limits_.max_meta_bytes, theirs.max_meta_bytes);
  if (theirs.max_fragment_bytes != 0) {
    limits_.max_fragment_bytes = std::min(limits_.max_fragment_bytes, theirs.max_fragment_bytes);
  }
  if (limits_.max_meta_bytes < kMinMetaBytes || limits_.max_fragment_bytes < kMinFragmentBytes) {
    return fail_handshake(header, Status::kRefusedLimit,
                          "offer at least " + std::to_string(kMinMetaBytes) + " bytes of meta and " +
                              std::to_string(kMinFragmentBytes) + " bytes of payload per frame");
  }
  if (::getrandom(server_nonce_.data(), server_nonce_.size(), 0) !=
      static_cast<ssize_t>(server_nonce_.size())) {
    return fail_handshake(header, Status::kAgainBusy, "no random bytes");
  }
  client_nonce_ = theirs.nonce;
  lane_ = theirs.lane;

  HelloMeta ours;
  ours.features_offered = kFeatures;
  ours.lane = theirs.lane;
  ours.max_meta_bytes = limits_.max_meta_bytes;
  ours.max_fragment_bytes = limits_.max_fragment_bytes;
  ours.auth_methods = context_->options.secret ? kAuthHmac : kAuthNone;
  ours.nonce = server_nonce_;
  ours.node_id = context_->options.node_id;
  ours.incarnation = context_->options.incarnation;
  ours.boot_id = context_->options.boot_id;
  ours.software = "dfkv";
  std::vector<std::byte> frame(kFrameHeaderBytes);
  encode_hello(ours, frame);
  FrameHeader answer;
  answer.opcode = header.opcode;
  answer.flags = kFlagReply | kFlagEndOfRequest;
  answer.request_id = header.request_id;
  answer.meta_bytes = static_cast<std::uint32_t>(frame.size() - kFrameHeaderBytes);
  encode_frame_header(answer, std::span<std::byte, kFrameHeaderBytes>(frame.data(), kFrameHeaderBytes));
  out_.push(std::move(frame));

  if (theirs.lane == Lane::kControl) receiver_.set_read_ahead(kReadAheadBytes);
  if (context_->options.secret) {
    stage_ = Stage::kAuth;
  } else {
    ready();
  }
  return true;
}

bool Session::on_auth(const FrameHeader& header, Bytes meta) {
  RequestMeta theirs;
  const Bytes secret = *context_->options.secret;
  const auto expected = auth_mac(secret, 'c', client_nonce_, server_nonce_, context_->options.node_id);
  if (decode_request(meta, theirs) != MetaFault::kNone || !equal_constant_time(theirs.mac, expected)) {
    counters_->auth_failures.add();
    return fail_handshake(header, Status::kRefusedUnauthenticated, "the secret is not this node's");
  }
  ReplyMeta ours;
  const auto proof = auth_mac(secret, 's', client_nonce_, server_nonce_, context_->options.node_id);
  ours.mac.assign(proof.begin(), proof.end());
  reply(header, ours);
  ready();
  return true;
}

void Session::ready() {
  stage_ = Stage::kReady;
  last_received_ = last_sent_ = arrived_;
  receiver_.set_limits(limits_);
  context_->introduced(id_);
  leaving_ = lane_ == Lane::kBulk && context_->settle != nullptr;
}

}  // namespace dfkv::server
