// PUTs for which there is no memory: they wait, in turn and for a while, and nobody else waits with them.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <array>
#include <future>

#include "server_harness.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

// Two clients that have each sent half of an item, in a node where no third item can be under way.
struct FullOfHalves {
  static NodeOptions options() { return TestNode::options(16 * kMiB); }

  TestNode t{options()};
  std::vector<Item> items{make_item(1, 0, 4 * kMiB), make_item(2, 0, 4 * kMiB)};
  std::array<Peer, 2> halves{t.connect(), t.connect()};
  std::array<std::uint64_t, 2> ids{};

  FullOfHalves() {
    for (std::size_t i = 0; i < halves.size(); ++i) {
      ids[i] = halves[i].next_id();
      halves[i].send_put_head(ids[i], t.ns.id, {items[i]});
      halves[i].send(Peer::frame(Peer::header(Opcode::kPut, ids[i], 0, 0), {}, first_half(i)));
    }
    CHECK(TestNode::eventually([this] { return t.stat("filling") == 2; }));
  }
  [[nodiscard]] Bytes first_half(std::size_t i) const { return Bytes(items[i].bytes).first(kMiB); }
  [[nodiscard]] Status finish(std::size_t i) {
    RequestMeta last;
    last.checksum = xxh3_64(items[i].bytes);
    for (std::size_t at = kMiB; at < items[i].bytes.size(); at += kMiB) {
      const bool end = at + kMiB == items[i].bytes.size();
      const std::uint16_t flags = end ? kFlagLastOfItem | kFlagEndOfRequest : 0;
      halves[i].send(Peer::frame(Peer::header(Opcode::kPut, ids[i], flags, 0),
                                 end ? Peer::encoded(last) : Buffer{},
                                 Bytes(items[i].bytes).subspan(at, kMiB)));
    }
    return halves[i].receive_frame().statuses().front();
  }
};

}  // namespace

TEST_CASE("an item waits for memory while its connection is not read, and is taken when there is some") {
  FullOfHalves full;
  const Item third = make_item(3, 0, 4 * kMiB);
  Peer waiting = full.t.connect();
  auto put = std::async(std::launch::async, [&] { return waiting.put(full.t.ns.id, {third}); });
  CHECK(TestNode::eventually([&] { return full.t.stat("put_waits") == 1; }));
  CHECK(put.wait_for(50ms) == std::future_status::timeout);
  // Nobody else waits with it.
  Peer other = full.t.connect(Lane::kControl);
  CHECK(other.exists(full.t.ns.id, exists_table({third}, {third.ref.part})).statuses() ==
        std::vector{Status::kMissNotFound});
  CHECK(full.finish(0) == Status::kOk);
  CHECK(put.get() == std::vector{Status::kOk});
  CHECK(full.finish(1) == Status::kOk);
  CHECK(other.get(full.t.ns.id, {third}).bytes[0] == third.bytes);
  CHECK(full.t.stat("put_refused") == 0);
}

TEST_CASE(
    "an item waits for memory no longer than its deadline, and those of a request for two seconds once") {
  FullOfHalves full;
  const std::vector<Item> more{make_item(3, 0, 4 * kMiB), make_item(4, 0, 4 * kMiB)};
  Peer waiting = full.t.connect();
  RequestMeta meta;
  meta.deadline_us = 100'000;
  auto start = Clock::now();
  CHECK(waiting.put(full.t.ns.id, more, meta) == std::vector{Status::kMissDeadline, Status::kMissDeadline});
  CHECK(Clock::now() - start < 1500ms);
  start = Clock::now();
  CHECK(waiting.put(full.t.ns.id, more) == std::vector{Status::kAgainNoMemory, Status::kAgainNoMemory});
  CHECK(Clock::now() - start >= 2000ms);
  CHECK(Clock::now() - start < 3500ms);
  CHECK(full.t.stat("put_refused") == 2);
  // A peer that goes while it waits is forgotten.
  {
    Peer gone = full.t.connect();
    const auto id = gone.next_id();
    gone.send_put_head(id, full.t.ns.id, {more[0]});
    gone.send(Peer::frame(Peer::header(Opcode::kPut, id, 0, 0), {}, Bytes(more[0].bytes).first(1000)));
    CHECK(TestNode::eventually([&] { return full.t.stat("put_waits") == 3; }));
    gone.reset();
  }
  CHECK(full.finish(0) == Status::kOk);
  CHECK(waiting.put(full.t.ns.id, {more[1]}) == std::vector{Status::kOk});
  CHECK(full.finish(1) == Status::kOk);
}
