// GET of what is only on a disk: several reads at a time, in order on the wire, within the memory there is.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include "server_harness.h"
#include "slab_samples.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

using Statuses = std::vector<Status>;
constexpr auto kOk = Status::kOk;
constexpr std::size_t kItemBytes = 200'000;

struct ColdNode {
  TempDirectory directory;
  Faults faults;
  std::vector<Item> items;

  // A node that was restarted after `count` items went to its disk.
  explicit ColdNode(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) items.push_back(make_item(i + 1, 0, kItemBytes));
    TestNode before(options(64 * kMiB));
    Peer peer = before.connect();
    RequestMeta durable;
    durable.ack = Ack::kDisk;
    CHECK(peer.put(before.ns.id, items, durable) == Statuses(count, kOk));
  }
  [[nodiscard]] NodeOptions options(std::uint64_t memory_bytes) {
    NodeOptions out = TestNode::options(memory_bytes);
    out.store.disk.emplace();
    out.store.disk->readers = 8;
    out.store.disk->directories.push_back(faulty_directory(directory.path(), 64 * kMiB, "node-a", faults));
    return out;
  }
};

}  // namespace

TEST_CASE("the items behind one that is read from a disk are read with it") {
  ColdNode cold(40);
  cold.faults.delay_us = 3000;
  TestNode node(cold.options(64 * kMiB));
  Peer peer = node.connect();
  cold.faults.most_reading = 0;
  check_bytes(peer.get(node.ns.id, cold.items), cold.items);
  CHECK(cold.faults.most_reading >= 6);  // of 8 readers
  CHECK(node.stat("disk_reads") == 40);
}

TEST_CASE("little memory limits how far ahead is read, and nothing is missed for it") {
  ColdNode cold(40);
  cold.faults.delay_us = 1000;
  // One eighth of it has room for two items beyond the one whose turn it is.
  TestNode node(cold.options(4 * kMiB));
  cold.faults.most_reading = 0;
  std::vector<std::thread> readers;
  std::atomic<int> good{0};
  for (int i = 0; i < 4; ++i) {
    readers.emplace_back([&] {
      Peer peer = node.connect();
      const auto got = peer.get(node.ns.id, cold.items);
      bool same = got.statuses == Statuses(40, kOk);
      for (std::uint32_t at = 0; same && at < 40; ++at) same = got.bytes.at(at) == cold.items[at].bytes;
      if (same) ++good;
    });
  }
  for (std::thread& reader : readers) reader.join();
  CHECK(good == 4);
  CHECK(cold.faults.most_reading <= 4 + 2);
}

TEST_CASE("a GET that ends early leaves no read and no slot behind") {
  ColdNode cold(40);
  cold.faults.delay_us = 20'000;
  TestNode node(cold.options(64 * kMiB));
  {
    Peer gone = node.connect();
    gone.send_get(1000, node.ns.id, cold.items);
    std::this_thread::sleep_for(50ms);
  }
  Peer peer = node.connect();
  RequestMeta meta;
  meta.deadline_us = 60'000;
  peer.send_get(1001, node.ns.id, cold.items, meta);
  const auto got = peer.receive_get(1001);
  CHECK(got.statuses.back() == Status::kMissDeadline);
  cold.faults.delay_us = 0;
  check_bytes(peer.get(node.ns.id, cold.items), cold.items);
}
