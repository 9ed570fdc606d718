// The client and the node as they are, in one process and over TCP: what one sends the other takes, under
// load, with deadlines and cancels, and nothing is left pinned, leased or half written.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>

#include "net/node.h"
#include "tests/client_harness.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

constexpr std::uint64_t kCapacityBytes = 32 << 20;

struct Cluster {
  std::unique_ptr<Node> node;

  explicit Cluster(const std::string& secret = "") {
    NodeOptions options;
    options.server.node_id = "node-a";
    options.store.catalog.capacity_bytes = kCapacityBytes;
    options.store.catalog.max_object_bytes = 8 << 20;
    if (!secret.empty()) {
      const auto bytes = as_bytes(secret.data(), secret.size());
      options.server.secret = ByteVector(bytes.begin(), bytes.end());
    }
    node = std::make_unique<Node>(std::move(options));
    View view;
    view.revision = 1;
    view.nodes.resize(1);
    view.nodes[0].id = "node-a";
    view.nodes[0].tcp = {"127.0.0.1:" + std::to_string(node->port())};
    node->publish_view(encode_view(view));
    node->start();
  }
  ~Cluster() {
    CHECK(eventually([&] { return stat("connections_open") == 0; }));
    CHECK(stat("pins") == 0);
    CHECK(stat("leases") == 0);
    CHECK(stat("filling") == 0);
    CHECK(stat("protocol_faults") == 0);
    CHECK(node->store().violations(true) == std::vector<std::string>{});
    CHECK(node->stop(Clock::now() + 10s));
  }
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  [[nodiscard]] std::uint64_t stat(const std::string& name) const {
    for (const auto& [key, value] : node->stats()) {
      if (key == name) return value;
    }
    FAIL("no counter " << name);
    return 0;
  }
};

// The bytes of a key are known from its number: whatever is read is right or wrong without a record of what
// was put.
ByteVector content_of(std::uint64_t key) {
  constexpr std::array<std::size_t, 4> kSizes = {700, 40'000, 100'001, 2'500'000};
  std::mt19937_64 random(key);
  return random_bytes(kSizes[key % kSizes.size()], random);
}

}  // namespace

TEST_CASE("a secret on both sides, several fragments, leases, removal") {
  Cluster cluster("secret");
  auto options = options_for(cluster.node->port());
  const std::string secret = "secret";
  const auto bytes = as_bytes(secret.data(), secret.size());
  options.secret = ByteVector(bytes.begin(), bytes.end());
  Client client(options);
  const auto ns = add_test_namespace(client);
  auto stored = content_of(7);
  REQUIRE(stored.size() > 1 << 20);
  auto op = Batch(Kind::kPut, ns).item(block_of(1), 0, stored).submit(client);
  REQUIRE(op->wait(10s));
  CHECK(name_of(status_of(*op)) == "ok");
  Batch exists(Kind::kExists, ns);
  exists.parts({0}).chunk(block_of(1));
  exists.input.lease_ms = 60'000;
  const auto found = exists.submit(client);
  REQUIRE(found->wait(10s));
  REQUIRE(found->leases().size() == 1);
  CHECK(cluster.stat("leases") == 1);
  ByteVector memory(stored.size());
  op = Batch(Kind::kGet, ns).item(block_of(1), 0, memory).submit(client);
  REQUIRE(op->wait(10s));
  CHECK(memory == stored);
  client.release(found->leases());
  CHECK(eventually([&] { return cluster.stat("leases") == 0; }));
  op = Batch(Kind::kRemove, ns).item(block_of(1), kAllParts, memory).submit(client);
  REQUIRE(op->wait(10s));
  CHECK(name_of(status_of(*op)) == "ok");
  CHECK(cluster.stat("objects") == 0);
}

TEST_CASE("a put that is cut short leaves nothing visible") {
  Cluster cluster;
  Client client(options_for(cluster.node->port()));
  const auto ns = add_test_namespace(client);
  std::vector<ByteVector> stored;
  for (std::uint64_t key = 0; key < 40; ++key) stored.push_back(content_of(key));
  for (int round = 0; round < 30; ++round) {
    Batch put(Kind::kPut, ns);
    for (std::uint64_t key = 0; key < 8; ++key) put.item(block_of(100 + key), 0, stored[key]);
    const auto op = put.submit(client, std::chrono::microseconds(50 * round * round));
    if (round % 3 == 0) Operation::cancel(op);
    REQUIRE(op->wait(10s));
    // Whoever reads now gets the whole object or none.
    Batch get(Kind::kGet, ns);
    std::vector<ByteVector> memory;
    for (std::uint64_t key = 0; key < 8; ++key) memory.emplace_back(stored[key].size());
    for (std::uint64_t key = 0; key < 8; ++key) get.item(block_of(100 + key), 0, memory[key]);
    const auto read = get.submit(client);
    REQUIRE(read->wait(10s));
    for (std::uint64_t key = 0; key < 8; ++key) {
      const auto status = status_of(*read, key);
      CHECK((status == Status::kMissNotFound || status == Status::kMissEvicted || status == Status::kOk));
      if (status == Status::kOk) CHECK(memory[key] == stored[key]);
      if (is_done(status_of(*op, key))) CHECK(status == Status::kOk);
    }
    const auto removed = [&] {
      Batch remove(Kind::kRemove, ns);
      for (std::uint64_t key = 0; key < 8; ++key) remove.item(block_of(100 + key), 0, stored[key]);
      return remove.submit(client);
    }();
    REQUIRE(removed->wait(10s));
  }
  CHECK(client.counters().protocol_faults.load() == 0);
}

TEST_CASE("clients that put, look up, get, remove, cancel and run late, over a store too small for it all") {
  const std::uint64_t seed = std::random_device{}();
  INFO("seed ", seed);
  Cluster cluster;
  std::atomic<int> wrong{0};
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(seed + t);
      Client client(options_for(cluster.node->port()));
      const auto ns = add_test_namespace(client);
      for (int round = 0; round < 120; ++round) {
        const auto kind =
            std::array{Kind::kPut, Kind::kGet, Kind::kGet, Kind::kExists, Kind::kRemove}[random() % 5];
        if (kind == Kind::kRemove && random() % 4 != 0) continue;
        Batch batch(kind, ns);
        if (kind == Kind::kExists) batch.parts({0});
        std::vector<ByteVector> memory;
        std::vector<std::uint64_t> keys;
        for (auto n = 1 + random() % 6; n > 0; --n) keys.push_back(random() % 60);
        for (const auto key : keys) {
          memory.push_back(content_of(key));
          if (kind == Kind::kGet) std::ranges::fill(memory.back(), std::byte{0});
        }
        for (std::size_t i = 0; i < keys.size(); ++i) {
          if (kind == Kind::kExists) {
            batch.chunk(block_of(keys[i]));
          } else {
            batch.item(block_of(keys[i]), 0, cut_randomly(memory[i], 4, random));
          }
        }
        if (kind == Kind::kExists) batch.input.lease_ms = 20;
        const bool late = random() % 3 == 0;
        const auto op = batch.submit(client, late ? std::chrono::microseconds(random() % 3000) : 10s);
        if (random() % 5 == 0) Operation::cancel(op);
        if (!op->wait(20s)) ++wrong;
        for (std::size_t i = 0; i < keys.size() && kind == Kind::kGet; ++i) {
          if (status_of(*op, i) != Status::kOk) continue;
          ++right;
          if (memory[i] != content_of(keys[i])) ++wrong;
        }
        for (auto& each : memory) std::ranges::fill(each, std::byte{9});
        if (random() % 2 == 0) client.release(op->leases());
      }
      if (client.counters().protocol_faults.load() + client.counters().checksum_failures.load() != 0) ++wrong;
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong.load() == 0);
  CHECK(right.load() > 0);
}
