// What a node allocates for a request with many items: something for the request, nothing for an item.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include "counted_new.h"
#include "server_harness.h"
#include "slab_samples.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

constexpr std::size_t kBatch = 100;
constexpr std::size_t kBatches = 8;
constexpr std::uint64_t kPerRequest = 50;
constexpr std::uint64_t kRounds = 40;

struct Batches {
  TempDirectory directory;
  std::vector<std::vector<Item>> batches;

  // All of them together are four times as large as the memory.
  Batches() {
    t_uncounted = true;  // this thread is the client
    for (std::size_t i = 0; i < kBatches; ++i) {
      auto& batch = batches.emplace_back();
      for (std::size_t k = 0; k < kBatch; ++k) batch.push_back(make_item(1 + i * kBatch + k, 0, 20'000));
    }
  }
  [[nodiscard]] NodeOptions options() const {
    NodeOptions out = TestNode::options(4 * kMiB);
    SlabStoreOptions one;
    one.path = directory.path();
    one.capacity_bytes = 64 * kMiB;
    one.node_id = "node-a";
    out.store.disk.emplace();
    out.store.disk->directories.push_back(std::move(one));
    return out;
  }
};

}  // namespace

TEST_CASE("a GET of what is on a disk") {
  Batches t;
  TestNode node(t.options());
  Peer peer = node.connect();
  RequestMeta durable;
  durable.ack = Ack::kDisk;
  for (const auto& batch : t.batches) {
    CHECK(peer.put(node.ns.id, batch, durable) == std::vector<Status>(kBatch, Status::kOk));
  }
  std::uint64_t before = 0, reads = 0;
  for (std::uint64_t round = 0; round < 2 * kRounds; ++round) {
    if (round == kRounds) {
      before = allocations();
      reads = node.stat("disk_reads");
    }
    check_bytes(peer.get(node.ns.id, t.batches[round % kBatches]), t.batches[round % kBatches]);
  }
  CHECK(node.stat("disk_reads") - reads > kRounds * kBatch / 2);
  const std::uint64_t allocated = allocations() - before;
  CAPTURE(allocated);
  CHECK(allocated <= kRounds * kPerRequest);
}

TEST_CASE("a PUT that is written behind to a disk") {
  Batches t;
  TestNode node(t.options());
  Peer peer = node.connect();
  RequestMeta replacing;
  replacing.replace = true;
  std::uint64_t before = 0;
  for (std::uint64_t round = 0; round < 2 * kRounds; ++round) {
    if (round == kRounds) before = allocations();
    replacing.ack = round % 2 == 0 ? Ack::kRam : Ack::kDisk;
    CHECK(peer.put(node.ns.id, t.batches[round % kBatches], replacing) ==
          std::vector<Status>(kBatch, Status::kOk));
  }
  const std::uint64_t allocated = allocations() - before;
  CAPTURE(allocated);
  CHECK(allocated <= kRounds * kPerRequest);
}
