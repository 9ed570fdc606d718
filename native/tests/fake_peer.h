// A cache node in a few lines for tests of the client: correct by default, and as wrong as a hook makes it.
// Every connection has a thread of its own with blocking I/O.
#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "net/fd.h"
#include "wire/checksum.h"
#include "wire/frame.h"
#include "wire/meta.h"
#include "wire/sha256.h"
#include "wire/view.h"

namespace dfkv::test {

using ByteVector = std::vector<std::byte>;

struct Frame {
  FrameHeader header;
  ByteVector meta;
  ByteVector payload;

  [[nodiscard]] Opcode opcode() const { return static_cast<Opcode>(header.opcode); }
  [[nodiscard]] RequestMeta request() const {
    RequestMeta out;
    if (!meta.empty()) (void)decode_request(meta, out);
    return out;
  }
};

class FakePeer {
 public:
  class Conn {
   public:
    Conn(FakePeer& peer, Fd fd, int number) : number(number), peer_(peer), fd_(std::move(fd)) {}

    bool send_raw(Bytes bytes) {
      const std::lock_guard lock(mutex_);
      std::size_t sent = 0;
      while (sent < bytes.size()) {
        const auto n = ::send(fd_.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
        if (n <= 0) return false;
        sent += static_cast<std::size_t>(n);
      }
      return true;
    }
    static ByteVector encode(Opcode opcode, std::uint64_t id, std::uint32_t item, std::uint16_t flags,
                             Bytes meta, Bytes payload) {
      FrameHeader header;
      header.opcode = static_cast<std::uint8_t>(opcode);
      header.flags = flags;
      header.request_id = id;
      header.item = item;
      header.meta_bytes = static_cast<std::uint32_t>(meta.size());
      header.payload_bytes = static_cast<std::uint32_t>(payload.size());
      ByteVector out(kFrameHeaderBytes);
      encode_frame_header(header, std::span<std::byte, kFrameHeaderBytes>(out.data(), kFrameHeaderBytes));
      out.insert(out.end(), meta.begin(), meta.end());
      out.insert(out.end(), payload.begin(), payload.end());
      return out;
    }
    bool reply(const Frame& to, const ReplyMeta& meta, Bytes payload = {}, bool error = false) {
      ByteVector encoded;
      encode_reply(meta, encoded);
      const auto flags =
          static_cast<std::uint16_t>(kFlagReply | kFlagEndOfRequest | (error ? kFlagError : 0));
      return send_raw(encode(to.opcode(), to.header.request_id, kWholeRequest, flags, encoded, payload));
    }
    bool fragment(const Frame& to, std::uint32_t item, bool last, const ReplyMeta* meta, Bytes payload) {
      ByteVector encoded;
      if (meta != nullptr) encode_reply(*meta, encoded);
      const auto flags = static_cast<std::uint16_t>(kFlagReply | (last ? kFlagLastOfItem : 0));
      return send_raw(encode(to.opcode(), to.header.request_id, item, flags, encoded, payload));
    }
    // An object as a correct node sends it.
    bool object(const Frame& to, std::uint32_t item, Bytes bytes, std::size_t fragment_bytes = 1 << 20) {
      ReplyMeta meta;
      meta.length = bytes.size();
      meta.checksum = xxh3_64(bytes);
      for (std::size_t at = 0; at < bytes.size(); at += fragment_bytes) {
        const auto size = std::min(fragment_bytes, bytes.size() - at);
        if (!fragment(to, item, at + size == bytes.size(), at == 0 ? &meta : nullptr,
                      bytes.subspan(at, size))) {
          return false;
        }
      }
      return true;
    }
    void shut() { ::shutdown(fd_.get(), SHUT_RDWR); }
    // Sleeps, but not beyond the end of the peer.
    void pause(std::chrono::milliseconds time) { peer_.pause(time); }

    const int number;  // in the order of accepting, from 0
    Lane lane = Lane::kControl;

   private:
    friend class FakePeer;
    bool receive(std::byte* at, std::size_t size) {
      while (size > 0) {
        const auto n = ::recv(fd_.get(), at, size, 0);
        if (n <= 0) return false;
        at += n;
        size -= static_cast<std::size_t>(n);
      }
      return true;
    }
    bool receive(Frame& frame) {
      std::array<std::byte, kFrameHeaderBytes> head;
      if (!receive(head.data(), head.size())) return false;
      if (decode_frame_header(head, FrameLimits{}, frame.header) != FrameFault::kNone) {
        ++peer_.bad_frames;
        return false;
      }
      frame.meta.resize(frame.header.meta_bytes);
      frame.payload.resize(frame.header.payload_bytes);
      return receive(frame.meta.data(), frame.meta.size()) &&
             receive(frame.payload.data(), frame.payload.size());
    }

    FakePeer& peer_;
    Fd fd_;
    std::mutex mutex_;
    std::array<std::byte, 16> client_nonce_{};
    std::thread thread_;
    struct Put {
      Frame request;
      std::vector<ItemRef> items;
      std::vector<std::uint16_t> statuses;
      std::map<std::uint32_t, ByteVector> bytes;
    };
    std::map<std::uint64_t, Put> puts_;
    std::optional<Frame> subscription_;
  };

  // True: the hook has dealt with the frame. Runs on the connection's thread.
  using Hook = std::function<bool(Conn&, const Frame&)>;

  explicit FakePeer(std::string node_id = "node-a", std::uint16_t port = 0) : node_id(std::move(node_id)) {
    listener_ = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;
    ::setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
        ::listen(listener_.get(), 64) != 0) {
      throw std::runtime_error("the fake peer cannot listen");
    }
    socklen_t size = sizeof address;
    ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size);
    this->port = ntohs(address.sin_port);
    View own;
    own.revision = 1;
    own.nodes.resize(1);
    own.nodes[0].id = this->node_id;
    own.nodes[0].tcp = {this->address()};
    set_view(own);
    acceptor_ = std::thread([this] { accept(); });
  }
  ~FakePeer() { stop(); }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      stopping_ = true;
      changed_.notify_all();
    }
    ::shutdown(listener_.get(), SHUT_RDWR);
    acceptor_.join();
    listener_.reset();
    drop_connections();
    for (auto& conn : connections_) conn->thread_.join();
  }
  [[nodiscard]] std::string address() const { return "127.0.0.1:" + std::to_string(port); }

  void drop_connections() {
    const std::lock_guard lock(mutex_);
    for (auto& conn : connections_) conn->shut();
  }
  void set_hook(Hook hook) {
    const std::lock_guard lock(mutex_);
    hook_ = std::make_shared<Hook>(std::move(hook));
  }
  void set_secret(std::string_view secret) {
    const auto bytes = as_bytes(secret.data(), secret.size());
    secret_ = ByteVector(bytes.begin(), bytes.end());
  }
  void set_view(View view) {
    const std::lock_guard lock(mutex_);
    view_bytes_ = encode_view(view);
    view_revision_ = view.revision;
    for (auto& conn : connections_) {
      if (!conn->subscription_) continue;
      const auto request = std::move(*conn->subscription_);
      conn->subscription_.reset();
      conn->reply(request, {}, view_bytes_);
    }
  }
  void pause(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, time, [this] { return stopping_; });
  }
  void store(const BlockId& block, Part part, ByteVector bytes) {
    const std::lock_guard lock(mutex_);
    objects_[{block, part}] = std::move(bytes);
  }
  std::optional<ByteVector> load(const BlockId& block, Part part) {
    const std::lock_guard lock(mutex_);
    const auto it = objects_.find({block, part});
    if (it == objects_.end()) return std::nullopt;
    return it->second;
  }
  std::size_t objects() {
    const std::lock_guard lock(mutex_);
    return objects_.size();
  }
  void forget_namespaces() {
    const std::lock_guard lock(mutex_);
    namespaces_.clear();
  }

  const std::string node_id;
  std::uint16_t port = 0;
  std::atomic<int> accepted{0};
  std::atomic<int> bad_frames{0};
  std::atomic<int> seen[32] = {};  // by opcode
  std::atomic<std::uint64_t> released_lease{0};

 private:
  void accept() {
    for (;;) {
      Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      const std::lock_guard lock(mutex_);
      if (stopping_ || !fd) return;
      auto conn = std::make_unique<Conn>(*this, std::move(fd), accepted++);
      auto* raw = conn.get();
      connections_.push_back(std::move(conn));
      raw->thread_ = std::thread([this, raw] { serve(*raw); });
    }
  }

  void serve(Conn& conn) {
    Frame frame;
    while (conn.receive(frame)) {
      if (frame.header.opcode < 32 && frame.header.item == kWholeRequest) ++seen[frame.header.opcode];
      std::shared_ptr<Hook> hook;
      {
        const std::lock_guard lock(mutex_);
        hook = hook_;
      }
      if (hook && (*hook)(conn, frame)) continue;
      if (!handle(conn, frame)) break;
    }
    conn.shut();
  }

  bool handle(Conn& conn, const Frame& frame) {
    switch (frame.opcode()) {
      case Opcode::kHello:
        return hello(conn, frame);
      case Opcode::kAuth:
        return auth(conn, frame);
      case Opcode::kSubscribe:
        return subscribe(conn, frame);
      case Opcode::kExists:
        return exists(conn, frame);
      case Opcode::kGet:
        return get(conn, frame);
      case Opcode::kPut:
        return put(conn, frame);
      case Opcode::kRemove:
        return remove(conn, frame);
      case Opcode::kPutNs: {
        const std::lock_guard lock(mutex_);
        namespaces_.insert(*frame.request().ns);
        return conn.reply(frame, {});
      }
      case Opcode::kRelease:
        released_lease = frame.request().lease_id;
        return conn.reply(frame, {});
      case Opcode::kCancel:
        return true;
      default:
        return conn.reply(frame, {});
    }
  }

  bool hello(Conn& conn, const Frame& frame) {
    HelloMeta theirs;
    if (decode_hello(frame.meta, theirs) != MetaFault::kNone) return false;
    conn.lane = theirs.lane;
    conn.client_nonce_ = theirs.nonce;
    HelloMeta ours;
    ours.lane = theirs.lane;
    ours.max_meta_bytes = max_meta_bytes;
    ours.max_fragment_bytes = max_fragment_bytes;
    ours.auth_methods = secret_ ? kAuthHmac : kAuthNone;
    ours.node_id = node_id;
    ByteVector meta;
    encode_hello(ours, meta);
    return conn.send_raw(Conn::encode(Opcode::kHello, frame.header.request_id, kWholeRequest,
                                      kFlagReply | kFlagEndOfRequest, meta, {}));
  }
  bool auth(Conn& conn, const Frame& frame) {
    const std::array<std::byte, 16> nonce{};
    const auto expected = auth_mac(*secret_, 'c', conn.client_nonce_, nonce, node_id);
    if (!equal_constant_time(frame.request().mac, expected)) {
      ReplyMeta no;
      no.status = Status::kRefusedUnauthenticated;
      conn.reply(frame, no, {}, true);
      return false;
    }
    ReplyMeta yes;
    const auto proof = auth_mac(*secret_, 's', conn.client_nonce_, nonce, node_id);
    yes.mac.assign(proof.begin(), proof.end());
    return conn.reply(frame, yes);
  }
  bool subscribe(Conn& conn, const Frame& frame) {
    const std::lock_guard lock(mutex_);
    if (frame.request().known_revision != view_revision_) return conn.reply(frame, {}, view_bytes_);
    conn.subscription_ = frame;
    return true;
  }
  bool exists(Conn& conn, const Frame& frame) {
    ExistsTable table;
    if (!decode_exists_table(frame.payload, table)) return false;
    std::vector<std::uint16_t> statuses;
    {
      const std::lock_guard lock(mutex_);
      const bool known = namespaces_.contains(*frame.request().ns);
      for (const auto& chunk : table.chunks) {
        bool all = known;
        for (const auto part : table.parts) all = all && objects_.contains({chunk.block, part});
        statuses.push_back(static_cast<std::uint16_t>(all     ? Status::kOk
                                                      : known ? Status::kMissNotFound
                                                              : Status::kMissNamespaceUnknown));
      }
    }
    ReplyMeta meta;
    if (frame.request().lease_ms != 0) meta.lease_id = 77;
    return conn.reply(frame, meta, as_bytes(statuses.data(), statuses.size() * 2));
  }
  bool get(Conn& conn, const Frame& frame) {
    std::vector<ItemRef> items;
    if (!decode_item_table(frame.payload, items)) return false;
    std::vector<std::uint16_t> statuses;
    for (std::uint32_t i = 0; i < items.size(); ++i) {
      const auto bytes = load(items[i].block, items[i].part);
      statuses.push_back(static_cast<std::uint16_t>(bytes ? Status::kOk : Status::kMissNotFound));
      if (bytes && !conn.object(frame, i, *bytes)) return false;
    }
    return conn.reply(frame, {}, as_bytes(statuses.data(), statuses.size() * 2));
  }
  bool put(Conn& conn, const Frame& frame) {
    if (frame.header.item == kWholeRequest) {
      Conn::Put put;
      put.request = frame;
      if (!decode_item_table(frame.payload, put.items)) return false;
      put.statuses.assign(put.items.size(), static_cast<std::uint16_t>(Status::kRefusedAborted));
      conn.puts_[frame.header.request_id] = std::move(put);
      return true;
    }
    const auto it = conn.puts_.find(frame.header.request_id);
    if (it == conn.puts_.end() || frame.header.item >= it->second.items.size()) return false;
    auto& put = it->second;
    const auto item = frame.header.item;
    auto& bytes = put.bytes[item];
    bytes.insert(bytes.end(), frame.payload.begin(), frame.payload.end());
    if (frame.header.last_of_item()) {
      const auto meta = frame.request();
      Status status = Status::kOk;
      if (meta.aborted) {
        status = Status::kRefusedAborted;
      } else if (bytes.size() != put.items[item].length || !meta.checksum ||
                 *meta.checksum != xxh3_64(bytes)) {
        status = Status::kRefusedChecksum;
      } else {
        const std::lock_guard lock(mutex_);
        const auto [at, fresh] = objects_.try_emplace({put.items[item].block, put.items[item].part}, bytes);
        if (!fresh) status = Status::kAlready;
      }
      put.statuses[item] = static_cast<std::uint16_t>(status);
    }
    if (!frame.header.end_of_request()) return true;
    const auto done = std::move(put);
    conn.puts_.erase(it);
    return conn.reply(done.request, {}, as_bytes(done.statuses.data(), done.statuses.size() * 2));
  }
  bool remove(Conn& conn, const Frame& frame) {
    std::vector<ItemRef> items;
    if (!decode_item_table(frame.payload, items)) return false;
    std::vector<std::uint16_t> statuses;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& item : items) {
        const bool had = objects_.erase({item.block, item.part}) > 0;
        statuses.push_back(static_cast<std::uint16_t>(had ? Status::kOk : Status::kMissNotFound));
      }
    }
    return conn.reply(frame, {}, as_bytes(statuses.data(), statuses.size() * 2));
  }

 public:
  std::uint32_t max_meta_bytes = kDefaultMaxMetaBytes;
  std::uint32_t max_fragment_bytes = kDefaultMaxFragmentBytes;

 private:
  Fd listener_;
  std::thread acceptor_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::list<std::unique_ptr<Conn>> connections_;
  std::shared_ptr<Hook> hook_;
  std::optional<ByteVector> secret_;
  ByteVector view_bytes_;
  std::uint64_t view_revision_ = 0;
  std::map<std::pair<BlockId, Part>, ByteVector> objects_;
  std::set<NamespaceId> namespaces_;
};

}  // namespace dfkv::test
