// Connections that move payload go on to another thread once their handshake is over: what comes with it is
// not lost, and whoever leaves meanwhile leaves nothing behind.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <atomic>
#include <random>

#include "server_harness.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

Buffer hello_frame(Lane lane) {
  HelloMeta mine;
  mine.lane = lane;
  mine.nonce.fill(std::byte{7});
  Buffer meta;
  encode_hello(mine, meta);
  return Peer::frame(Peer::header(Opcode::kHello, 0), meta, {});
}

// A namespace and an object, as one run of bytes.
Buffer namespace_and_put(const TestNamespace& ns, const Item& item) {
  RequestMeta space;
  space.ns = ns.id;
  space.descriptor.assign(ns.descriptor.begin(), ns.descriptor.end());
  Buffer out = Peer::frame(Peer::header(Opcode::kPutNs, 1), Peer::encoded(space), {});
  RequestMeta head;
  head.ns = ns.id;
  const auto put = Peer::frame(Peer::header(Opcode::kPut, 2, 0), Peer::encoded(head), Peer::table_of({item}));
  out.insert(out.end(), put.begin(), put.end());
  RequestMeta last;
  last.checksum = xxh3_64(item.bytes);
  const auto payload = Peer::frame(Peer::header(Opcode::kPut, 2, kFlagLastOfItem | kFlagEndOfRequest, 0),
                                   Peer::encoded(last), item.bytes);
  out.insert(out.end(), payload.begin(), payload.end());
  return out;
}

}  // namespace

TEST_CASE("requests that come together with the handshake are answered, on either lane") {
  for (const auto lane : {Lane::kControl, Lane::kBulk}) {
    TestNode node;
    const Item item = make_item(1, 0, 300'000);
    Peer peer(node.node.port());
    Buffer all = hello_frame(lane);
    const Buffer requests = namespace_and_put(node.ns, item);
    all.insert(all.end(), requests.begin(), requests.end());
    peer.send(all);
    CHECK(peer.receive_frame().header.request_id == 0);
    CHECK(peer.receive_frame().reply().status == Status::kOk);
    CHECK(peer.receive_frame().statuses() == std::vector{Status::kOk});
    CHECK(peer.get(node.ns.id, {item}).bytes[0] == item.bytes);
  }
}

TEST_CASE("connections that come, move and go at random leave nothing behind") {
  const auto seed = std::random_device{}();
  MESSAGE("seed ", seed);
  TestNode node;
  const Item item = make_item(1, 0, 100'000);
  {
    Peer first = node.connect();
    CHECK(first.put(node.ns.id, {item}) == std::vector{Status::kOk});
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned self = 0; self < 4; ++self) {
    threads.emplace_back([&, self] {
      std::mt19937_64 random(seed + self);
      for (int i = 0; i < 150; ++i) {
        Peer peer(node.node.port());
        const Buffer hello = hello_frame(random() % 4 == 0 ? Lane::kControl : Lane::kBulk);
        const std::size_t sent = random() % 3 == 0 ? random() % hello.size() : hello.size();
        peer.send(Bytes(hello).first(sent));
        if (sent < hello.size() || random() % 2 == 0) {
          if (random() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
          random() % 2 == 0 ? peer.reset() : peer.disconnect();
          continue;
        }
        (void)peer.receive_frame();
        if (peer.put_namespace(node.ns.id, node.ns.descriptor) != Status::kOk ||
            peer.get(node.ns.id, {item}).bytes[0] != item.bytes) {
          ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("a node stops while connections are on the move") {
  for (int round = 0; round < 20; ++round) {
    TestNode node;
    std::vector<Peer> peers;
    for (int i = 0; i < 20; ++i) {
      peers.emplace_back(node.node.port());
      peers.back().send(hello_frame(Lane::kBulk));
    }
    CHECK(node.node.stop(Clock::now() + 10s));
    for (Peer& peer : peers) peer.disconnect();
  }
}
