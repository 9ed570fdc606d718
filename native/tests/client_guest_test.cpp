// Threads that wait for lookups do the client's work meanwhile: many of them at once, with deadlines,
// cancellations, connections that break and the end of the client in between.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <atomic>
#include <random>
#include <thread>

#include "net/client.h"
#include "tests/client_harness.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

std::shared_ptr<Operation> look_up(Client& client, const NamespaceId& ns, std::uint64_t block,
                                   std::chrono::nanoseconds deadline, std::chrono::nanoseconds wait = 10s) {
  auto batch = Batch(Kind::kExists, ns);
  batch.parts({0}).chunk(block_of(block)).chunk(block_of(block + 1000));
  return client.ask(std::move(batch.input), deadline, wait);
}

}  // namespace

TEST_CASE("a lookup that begins on the calling thread comes after what the thread asked for before") {
  FakePeer peer;
  peer.store(block_of(1), 0, ByteVector(10));
  Client client(options_for(peer.port));
  REQUIRE(client.wait_ready(5s));
  // Its namespace is told first, also when the I/O thread has not looked yet.
  const auto ns = add_test_namespace(client);
  const auto op = look_up(client, ns, 1, 5s);
  REQUIRE(op->done());
  CHECK(name_of(status_of(*op, 0)) == "ok");
  CHECK(name_of(status_of(*op, 1)) == "not_found");
  CHECK(op->prefix() == 1);
}

TEST_CASE("a deadline ends the wait of a thread that does the client's work") {
  FakePeer peer;
  Client client(options_for(peer.port));
  const auto ns = add_test_namespace(client);
  REQUIRE(look_up(client, ns, 1, 5s)->done());
  peer.set_hook([](FakePeer::Conn&, const Frame& frame) { return frame.opcode() == Opcode::kExists; });
  const auto start = Clock::now();
  const auto op = look_up(client, ns, 1, 100ms);
  REQUIRE(op->done());
  CHECK(name_of(status_of(*op)) == "deadline");
  CHECK(Clock::now() - start >= 100ms);
  CHECK(Clock::now() - start < 2s);
  peer.stop();
}

TEST_CASE("the end of the client ends the wait of a thread that does its work") {
  FakePeer peer;
  const auto client = std::make_unique<Client>(options_for(peer.port));
  const auto ns = add_test_namespace(*client);
  REQUIRE(look_up(*client, ns, 1, 5s)->done());
  peer.set_hook([](FakePeer::Conn&, const Frame& frame) { return frame.opcode() == Opcode::kExists; });
  std::thread closer([&] {
    std::this_thread::sleep_for(100ms);
    CHECK(client->close(10s));
  });
  const auto op = look_up(*client, ns, 1, 60s, 30s);
  REQUIRE(op->done());
  CHECK(name_of(status_of(*op)) == "cancelled");
  closer.join();
  CHECK_THROWS_AS(look_up(*client, ns, 1, 1s), std::runtime_error);
  CHECK(client->counters().inflight_operations.load() == 0);
  peer.stop();
}

TEST_CASE("many threads look up, cancel and run out of time while connections break") {
  FakePeer peer;
  for (std::uint64_t block = 0; block < 64; ++block) peer.store(block_of(block), 0, ByteVector(10));
  auto options = options_for(peer.port);
  options.cooldown_ms = 50;
  Client client(options);
  const auto ns = add_test_namespace(client);
  REQUIRE(look_up(client, ns, 1, 5s)->done());
  std::atomic<std::uint64_t> count{0};
  peer.set_hook([&](FakePeer::Conn& conn, const Frame& frame) {
    if (frame.opcode() != Opcode::kExists) return false;
    const auto n = ++count;
    if (n % 997 == 0) conn.shut();
    return n % 101 == 0;  // that one gets no answer
  });
  std::atomic<std::uint64_t> ok{0};
  std::atomic<std::uint64_t> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937_64 random{seed};
      for (int i = 0; i < 600; ++i) {
        const auto block = random() % 128;
        const std::chrono::milliseconds deadline(20 + random() % 50);
        const bool cancels = random() % 8 == 0;
        const auto op = look_up(client, ns, block, deadline, cancels ? 0ms : 10'000ms);
        if (cancels) Operation::cancel(op);
        if (!op->wait(20s)) {
          ++wrong;
          continue;
        }
        const auto name = name_of(status_of(*op));
        if (name == "ok") ++ok;
        if (name == (block < 64 ? "not_found" : "ok")) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(ok > 200);
  CHECK(client.counters().inflight_operations.load() == 0);
  peer.stop();
}
