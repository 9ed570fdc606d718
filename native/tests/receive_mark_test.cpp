// The node's readers are woken for large pieces only; a peer that sends small ones slowly is waited for all
// the same.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include "net/fd.h"
#include "net/frame_receiver.h"
#include "net/receive_mark.h"
#include "server_harness.h"

namespace dfkv::test {
namespace {

// Two ends of a TCP connection on loopback.
std::pair<Fd, Fd> connected() {
  Fd listener(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  REQUIRE(::bind(listener.get(), raw, size) == 0);
  REQUIRE(::listen(listener.get(), 1) == 0);
  REQUIRE(::getsockname(listener.get(), raw, &size) == 0);
  Fd one(::socket(AF_INET, SOCK_STREAM, 0));
  REQUIRE(::connect(one.get(), raw, size) == 0);
  Fd other(::accept(listener.get(), nullptr, nullptr));
  REQUIRE(other);
  return {std::move(one), std::move(other)};
}

bool readable(const Fd& fd, int timeout_ms) {
  pollfd what{fd.get(), POLLIN, 0};
  return ::poll(&what, 1, timeout_ms) == 1;
}

void send_all(const Fd& fd, std::size_t bytes) {
  const Buffer data(bytes);
  std::size_t sent = 0;
  while (sent < bytes) {
    const auto n = ::send(fd.get(), data.data() + sent, bytes - sent, MSG_NOSIGNAL);
    REQUIRE(n > 0);
    sent += static_cast<std::size_t>(n);
  }
}

TEST_CASE("a reader with a mark is told of what reaches it, and of the end") {
  auto [writer, reader] = connected();
  ReceiveMark mark;
  CHECK_FALSE(mark.may_hide_bytes());
  mark.set(reader.get(), 100'000);
  CHECK(mark.may_hide_bytes());
  send_all(writer, 60'000);
  CHECK_FALSE(readable(reader, 100));
  send_all(writer, 40'000);
  CHECK(readable(reader, 1000));
  mark.set(reader.get(), 4 << 20);  // more than the socket may ever hold
  send_all(writer, 300'000);
  CHECK(readable(reader, 1000));
  Buffer all(400'000);
  REQUIRE(::recv(reader.get(), all.data(), all.size(), MSG_WAITALL) == 400'000);
  mark.set(reader.get(), 100'000);
  send_all(writer, 1);
  CHECK_FALSE(readable(reader, 100));
  mark.set(reader.get(), 1);
  CHECK_FALSE(mark.may_hide_bytes());
  CHECK(readable(reader, 1000));
  mark.set(reader.get(), 100'000);
  writer.reset();
  CHECK(readable(reader, 1000));
}

// Takes every payload and throws it away.
struct Drain final : server::FrameSink {
  Buffer space = Buffer(1 << 20);
  std::size_t frames = 0;
  bool on_header(const FrameHeader&) override { return true; }
  bool on_meta(const FrameHeader&, Bytes) override { return true; }
  [[nodiscard]] bool payload_waits() const override { return false; }
  MutableBytes payload_space(std::size_t) override { return space; }
  bool on_payload(MutableBytes, bool) override { return true; }
  bool on_frame_end(const FrameHeader&) override { return ++frames != 0; }
  void on_fault(FrameFault) override { FAIL("the frame is faulty"); }
};

TEST_CASE("a small request behind large payload is told of when a turn ends between them") {
  constexpr std::size_t kPayload = 300'000;
  constexpr std::size_t kFirst = 100'000;
  auto [writer, reader] = connected();
  REQUIRE(::fcntl(reader.get(), F_SETFL, O_NONBLOCK) == 0);
  Drain sink;
  server::FrameReceiver receiver(reader.get(), sink);
  const Buffer large = Peer::frame(Peer::header(Opcode::kPut, 1, 0, 0), {}, Buffer(kPayload));
  const Buffer small = Peer::frame(Peer::header(Opcode::kPing, 2, kFlagEndOfRequest), {}, {});
  const auto send = [&writer = writer](Bytes bytes) {
    REQUIRE(::send(writer.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
            static_cast<ssize_t>(bytes.size()));
  };
  send(Bytes(large).first(kFirst));
  REQUIRE(readable(reader, 1000));
  while (receiver.bytes_received() < kFirst) (void)receiver.run(1 << 20);
  CHECK(receiver.run(1 << 20) == server::ReceiveResult::kDrained);
  CHECK(receiver.may_have_more());
  send(Bytes(large).subspan(kFirst));
  send(small);
  REQUIRE(readable(reader, 1000));
  while (sink.frames == 0) {  // in the smallest turns
    if (receiver.run(1) == server::ReceiveResult::kDrained) REQUIRE(readable(reader, 1000));
  }
  REQUIRE(readable(reader, 1000));
  CHECK(receiver.run(1 << 20) == server::ReceiveResult::kDrained);
  CHECK(sink.frames == 2);
}

TEST_CASE("a peer that sends slowly is waited for as long as it sends") {
  auto options = TestNode::options();
  options.server.stall_timeout_ms = 300;
  TestNode node(std::move(options));
  Peer peer = node.connect();
  const std::vector<Item> items{make_item(1, 0, 50'000)};
  peer.send_put_head(1, node.ns.id, items);
  RequestMeta last;
  last.checksum = xxh3_64(items[0].bytes);
  const Buffer frame = Peer::frame(Peer::header(Opcode::kPut, 1, kFlagLastOfItem | kFlagEndOfRequest, 0),
                                   Peer::encoded(last), items[0].bytes);
  for (std::size_t at = 0; at < frame.size(); at += 2'000) {
    peer.send(Bytes(frame).subspan(at, std::min<std::size_t>(2'000, frame.size() - at)));
    std::this_thread::sleep_for(50ms);
  }
  CHECK(peer.receive_frame().statuses() == std::vector<Status>{Status::kOk});
  CHECK(node.stat("stalls") == 0);
  check_bytes(peer.get(node.ns.id, items), items);
}

}  // namespace
}  // namespace dfkv::test
