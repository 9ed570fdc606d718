// A node on a loopback port for tests, which at its end checks that nothing is left behind.
#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "net/node.h"
#include "peer.h"
#include "store_samples.h"

namespace dfkv::test {

using namespace std::chrono_literals;

inline constexpr std::uint64_t kKiB = 1024;
inline constexpr std::uint64_t kMiB = 1024 * 1024;

struct TestNode {
  Node node;
  TestNamespace ns{"server"};

  static NodeOptions options(std::uint64_t capacity_bytes = 64 * kMiB) {
    NodeOptions out;
    out.server.node_id = "node-a";
    out.store.catalog.capacity_bytes = capacity_bytes;
    out.store.catalog.max_object_bytes = 16 * kMiB;
    out.store.catalog.policy = make_lru_policy();  // so that the order of eviction is plain
    return out;
  }
  explicit TestNode(NodeOptions given = options()) : node(std::move(given)) { node.start(); }
  ~TestNode() {
    // Connections that the test closed are noticed by and by; then nothing is pinned, leased or half written.
    const bool rest = eventually([this] { return stat("connections_open") == 0; });
    CHECK_MESSAGE(rest, "connections stay open");
    CHECK(node.store().violations(true) == std::vector<std::string>{});
    CHECK(node.stop(Clock::now() + 10s));
  }
  TestNode(const TestNode&) = delete;
  TestNode& operator=(const TestNode&) = delete;

  [[nodiscard]] std::uint64_t stat(const std::string& name) const {
    for (const auto& [key, value] : node.stats()) {
      if (key == name) return value;
    }
    FAIL("no counter " << name);
    return 0;
  }
  template <typename Condition>
  static bool eventually(Condition&& holds, std::chrono::milliseconds within = 10s) {
    const auto until = Clock::now() + within;
    while (!holds()) {
      if (Clock::now() > until) return false;
      std::this_thread::sleep_for(2ms);
    }
    return true;
  }
  // A connection that is past the handshake, with the namespace registered.
  [[nodiscard]] Peer connect(Lane lane = Lane::kBulk, std::uint32_t max_fragment_bytes = 0) {
    Peer peer(node.port());
    (void)peer.hello(lane, max_fragment_bytes);
    REQUIRE(peer.put_namespace(ns.id, ns.descriptor) == Status::kOk);
    return peer;
  }
};

inline Item make_item(std::uint64_t block, std::uint16_t stage, std::size_t bytes,
                      std::uint64_t version = 0) {
  const BlockId id = make_block(block);
  return {{id, make_part(stage), route_of(id), static_cast<std::uint32_t>(bytes)},
          make_payload(block * 1000 + stage + version * 1'000'003, bytes)};
}

inline ExistsTable exists_table(const std::vector<Item>& items, std::vector<Part> parts) {
  ExistsTable table;
  table.parts = std::move(parts);
  for (const Item& item : items) table.chunks.push_back({item.ref.block, item.ref.route});
  return table;
}

// Every item came, with its bytes.
inline void check_bytes(const Peer::Got& got, const std::vector<Item>& items) {
  REQUIRE(got.statuses == std::vector<Status>(items.size(), Status::kOk));
  for (std::uint32_t i = 0; i < items.size(); ++i) {
    CAPTURE(i);
    CHECK(got.bytes.at(i) == items[i].bytes);
  }
}

}  // namespace dfkv::test
