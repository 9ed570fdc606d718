// A small blocking peer for tests of the server: frames made and read by hand, one socket, no cleverness.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "net/fd.h"
#include "wire/checksum.h"
#include "wire/frame.h"
#include "wire/identity.h"
#include "wire/meta.h"

namespace dfkv::test {

using Buffer = std::vector<std::byte>;

struct Frame {
  FrameHeader header;
  Buffer meta;
  Buffer payload;

  [[nodiscard]] ReplyMeta reply() const {
    ReplyMeta out;
    if (decode_reply(meta, out) != MetaFault::kNone)
      throw std::runtime_error("the meta of a reply cannot be read");
    return out;
  }
  [[nodiscard]] std::vector<Status> statuses() const {
    std::vector<Status> out(payload.size() / 2);
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<Status>(load_le<std::uint16_t>(payload.data() + 2 * i));
    }
    return out;
  }
};

struct Item {
  ItemRef ref;
  Buffer bytes;
};

class Peer {
 public:
  explicit Peer(std::uint16_t port, int timeout_s = 10) {
    fd_ = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const timeval timeout{timeout_s, 0};
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
    const int one = 1;
    ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (::connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      throw std::runtime_error("cannot connect");
    }
  }

  // ---- bytes
  void send(Bytes bytes) {
    while (!bytes.empty()) {
      const ssize_t count = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (count <= 0) throw std::runtime_error("the server does not take what is sent");
      bytes = bytes.subspan(static_cast<std::size_t>(count));
    }
  }
  // False: closed.
  bool receive(MutableBytes into) {
    while (!into.empty()) {
      const ssize_t count = ::recv(fd_.get(), into.data(), into.size(), 0);
      if (count == 0 || (count < 0 && errno == ECONNRESET)) return false;
      if (count < 0) throw std::runtime_error("the server does not answer in time");
      into = into.subspan(static_cast<std::size_t>(count));
    }
    return true;
  }
  // Reads and throws away until the server closes. False: it did not in time.
  bool closed() {
    Buffer sink(65536);
    while (true) {
      const ssize_t count = ::recv(fd_.get(), sink.data(), sink.size(), 0);
      if (count == 0 || (count < 0 && errno == ECONNRESET)) return true;
      if (count < 0) return false;
    }
  }
  void disconnect() { fd_.reset(); }
  void reset() {  // as a killed process whose input was not read
    const linger now{1, 0};
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
    fd_.reset();
  }
  [[nodiscard]] int fd() const { return fd_.get(); }

  // ---- frames
  static Buffer frame(FrameHeader header, Bytes meta, Bytes payload) {
    header.meta_bytes = static_cast<std::uint32_t>(meta.size());
    header.payload_bytes = static_cast<std::uint32_t>(payload.size());
    Buffer out(kFrameHeaderBytes);
    encode_frame_header(header, std::span<std::byte, kFrameHeaderBytes>(out.data(), kFrameHeaderBytes));
    out.insert(out.end(), meta.begin(), meta.end());
    out.insert(out.end(), payload.begin(), payload.end());
    return out;
  }
  static FrameHeader header(Opcode opcode, std::uint64_t id, std::uint16_t flags = kFlagEndOfRequest,
                            std::uint32_t item = kWholeRequest) {
    FrameHeader out;
    out.opcode = static_cast<std::uint8_t>(opcode);
    out.flags = flags;
    out.request_id = id;
    out.item = item;
    return out;
  }
  static Buffer encoded(const RequestMeta& meta) {
    Buffer out;
    encode_request(meta, out);
    return out;
  }
  std::uint64_t next_id() { return ++last_id_; }
  void send_request(Opcode opcode, std::uint64_t id, const RequestMeta& meta = {}, Bytes payload = {},
                    std::uint16_t flags = kFlagEndOfRequest, std::uint32_t item = kWholeRequest) {
    send(frame(header(opcode, id, flags, item), encoded(meta), payload));
  }
  std::optional<Frame> try_receive_frame() {
    std::array<std::byte, kFrameHeaderBytes> raw;
    if (!receive(raw)) return std::nullopt;
    Frame out;
    if (decode_frame_header(raw, FrameLimits{}, out.header) != FrameFault::kNone) {
      throw std::runtime_error("the server sent a bad frame");
    }
    out.meta.resize(out.header.meta_bytes);
    out.payload.resize(out.header.payload_bytes);
    if (!receive(out.meta) || !receive(out.payload)) return std::nullopt;
    return out;
  }
  Frame receive_frame() {
    auto out = try_receive_frame();
    if (!out) throw std::runtime_error("the server closed the connection");
    return std::move(*out);
  }
  Frame call(Opcode opcode, const RequestMeta& meta = {}, Bytes payload = {}) {
    const std::uint64_t id = next_id();
    send_request(opcode, id, meta, payload);
    Frame reply = receive_frame();
    if (reply.header.request_id != id) throw std::runtime_error("an answer to another request");
    return reply;
  }

  // ---- handshake
  HelloMeta hello(Lane lane = Lane::kBulk, std::uint32_t max_fragment_bytes = 0) {
    HelloMeta mine;
    mine.lane = lane;
    mine.max_fragment_bytes = max_fragment_bytes;
    mine.nonce.fill(std::byte{7});
    Buffer meta;
    encode_hello(mine, meta);
    send(frame(header(Opcode::kHello, 0), meta, {}));
    const Frame answer = receive_frame();
    if (answer.header.is_error()) throw std::runtime_error("HELLO was refused: " + answer.reply().reason);
    HelloMeta theirs;
    if (decode_hello(answer.meta, theirs) != MetaFault::kNone) throw std::runtime_error("bad HELLO");
    nonce_ = mine.nonce;
    return theirs;
  }
  Frame authenticate(const HelloMeta& theirs, Bytes secret) {
    RequestMeta meta;
    const auto mac = auth_mac(secret, 'c', nonce_, theirs.nonce, theirs.node_id);
    meta.mac.assign(mac.begin(), mac.end());
    send_request(Opcode::kAuth, 0, meta);
    return receive_frame();
  }

  // ---- operations
  Status put_namespace(const NamespaceId& ns, Bytes descriptor, std::string label = {}) {
    RequestMeta meta;
    meta.ns = ns;
    meta.descriptor.assign(descriptor.begin(), descriptor.end());
    meta.label = std::move(label);
    return call(Opcode::kPutNs, meta).reply().status;
  }
  static Buffer table_of(const std::vector<Item>& items) {
    std::vector<ItemRef> refs;
    for (const Item& item : items) refs.push_back(item.ref);
    Buffer table;
    encode_item_table(refs, table);
    return table;
  }
  void send_put_head(std::uint64_t id, const NamespaceId& ns, const std::vector<Item>& items,
                     RequestMeta meta = {}) {
    meta.ns = ns;
    send_request(Opcode::kPut, id, meta, table_of(items), 0);
  }
  // One item in fragments of at most `fragment` bytes.
  void send_put_item(std::uint64_t id, std::uint32_t index, Bytes bytes, bool end,
                     std::size_t fragment = 1 << 20, std::uint64_t checksum_error = 0) {
    for (std::size_t at = 0; at < bytes.size(); at += fragment) {
      const Bytes piece = bytes.subspan(at, std::min(fragment, bytes.size() - at));
      const bool last = at + piece.size() == bytes.size();
      RequestMeta meta;
      if (last) meta.checksum = xxh3_64(bytes) ^ checksum_error;
      const auto flags =
          static_cast<std::uint16_t>(last ? kFlagLastOfItem | (end ? kFlagEndOfRequest : 0) : 0);
      send(frame(header(Opcode::kPut, id, flags, index), last ? encoded(meta) : Buffer{}, piece));
    }
  }
  std::vector<Status> put(const NamespaceId& ns, const std::vector<Item>& items, RequestMeta meta = {},
                          std::size_t fragment = 1 << 20) {
    const std::uint64_t id = next_id();
    send_put_head(id, ns, items, std::move(meta));
    for (std::size_t i = 0; i < items.size(); ++i) {
      send_put_item(id, static_cast<std::uint32_t>(i), items[i].bytes, i + 1 == items.size(), fragment);
    }
    const Frame answer = receive_frame();
    if (answer.header.request_id != id) throw std::runtime_error("an answer to another request");
    return answer.statuses();
  }
  struct Got {
    std::vector<Status> statuses;
    std::map<std::uint32_t, Buffer> bytes;
    ReplyMeta meta;
    std::size_t frames = 0;
  };
  void send_get(std::uint64_t id, const NamespaceId& ns, const std::vector<Item>& items,
                RequestMeta meta = {}) {
    meta.ns = ns;
    send_request(Opcode::kGet, id, meta, table_of(items));
  }
  // Collects the answer to one GET; throws when the frames of an item break the rules.
  Got receive_get(std::uint64_t id) {
    Got got;
    std::map<std::uint32_t, ReplyMeta> heads;
    while (true) {
      Frame in = receive_frame();
      if (in.header.request_id != id) throw std::runtime_error("an answer to another request");
      if (in.header.end_of_request()) {
        got.meta = in.reply();
        got.statuses = in.statuses();
        break;
      }
      ++got.frames;
      Buffer& bytes = got.bytes[in.header.item];
      if (bytes.empty()) heads[in.header.item] = in.reply();
      bytes.insert(bytes.end(), in.payload.begin(), in.payload.end());
      const ReplyMeta& head = heads[in.header.item];
      if (in.header.last_of_item() != (bytes.size() == head.length))
        throw std::runtime_error("wrong end of an item");
      if (in.header.last_of_item() && head.checksum != xxh3_64(bytes))
        throw std::runtime_error("wrong checksum");
    }
    return got;
  }
  Got get(const NamespaceId& ns, const std::vector<Item>& items, RequestMeta meta = {}) {
    const std::uint64_t id = next_id();
    send_get(id, ns, items, std::move(meta));
    return receive_get(id);
  }
  Frame exists(const NamespaceId& ns, const ExistsTable& table, std::uint32_t lease_ms = 0) {
    RequestMeta meta;
    meta.ns = ns;
    meta.lease_ms = lease_ms;
    Buffer payload;
    encode_exists_table(table, payload);
    return call(Opcode::kExists, meta, payload);
  }

 private:
  Fd fd_;
  std::uint64_t last_id_ = 100;
  std::array<std::byte, 16> nonce_{};
};

}  // namespace dfkv::test
