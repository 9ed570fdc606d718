// The client against peers that are wrong, slow, silent or gone: never a wrong success, never beyond the
// deadline, never a byte of the caller's memory after the end.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <algorithm>

#include "net/client.h"
#include "net/client_node.h"
#include "tests/client_harness.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

constexpr std::size_t kObjectBytes = 2 * 1024 * 1024 + 100;
// What a busy machine may add to a deadline before a test calls it late.
constexpr double kLateMs = 400;

struct Fixture {
  FakePeer peer;
  std::unique_ptr<Client> client;
  NamespaceId ns;
  std::mt19937_64 random{17};
  ByteVector bytes = random_bytes(kObjectBytes, random);

  explicit Fixture(std::uint32_t connections = 1, std::uint32_t stall_timeout_ms = 5000) {
    auto options = options_for(peer.port);
    options.connections_per_node = connections;
    options.connect_timeout_ms = 2000;
    options.stall_timeout_ms = stall_timeout_ms;
    client = std::make_unique<Client>(options);
    ns = add_test_namespace(*client);
    peer.store(block_of(1), 0, bytes);
    peer.store(block_of(2), 0, ByteVector(bytes.begin(), bytes.begin() + 1000));
  }
  ~Fixture() { peer.stop(); }  // its hooks refer to what goes first otherwise
  Fixture(const Fixture&) = delete;
  Fixture& operator=(const Fixture&) = delete;
  // Gets object 1 into `memory` and object 2 into `small`.
  std::shared_ptr<Operation> get_both(ByteVector& memory, ByteVector& small,
                                      std::chrono::nanoseconds deadline = 5s) {
    return Batch(Kind::kGet, ns)
        .item(block_of(1), 0, memory)
        .item(block_of(2), 0, small)
        .submit(*client, deadline);
  }
  void check_works(std::chrono::nanoseconds deadline = 3s) {
    ByteVector memory(kObjectBytes);
    ByteVector small(1000);
    const auto op = get_both(memory, small, deadline);
    REQUIRE(op->wait(10s));
    CHECK(name_of(status_of(*op, 0)) == "ok");
    CHECK(name_of(status_of(*op, 1)) == "ok");
    CHECK(memory == bytes);
  }
  ReplyMeta meta_of(Bytes object) {
    ReplyMeta meta;
    meta.length = object.size();
    meta.checksum = xxh3_64(object);
    return meta;
  }
  // Answers the first GET with `fault`, and later ones properly.
  void fail_get_once(std::function<void(FakePeer::Conn&, const Frame&)> fault) {
    auto left = std::make_shared<std::atomic<int>>(1);
    peer.set_hook([left, fault = std::move(fault)](FakePeer::Conn& conn, const Frame& frame) {
      if (frame.opcode() != Opcode::kGet || left->fetch_sub(1) <= 0) return false;
      fault(conn, frame);
      return true;
    });
  }
};

ByteVector table(std::initializer_list<Status> statuses) {
  ByteVector out;
  for (const auto status : statuses) {
    const auto value = static_cast<std::uint16_t>(status);
    const auto bytes = as_bytes(&value, 2);
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  return out;
}

// Memory of its own pages, which can be taken away.
class Pages {
 public:
  explicit Pages(std::size_t size)
      : size_((size + 4095) & ~std::size_t{4095}),
        data_(::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    REQUIRE(data_ != MAP_FAILED);
  }
  ~Pages() { ::munmap(data_, size_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  void forbid() { REQUIRE(::mprotect(data_, size_, PROT_NONE) == 0); }
  [[nodiscard]] std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(data_); }

 private:
  std::size_t size_;
  void* data_;
};

}  // namespace

TEST_CASE("a wrong byte is a miss of its key alone") {
  Fixture f;
  f.fail_get_once([&](FakePeer::Conn& conn, const Frame& frame) {
    auto wrong = f.bytes;
    wrong[1'500'000] ^= std::byte{1};
    const auto meta = f.meta_of(f.bytes);
    conn.fragment(frame, 0, false, &meta, Bytes(wrong).first(1 << 20));
    conn.fragment(frame, 0, false, nullptr, Bytes(wrong).subspan(1 << 20, 1 << 20));
    conn.fragment(frame, 0, true, nullptr, Bytes(wrong).subspan(2 << 20));
    conn.object(frame, 1, *f.peer.load(block_of(2), 0));
    conn.reply(frame, {}, table({Status::kOk, Status::kOk}));
  });
  ByteVector memory(kObjectBytes);
  ByteVector small(1000);
  const auto op = f.get_both(memory, small);
  REQUIRE(op->wait(5s));
  CHECK(name_of(status_of(*op, 0)) == "corrupt");
  CHECK(name_of(status_of(*op, 1)) == "ok");
  CHECK(f.client->counters().checksum_failures.load() == 1);
  CHECK(f.client->counters().disconnects.load() == 0);
  CHECK(f.client->counters().cooldowns.load() == 0);
  f.check_works();
}

TEST_CASE("another length is a miss of its key alone, and writes nothing") {
  Fixture f;
  for (const std::size_t length : {std::size_t{100}, std::size_t{5000}}) {
    f.fail_get_once([&](FakePeer::Conn& conn, const Frame& frame) {
      conn.object(frame, 0, f.bytes);
      conn.object(frame, 1, Bytes(f.bytes).first(length));
      conn.reply(frame, {}, table({Status::kOk, Status::kOk}));
    });
    ByteVector memory(kObjectBytes);
    ByteVector small(1000, std::byte{0xEE});
    const auto op = f.get_both(memory, small);
    REQUIRE(op->wait(5s));
    CHECK(name_of(status_of(*op, 0)) == "ok");
    CHECK(name_of(status_of(*op, 1)) == "length");
    CHECK(std::ranges::all_of(small, [](std::byte b) { return b == std::byte{0xEE}; }));
  }
  CHECK(f.client->counters().length_mismatches.load() == 2);
  f.check_works();
}

TEST_CASE("a node that says ok without sending is not believed") {
  Fixture f;
  f.fail_get_once([&](FakePeer::Conn& conn, const Frame& frame) {
    conn.object(frame, 0, f.bytes);
    conn.reply(frame, {}, table({Status::kMissNotFound, Status::kOk}));
  });
  ByteVector memory(kObjectBytes);
  ByteVector small(1000);
  const auto op = f.get_both(memory, small);
  REQUIRE(op->wait(5s));
  CHECK(name_of(status_of(*op, 0)) == "ok");  // it came and it is right
  CHECK(name_of(status_of(*op, 1)) == "corrupt");
  f.check_works();
}

TEST_CASE("frames that cannot be: the connection goes, and nothing is a wrong success") {
  struct Fault {
    const char* name;
    std::function<void(Fixture&, FakePeer::Conn&, const Frame&)> act;
  };
  const std::vector<Fault> faults = {
      {"garbage", [](Fixture& f, auto& conn, auto&) { conn.send_raw(Bytes(f.bytes).first(4096)); }},
      {"garbage inside an object",
       [](Fixture& f, auto& conn, auto& frame) {
         const auto meta = f.meta_of(f.bytes);
         conn.fragment(frame, 0, false, &meta, Bytes(f.bytes).first(1000));
         conn.send_raw(Bytes(f.bytes).first(4096));
       }},
      {"an item beyond the batch",
       [](Fixture& f, auto& conn, auto& frame) { conn.object(frame, 2, f.bytes); }},
      {"an item twice",
       [](Fixture& f, auto& conn, auto& frame) {
         conn.object(frame, 1, Bytes(f.bytes).first(1000));
         conn.object(frame, 1, Bytes(f.bytes).first(1000));
       }},
      {"a fragment of another item in between",
       [](Fixture& f, auto& conn, auto& frame) {
         const auto meta = f.meta_of(f.bytes);
         conn.fragment(frame, 0, false, &meta, Bytes(f.bytes).first(1000));
         conn.object(frame, 1, Bytes(f.bytes).first(1000));
       }},
      {"the rest of an item under another number",
       [](Fixture& f, auto& conn, auto& frame) {
         const auto meta = f.meta_of(f.bytes);
         conn.fragment(frame, 0, false, &meta, Bytes(f.bytes).first(1 << 20));
         conn.fragment(frame, 1, false, nullptr, Bytes(f.bytes).subspan(1 << 20, 1 << 20));
         conn.fragment(frame, 1, true, nullptr, Bytes(f.bytes).subspan(2 << 20));
       }},
      {"more than the length",
       [](Fixture& f, auto& conn, auto& frame) {
         const auto meta = f.meta_of(Bytes(f.bytes).first(1000));
         conn.fragment(frame, 1, true, &meta, Bytes(f.bytes).first(1001));
       }},
      {"last too early",
       [](Fixture& f, auto& conn, auto& frame) {
         const auto meta = f.meta_of(Bytes(f.bytes).first(1000));
         conn.fragment(frame, 1, true, &meta, Bytes(f.bytes).first(999));
       }},
      {"not last at the end",
       [](Fixture& f, auto& conn, auto& frame) {
         const auto meta = f.meta_of(Bytes(f.bytes).first(1000));
         conn.fragment(frame, 1, false, &meta, Bytes(f.bytes).first(1000));
       }},
      {"a first fragment without checksum",
       [](Fixture& f, auto& conn, auto& frame) {
         auto meta = f.meta_of(Bytes(f.bytes).first(1000));
         meta.checksum.reset();
         conn.fragment(frame, 1, true, &meta, Bytes(f.bytes).first(1000));
       }},
      {"an empty fragment",
       [](Fixture& f, auto& conn, auto& frame) {
         const auto meta = f.meta_of(f.bytes);
         conn.fragment(frame, 0, false, &meta, {});
       }},
      {"a table of another size",
       [](Fixture&, auto& conn, auto& frame) { conn.reply(frame, {}, table({Status::kOk})); }},
      {"a reply to nobody",
       [](Fixture&, auto& conn, const Frame& frame) {
         Frame other = frame;
         other.header.request_id += 1000;
         conn.reply(other, {});
       }},
      {"another opcode",
       [](Fixture&, auto& conn, const Frame& frame) {
         Frame other = frame;
         other.header.opcode = static_cast<std::uint8_t>(Opcode::kExists);
         conn.reply(other, {}, table({Status::kOk, Status::kOk}));
       }},
      {"a request instead of a reply",
       [](Fixture&, auto& conn, const Frame& frame) {
         conn.send_raw(
             FakePeer::Conn::encode(Opcode::kGet, frame.header.request_id, kWholeRequest, 4, {}, {}));
       }},
      {"a payload above the limit",
       [](Fixture&, auto& conn, const Frame& frame) {
         FrameHeader header;
         header.opcode = frame.header.opcode;
         header.flags = kFlagReply;
         header.request_id = frame.header.request_id;
         header.item = 0;
         header.payload_bytes = 0xFFFFFFF0;
         std::array<std::byte, kFrameHeaderBytes> bytes;
         encode_frame_header(header, bytes);
         conn.send_raw(bytes);
       }},
  };
  for (const auto& fault : faults) {
    CAPTURE(fault.name);
    Fixture f;
    f.check_works();
    f.fail_get_once([&](FakePeer::Conn& conn, const Frame& frame) {
      fault.act(f, conn, frame);
      conn.pause(200ms);
    });
    ByteVector memory(kObjectBytes);
    ByteVector small(1000);
    const auto op = f.get_both(memory, small, 2s);
    REQUIRE(op->wait(5s));
    for (std::size_t key = 0; key < 2; ++key) {
      const auto& expected = key == 0 ? f.bytes : *f.peer.load(block_of(2), 0);
      const bool right = (key == 0 ? memory : small) == expected;
      CHECK((name_of(status_of(*op, key)) == "corrupt" || (status_of(*op, key) == Status::kOk && right)));
    }
    CHECK(f.client->counters().protocol_faults.load() == 1);
    // It is tried again soon: the fault was this connection's.
    CHECK(eventually([&] {
      ByteVector again(1000);
      const auto retry = Batch(Kind::kGet, f.ns).item(block_of(2), 0, again).submit(*f.client, 1s);
      return retry->wait(5s) && status_of(*retry) == Status::kOk;
    }));
  }
}

TEST_CASE("a node that stops inside a payload costs the deadline, and the memory is never touched again") {
  Fixture f;
  f.check_works();
  std::atomic<bool> go_on{false};
  f.fail_get_once([&](FakePeer::Conn& conn, const Frame& frame) {
    const auto meta = f.meta_of(f.bytes);
    const auto first = FakePeer::Conn::encode(
        Opcode::kGet, frame.header.request_id, 0, kFlagReply,
        [&] {
          ByteVector encoded;
          encode_reply(meta, encoded);
          return encoded;
        }(),
        Bytes(f.bytes).first(1 << 20));
    conn.send_raw(Bytes(first).first(500'000));
    while (!go_on) conn.pause(1ms);
    conn.send_raw(Bytes(first).subspan(500'000));
    conn.fragment(frame, 0, false, nullptr, Bytes(f.bytes).subspan(1 << 20, 1 << 20));
    conn.fragment(frame, 0, true, nullptr, Bytes(f.bytes).subspan(2 << 20));
    conn.reply(frame, {}, table({Status::kOk, Status::kOk}));
  });
  ByteVector memory(kObjectBytes);
  ByteVector small(1000);
  const auto start = Clock::now();
  const auto op = f.get_both(memory, small, 100ms);
  REQUIRE(op->wait(5s));
  CHECK(milliseconds_since(start) < 100 + kLateMs);
  CHECK(milliseconds_since(start) >= 99);
  CHECK(name_of(status_of(*op, 0)) == "deadline");
  CHECK(name_of(status_of(*op, 1)) == "deadline");
  // Some of it had arrived; from here on nothing changes, although the node sends all the rest.
  CHECK(std::equal(memory.begin(), memory.begin() + 1000, f.bytes.begin()));
  std::ranges::fill(memory, std::byte{0xAA});
  std::ranges::fill(small, std::byte{0xAA});
  const auto received = f.client->counters().bytes_received.load();
  go_on = true;
  CHECK(eventually([&] { return f.client->counters().bytes_received.load() >= received + 1'500'000; }));
  f.check_works();
  const auto untouched = [](std::byte b) { return b == std::byte{0xAA}; };
  CHECK(std::ranges::all_of(memory, untouched));
  CHECK(std::ranges::all_of(small, untouched));
  // The node went on in time: the connection was kept, and the node was never out of use.
  CHECK(f.client->counters().disconnects.load() == 0);
  CHECK(f.client->counters().cooldowns.load() == 0);
  CHECK(f.client->counters().deadline_hits.load() == 1);
  CHECK(f.peer.seen[static_cast<int>(Opcode::kCancel)] == 1);
  f.peer.stop();  // before what its hook refers to goes
}

TEST_CASE("a connection that a stalled operation leaves half-way does not hold up the next") {
  Fixture f(1, 200);
  f.check_works();
  f.fail_get_once([&](FakePeer::Conn& conn, const Frame& frame) {
    const auto meta = f.meta_of(f.bytes);
    conn.fragment(frame, 0, false, &meta, Bytes(f.bytes).first(1000));
    conn.pause(10s);  // its thread serves nothing else
  });
  ByteVector memory(kObjectBytes);
  ByteVector small(1000);
  const auto op = f.get_both(memory, small, 50ms);
  REQUIRE(op->wait(5s));
  CHECK(name_of(status_of(*op, 0)) == "deadline");
  const auto start = Clock::now();
  f.check_works(8s);  // waits for the connection to be given up, and is tried again on a fresh one
  CHECK(milliseconds_since(start) < 200 + 4 * kLateMs);
  CHECK(f.client->counters().stalled_connections.load() == 1);
  CHECK(f.client->counters().retries.load() == 1);
  CHECK(f.client->counters().cooldowns.load() == 0);
}

TEST_CASE("a node that sends a drop at a time is given up too") {
  Fixture f(1, 200);
  f.check_works();
  f.fail_get_once([&](FakePeer::Conn& conn, const Frame& frame) {
    const auto meta = f.meta_of(f.bytes);
    ByteVector encoded;
    encode_reply(meta, encoded);
    const auto all = FakePeer::Conn::encode(Opcode::kGet, frame.header.request_id, 0, kFlagReply, encoded,
                                            Bytes(f.bytes).first(1 << 20));
    for (std::size_t at = 0; at < 400; ++at) {
      if (!conn.send_raw(Bytes(all).subspan(at, 1))) return;
      conn.pause(20ms);
    }
  });
  ByteVector memory(kObjectBytes);
  ByteVector small(1000);
  const auto op = f.get_both(memory, small, 50ms);
  REQUIRE(op->wait(5s));
  const auto start = Clock::now();
  f.check_works(10s);
  CHECK(milliseconds_since(start) < 1000 + 5 * kLateMs);
  CHECK(f.client->counters().stalled_connections.load() == 1);
}

TEST_CASE("a put whose node does not read costs the deadline, and the memory can be taken away") {
  Fixture f;
  f.check_works();
  std::atomic<bool> stop{false};
  std::atomic<bool> stopped{false};
  f.peer.set_hook([&](FakePeer::Conn& conn, const Frame& frame) {
    if (frame.opcode() != Opcode::kPut || frame.header.item == kWholeRequest) return false;
    stopped = true;
    while (!stop) conn.pause(1ms);
    return false;
  });
  constexpr std::size_t kItems = 4;
  constexpr std::size_t kItemBytes = 16 << 20;  // more than the socket takes
  Pages pages(kItems * kItemBytes);
  Batch put(Kind::kPut, f.ns);
  for (std::size_t i = 0; i < kItems; ++i) {
    put.item(block_of(100 + i), 0, {{pages.address() + i * kItemBytes, kItemBytes}});
  }
  const auto start = Clock::now();
  const auto op = put.submit(*f.client, 150ms);
  REQUIRE(op->wait(5s));
  CHECK(milliseconds_since(start) < 150 + kLateMs);
  pages.forbid();  // whoever reads it now gets a fault
  CHECK(stopped);
  for (std::size_t i = 0; i < kItems; ++i) CHECK(name_of(status_of(*op, i)) == "deadline");
  stop = true;  // the rest goes out: filler and withdrawals
  CHECK(eventually([&] { return f.client->counters().round_trips.load() >= 4; }));
  for (std::size_t i = 0; i < kItems; ++i) CHECK(!f.peer.load(block_of(100 + i), 0));
  f.check_works();
  CHECK(f.client->counters().disconnects.load() == 0);
  CHECK(f.peer.bad_frames == 0);
  f.peer.stop();  // before what its hook refers to goes
}

TEST_CASE("saves that the node does not read hold up no load") {
  FakePeer peer;
  auto options = options_for(peer.port);
  options.connections_per_node = 2;
  Client client(options);
  const auto ns = add_test_namespace(client);
  std::atomic<bool> stop{false};
  std::atomic<int> stopped{0};
  peer.set_hook([&](FakePeer::Conn& conn, const Frame& frame) {
    if (frame.opcode() != Opcode::kPut || frame.header.item == kWholeRequest) return false;
    ++stopped;
    while (!stop) conn.pause(1ms);
    return false;
  });
  const ByteVector stored(300'000, std::byte{7});
  peer.store(block_of(1), 0, stored);
  REQUIRE(eventually([&] { return client.counters().connects.load() >= 4; }));  // all of them stand
  std::vector<ByteVector> memory(6, ByteVector(4 << 20, std::byte{1}));
  std::vector<std::shared_ptr<Operation>> saves;
  for (std::size_t i = 0; i < memory.size(); ++i) {
    saves.push_back(Batch(Kind::kPut, ns).item(block_of(100 + i), 0, memory[i]).submit(client, 10s));
  }
  REQUIRE(eventually([&] { return stopped > 0; }));
  for (int i = 0; i < 20; ++i) {
    ByteVector into(stored.size());
    const auto load = Batch(Kind::kGet, ns).item(block_of(1), 0, into).submit(client, 2s);
    REQUIRE(load->wait(5s));
    CHECK(name_of(status_of(*load, 0)) == "ok");
    CHECK(into == stored);
  }
  stop = true;
  for (const auto& save : saves) {
    REQUIRE(save->wait(10s));
    CHECK(name_of(status_of(*save, 0)) == "ok");
  }
  peer.stop();  // before what its hook refers to goes
}

TEST_CASE("cancel returns with the memory detached") {
  Fixture f;
  f.check_works();
  std::atomic<bool> hold{true};
  f.fail_get_once([&](FakePeer::Conn& conn, const Frame& frame) {
    const auto meta = f.meta_of(f.bytes);
    conn.fragment(frame, 0, false, &meta, Bytes(f.bytes).first(1 << 20));
    while (hold) conn.pause(1ms);
    conn.fragment(frame, 0, false, nullptr, Bytes(f.bytes).subspan(1 << 20, 1 << 20));
    conn.fragment(frame, 0, true, nullptr, Bytes(f.bytes).subspan(2 << 20));
    conn.reply(frame, {}, table({Status::kOk, Status::kMissCancelled}));
  });
  Pages pages(kObjectBytes);
  ByteVector small(1000);
  const auto op = Batch(Kind::kGet, f.ns)
                      .item(block_of(1), 0, {{pages.address(), kObjectBytes}})
                      .item(block_of(2), 0, small)
                      .submit(*f.client, 30s);
  CHECK(eventually([&] { return f.client->counters().bytes_received.load() > 3'000'000; }));
  const auto start = Clock::now();
  Operation::cancel(op);
  CHECK(milliseconds_since(start) < kLateMs);
  REQUIRE(op->done());
  pages.forbid();
  CHECK(name_of(status_of(*op, 0)) == "cancelled");
  hold = false;
  f.check_works();
  CHECK(f.client->counters().disconnects.load() == 0);
  f.peer.stop();  // before what its hook refers to goes
}

TEST_CASE("a slow node does not go out of use because of deadlines") {
  Fixture f;
  f.check_works();
  f.peer.set_hook([&](FakePeer::Conn& conn, const Frame& frame) {
    if (frame.opcode() == Opcode::kExists) conn.pause(120ms);
    return false;
  });
  const auto ask = [&](std::chrono::milliseconds deadline) {
    const auto op = Batch(Kind::kExists, f.ns).parts({0}).chunk(block_of(1)).submit(*f.client, deadline);
    REQUIRE(op->wait(5s));
    return name_of(status_of(*op));
  };
  CHECK(ask(30ms) == "deadline");
  CHECK(ask(2000ms) == "ok");
  CHECK(f.client->counters().cooldowns.load() == 0);
  CHECK(f.client->counters().disconnects.load() == 0);
}

TEST_CASE("a dead node is a miss at once, and is in use again within two seconds of its return") {
  auto peer = std::make_unique<FakePeer>();
  const auto port = peer->port;
  Client client(options_for(port));
  const auto ns = add_test_namespace(client);
  const auto ask = [&](std::chrono::milliseconds deadline) {
    const auto op = Batch(Kind::kExists, ns).parts({0}).chunk(block_of(1)).submit(client, deadline);
    REQUIRE(op->wait(10s));
    return name_of(status_of(*op));
  };
  CHECK(ask(3000ms) == "not_found");
  peer->stop();
  CHECK(eventually([&] { return client.counters().cooldowns.load() >= 2; }));
  for (int i = 0; i < 20; ++i) {
    const auto start = Clock::now();
    CHECK(ask(5000ms) == "node_down");
    CHECK(milliseconds_since(start) < kLateMs);
  }
  peer = std::make_unique<FakePeer>("node-a", port);
  peer->store(block_of(1), 0, ByteVector(5));
  CHECK(eventually([&] { return ask(100ms) == "ok"; }, 2000ms));
  CHECK(client.counters().reconnects.load() >= 1);
}

TEST_CASE("a node that accepts and says nothing goes out of use after the handshake's time") {
  // A listener whose process is stopped: the kernel still accepts.
  Fd listener(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  REQUIRE(::listen(listener.get(), 16) == 0);
  socklen_t size = sizeof address;
  ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size);
  FakePeer seed;
  View view;
  view.revision = 2;
  view.nodes.resize(1);
  view.nodes[0].id = "silent";
  view.nodes[0].tcp = {"127.0.0.1:" + std::to_string(ntohs(address.sin_port))};
  seed.set_view(view);
  auto options = options_for(seed.port);
  options.connect_timeout_ms = 200;
  Client client(options);
  const auto ns = add_test_namespace(client);
  const auto start = Clock::now();
  const auto op = Batch(Kind::kExists, ns).parts({0}).chunk(block_of(1)).submit(client, 5s);
  REQUIRE(op->wait(10s));
  CHECK(name_of(status_of(*op)) == "node_down");
  CHECK(milliseconds_since(start) < 200 + 2 * kLateMs);
  const auto again = Clock::now();
  const auto second = Batch(Kind::kExists, ns).parts({0}).chunk(block_of(1)).submit(client, 5s);
  REQUIRE(second->wait(10s));
  CHECK(milliseconds_since(again) < kLateMs);
}

TEST_CASE("a connection the server closed while idle costs nothing") {
  Fixture f;
  f.check_works();
  f.peer.drop_connections();
  f.check_works();
  CHECK(f.client->counters().cooldowns.load() == 0);
}

TEST_CASE("one second try, on a fresh connection") {
  Fixture f(2);
  f.check_works();
  REQUIRE(eventually([&] { return f.client->counters().connects.load() >= 4; }));
  const int before = f.peer.accepted;
  std::atomic<int> closed_before{0};
  std::atomic<int> answered_on{-1};
  std::atomic<int> gets{0};
  f.peer.set_hook([&](FakePeer::Conn& conn, const Frame& frame) {
    if (frame.opcode() != Opcode::kGet) return false;
    ++gets;
    if (conn.number < before) {
      ++closed_before;
      conn.shut();
      return true;
    }
    answered_on = conn.number;
    return false;
  });
  const auto get_small = [&] {
    ByteVector small(1000);
    const auto op = Batch(Kind::kGet, f.ns).item(block_of(2), 0, small).submit(*f.client);
    REQUIRE(op->wait(10s));
    return name_of(status_of(*op));
  };
  CHECK(get_small() == "ok");
  CHECK(gets == 2);
  CHECK(closed_before == 1);
  CHECK(answered_on >= before);
  // A node that closes at every request is asked twice, not for ever.
  gets = 0;
  f.peer.set_hook([&](FakePeer::Conn& conn, const Frame& frame) {
    if (frame.opcode() != Opcode::kGet) return false;
    ++gets;
    conn.shut();
    return true;
  });
  CHECK(get_small() == "node_down");
  CHECK(gets == 2);
  f.peer.stop();  // before what its hook refers to goes
}

TEST_CASE("a second try gets only what is missing") {
  Fixture f;
  f.check_works();
  std::vector<std::size_t> sizes;
  std::mutex mutex;
  f.peer.set_hook([&](FakePeer::Conn& conn, const Frame& frame) {
    std::vector<ItemRef> items;
    if (frame.opcode() != Opcode::kGet || !decode_item_table(frame.payload, items)) return false;
    const std::lock_guard lock(mutex);
    sizes.push_back(items.size());
    if (sizes.size() > 1) return false;
    conn.object(frame, 0, f.bytes);
    conn.shut();
    return true;
  });
  ByteVector memory(kObjectBytes);
  ByteVector small(1000);
  const auto op = f.get_both(memory, small, 5s);
  REQUIRE(op->wait(10s));
  CHECK(name_of(status_of(*op, 0)) == "ok");
  CHECK(name_of(status_of(*op, 1)) == "ok");
  CHECK(memory == f.bytes);
  CHECK(sizes == std::vector<std::size_t>{2, 1});
  f.peer.stop();  // before what its hook refers to goes
}

TEST_CASE("leases that come too late are given back") {
  Fixture f;
  f.check_works();
  f.peer.set_hook([&](FakePeer::Conn& conn, const Frame& frame) {
    if (frame.opcode() == Opcode::kExists) conn.pause(100ms);
    return false;
  });
  Batch exists(Kind::kExists, f.ns);
  exists.parts({0}).chunk(block_of(1));
  exists.input.lease_ms = 10'000;
  const auto op = exists.submit(*f.client, 20ms);
  REQUIRE(op->wait(5s));
  CHECK(op->leases().empty());
  CHECK(eventually([&] { return f.peer.released_lease == 77; }));
  CHECK(f.client->counters().late_leases_released.load() == 1);
}

TEST_CASE("secrets are proved in both directions") {
  const auto ask = [](FakePeer& peer, std::optional<std::string> secret) {
    auto options = options_for(peer.port);
    if (secret) {
      const auto bytes = as_bytes(secret->data(), secret->size());
      options.secret = ByteVector(bytes.begin(), bytes.end());
    }
    Client client(options);
    const auto ns = add_test_namespace(client);
    const auto op = Batch(Kind::kExists, ns).parts({0}).chunk(block_of(1)).submit(client, 3s);
    REQUIRE(op->wait(5s));
    return name_of(status_of(*op));
  };
  FakePeer open;
  FakePeer locked;
  locked.set_secret("right");
  CHECK(ask(open, std::nullopt) == "not_found");
  CHECK(ask(locked, "right") == "not_found");
  CHECK(ask(locked, "wrong") == "node_down");
  CHECK(ask(locked, std::nullopt) == "node_down");
  CHECK(ask(open, "right") == "node_down");
  // A node that takes any proof but has none of its own.
  FakePeer impostor;
  impostor.set_secret("right");
  impostor.set_hook([](FakePeer::Conn& conn, const Frame& frame) {
    if (frame.opcode() != Opcode::kAuth) return false;
    ReplyMeta reply;
    reply.mac.assign(32, std::byte{1});
    return conn.reply(frame, reply);
  });
  CHECK(ask(impostor, "right") == "node_down");
}

TEST_CASE("a first operation waits for the connection, and no longer than for its deadline") {
  FakePeer peer;
  peer.set_hook([](FakePeer::Conn& conn, const Frame& frame) {
    if (frame.opcode() == Opcode::kHello) conn.pause(100ms);
    return false;
  });
  {
    Client client(options_for(peer.port));
    const auto ns = add_test_namespace(client);
    const auto op = Batch(Kind::kExists, ns).parts({0}).chunk(block_of(1)).submit(client, 3s);
    REQUIRE(op->wait(5s));
    CHECK(name_of(status_of(*op)) == "not_found");
  }
  {
    Client client(options_for(peer.port));
    const auto ns = add_test_namespace(client);
    const auto start = Clock::now();
    const auto op = Batch(Kind::kExists, ns).parts({0}).chunk(block_of(1)).submit(client, 30ms);
    REQUIRE(op->wait(5s));
    CHECK(name_of(status_of(*op)) == "deadline");
    CHECK(milliseconds_since(start) < 30 + kLateMs);
  }
}

TEST_CASE("no seed answers: a miss at once, until one does") {
  auto peer = std::make_unique<FakePeer>();
  const auto port = peer->port;
  peer.reset();
  Client client(options_for(port));
  const auto ns = add_test_namespace(client);
  const auto ask = [&] {
    const auto op = Batch(Kind::kExists, ns).parts({0}).chunk(block_of(1)).submit(client, 5s);
    REQUIRE(op->wait(10s));
    return name_of(status_of(*op));
  };
  const auto start = Clock::now();
  CHECK(ask() == "node_down");
  CHECK(milliseconds_since(start) < kLateMs);
  peer = std::make_unique<FakePeer>("node-a", port);
  CHECK(eventually([&] { return ask() == "not_found"; }, 2000ms));
}

TEST_CASE("the pauses between attempts grow and stay bounded") {
  using client::reconnect_delay_ms;
  CHECK(reconnect_delay_ms(0, 500) == 0);
  CHECK(reconnect_delay_ms(1, 500) == 50);
  CHECK(reconnect_delay_ms(2, 500) == 100);
  CHECK(reconnect_delay_ms(100, 500) == 500);
  CHECK(reconnect_delay_ms(100, 60'000) == 500);
  CHECK(reconnect_delay_ms(100, 0) == 10);
}

TEST_CASE("random deadlines and cancels under a node that stutters: no wrong byte, no late byte, no wait") {
  Fixture f(2);
  const std::uint64_t seed = std::random_device{}();
  INFO("seed ", seed);
  std::atomic<std::uint64_t> noise{seed};
  f.peer.set_hook([&](FakePeer::Conn& conn, const Frame& frame) {
    std::mt19937_64 mine(noise.fetch_add(0x9E3779B97F4A7C15ULL));
    if (frame.opcode() != Opcode::kGet) return false;
    std::vector<ItemRef> items;
    REQUIRE(decode_item_table(frame.payload, items));
    ByteVector statuses;
    for (std::uint32_t i = 0; i < items.size(); ++i) {
      if (mine() % 4 == 0) conn.pause(std::chrono::milliseconds(mine() % 8));
      conn.object(frame, i, *f.peer.load(items[i].block, 0), 1 + mine() % 200'000);
    }
    return conn.reply(frame, {}, ByteVector(items.size() * 2));
  });
  std::mt19937_64 random(seed);
  std::vector<ByteVector> stored;
  for (std::uint64_t i = 0; i < 6; ++i) {
    stored.push_back(random_bytes(30'000 + random() % 400'000, random));
    f.peer.store(block_of(50 + i), 0, stored.back());
  }
  struct Ended {
    std::vector<ByteVector> memory;
    std::shared_ptr<Operation> op;
  };
  std::deque<Ended> canaries;
  int done = 0;
  int late = 0;
  for (int round = 0; round < 120; ++round) {
    Ended now;
    now.memory.resize(6);
    Batch batch(Kind::kGet, f.ns);
    for (std::uint64_t i = 0; i < 6; ++i) {
      now.memory[i].resize(stored[i].size());
      batch.item(block_of(50 + i), 0, cut_randomly(now.memory[i], 5, random));
    }
    const auto deadline = std::chrono::microseconds(100 + random() % 20'000);
    const auto start = Clock::now();
    now.op = batch.submit(*f.client, deadline);
    if (random() % 4 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      Operation::cancel(now.op);
    }
    REQUIRE(now.op->wait(10s));
    late += milliseconds_since(start) > 20 + kLateMs ? 1 : 0;
    for (std::size_t i = 0; i < 6; ++i) {
      const auto status = status_of(*now.op, i);
      if (status == Status::kOk) {
        ++done;
        CHECK(now.memory[i] == stored[i]);
      } else {
        CHECK((status == Status::kMissDeadline || status == Status::kMissCancelled ||
               status == Status::kMissNodeDown));
      }
      std::ranges::fill(now.memory[i], std::byte{0x5C});
    }
    canaries.push_back(std::move(now));
    if (canaries.size() < 20) continue;
    for (const auto& memory : canaries.front().memory) {
      CHECK(std::ranges::all_of(memory, [](std::byte b) { return b == std::byte{0x5C}; }));
    }
    canaries.pop_front();
  }
  CHECK(late == 0);
  CHECK(done > 0);
  CHECK(f.client->counters().protocol_faults.load() == 0);
  CHECK(f.client->counters().checksum_failures.load() == 0);
  CHECK(f.client->counters().inflight_operations.load() == 0);
  f.peer.stop();  // before what its hook refers to goes
}
