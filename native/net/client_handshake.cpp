#include "net/client_handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <stdexcept>

#include "net/client_request.h"
#include "wire/sha256.h"

namespace dfkv::client {

namespace {

// Less than this and not even the small tables of a request would fit.
constexpr std::uint32_t kLeastMetaBytes = 1024;
constexpr std::uint32_t kLeastFragmentBytes = 4096;

void fill_random(MutableBytes out) {
  if (::getrandom(out.data(), out.size(), 0) != static_cast<ssize_t>(out.size())) {
    throw std::runtime_error("getrandom gave no nonce");
  }
}

FrameHeader connection_frame(Opcode opcode, std::size_t meta_bytes) {
  FrameHeader header;
  header.opcode = static_cast<std::uint8_t>(opcode);
  header.flags = kFlagEndOfRequest;
  header.meta_bytes = static_cast<std::uint32_t>(meta_bytes);
  return header;
}

}  // namespace

Handshake::Handshake(const Options& options, Lane lane, std::string expected_node_id)
    : options_(options), expected_node_id_(std::move(expected_node_id)) {
  mine_.lane = lane;
  mine_.max_meta_bytes = kDefaultMaxMetaBytes;
  mine_.max_fragment_bytes = kDefaultMaxFragmentBytes;
  mine_.auth_methods = options.secret ? kAuthHmac : kAuthNone;
  mine_.client_name = options.name;
  mine_.group = options.group;
  mine_.software = "dfkv";
}

void Handshake::start(std::vector<std::byte>& out) {
  fill_random(mine_.nonce);
  std::vector<std::byte> meta;
  encode_hello(mine_, meta);
  append_frame(connection_frame(Opcode::kHello, meta.size()), meta, {}, out);
}

Handshake::Step Handshake::refuse(std::string why) {
  error_ = std::move(why);
  return Step::kRefused;
}

Handshake::Step Handshake::take(const FrameHeader& header, Bytes meta, std::vector<std::byte>& out) {
  if (!header.is_reply() || header.payload_bytes != 0 || header.request_id != 0) {
    return refuse("the peer sent a frame that is no answer to the handshake");
  }
  if (header.is_error()) {
    ReplyMeta reply;
    if (decode_reply(meta, reply) != MetaFault::kNone) return refuse("the peer refused the handshake");
    return refuse("the peer refused the handshake: " + std::string(status_name(reply.status)) + " " +
                  reply.reason);
  }
  return hello_done_ ? take_auth(header, meta) : take_hello(header, meta, out);
}

Handshake::Step Handshake::take_hello(const FrameHeader& header, Bytes meta, std::vector<std::byte>& out) {
  if (header.opcode != static_cast<std::uint8_t>(Opcode::kHello)) {
    return refuse("expected the answer to HELLO, found opcode " + std::to_string(header.opcode));
  }
  if (const auto fault = decode_hello(meta, peer_); fault != MetaFault::kNone) {
    return refuse(std::string("the answer to HELLO is malformed: ") + meta_fault_name(fault));
  }
  if (peer_.features_required != 0) {
    return refuse("the node requires features " + std::to_string(peer_.features_required) +
                  " that this client does not have; upgrade the client");
  }
  if (!expected_node_id_.empty() && peer_.node_id != expected_node_id_) {
    return refuse("expected node '" + expected_node_id_ + "', found node '" + peer_.node_id +
                  "' at its address; check the advertised addresses");
  }
  if (peer_.max_meta_bytes < kLeastMetaBytes || peer_.max_fragment_bytes < kLeastFragmentBytes) {
    return refuse("the node's limits (meta " + std::to_string(peer_.max_meta_bytes) + ", fragment " +
                  std::to_string(peer_.max_fragment_bytes) + " bytes) are below what a request needs");
  }
  limits_.max_meta_bytes = std::min(mine_.max_meta_bytes, peer_.max_meta_bytes);
  limits_.max_fragment_bytes = std::min(mine_.max_fragment_bytes, peer_.max_fragment_bytes);
  hello_done_ = true;

  const bool node_has_secret = (peer_.auth_methods & kAuthHmac) != 0;
  if (!options_.secret) {
    if (node_has_secret && (peer_.auth_methods & kAuthNone) == 0) {
      return refuse("the node requires a secret and this client has none; give it the nodes' secret");
    }
    return Step::kDone;
  }
  // Whoever configured a secret wants to know whom they talk to: no silent step down.
  if (!node_has_secret) {
    return refuse(
        "this client has a secret and the node does not prove that it knows it; give the node the secret");
  }
  RequestMeta proof;
  const auto mac = auth_mac(*options_.secret, 'c', mine_.nonce, peer_.nonce, peer_.node_id);
  proof.mac.assign(mac.begin(), mac.end());
  std::vector<std::byte> encoded;
  encode_request(proof, encoded);
  append_frame(connection_frame(Opcode::kAuth, encoded.size()), encoded, {}, out);
  return Step::kContinue;
}

Handshake::Step Handshake::take_auth(const FrameHeader& header, Bytes meta) {
  ReplyMeta reply;
  if (header.opcode != static_cast<std::uint8_t>(Opcode::kAuth) ||
      decode_reply(meta, reply) != MetaFault::kNone) {
    return refuse("the answer to AUTH is malformed");
  }
  if (!is_done(reply.status)) {
    return refuse("the node refused this client's secret: " + std::string(status_name(reply.status)) + " " +
                  reply.reason);
  }
  const auto expected = auth_mac(*options_.secret, 's', mine_.nonce, peer_.nonce, peer_.node_id);
  if (!equal_constant_time(reply.mac, expected)) {
    return refuse("the node did not prove that it knows the secret");
  }
  return Step::kDone;
}

}  // namespace dfkv::client
