// The server's data path over real sockets: PUT, GET, EXISTS, REMOVE, leases.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <numeric>

#include "server_harness.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

using Statuses = std::vector<Status>;
constexpr auto kOk = Status::kOk;

std::vector<Item> make_items(std::uint64_t first, std::size_t count, std::size_t bytes) {
  std::vector<Item> items;
  for (std::size_t i = 0; i < count; ++i) items.push_back(make_item(first + i, 0, bytes));
  return items;
}

}  // namespace

TEST_CASE("what was put is got, of any size, in fragments") {
  TestNode node;
  Peer peer = node.connect(Lane::kBulk, 64 * kKiB);
  const std::vector<std::size_t> sizes{1,     31,    4096,    4097,    65535,
                                       65536, 65537, 300'001, 1 << 20, (3 << 20) + 5};
  std::vector<Item> items;
  for (std::size_t i = 0; i < sizes.size(); ++i) items.push_back(make_item(i, 3, sizes[i]));
  CHECK(peer.put(node.ns.id, items, {}, 50'000) == Statuses(items.size(), kOk));
  const auto got = peer.get(node.ns.id, items);
  check_bytes(got, items);
  CHECK(got.frames > items.size());  // the large ones came in several
  CHECK(node.stat("payload_copied_bytes") == 0);
  CHECK(node.stat("items_put_ok") == items.size());
  CHECK(node.stat("items_get_ok") == items.size());
  const auto total = std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0});
  CHECK(node.stat("payload_bytes_in") == total);
  CHECK(node.stat("payload_bytes_out") == total);
  CHECK(node.stat("stored_bytes") == total);
}

TEST_CASE("payload on a control connection arrives unharmed through the read-ahead buffer") {
  TestNode node;
  Peer peer = node.connect(Lane::kControl);
  const auto items = make_items(1, 20, 10'000);
  CHECK(peer.put(node.ns.id, items, {}, 3'000) == Statuses(20, kOk));
  check_bytes(peer.get(node.ns.id, items), items);
}

TEST_CASE("requests sent together, and bytes that come one by one, are all answered") {
  TestNode node;
  for (const Lane lane : {Lane::kControl, Lane::kBulk}) {
    Peer peer = node.connect(lane);
    Buffer stream;
    for (std::uint64_t id = 1; id <= 50; ++id) {
      const Buffer frame = Peer::frame(Peer::header(Opcode::kPing, id), {}, {});
      stream.insert(stream.end(), frame.begin(), frame.end());
    }
    peer.send(stream);
    for (std::uint64_t id = 1; id <= 50; ++id) CHECK(peer.receive_frame().header.request_id == id);
    const auto items = make_items(7, 1, 20);
    Buffer slow = Peer::frame(
        Peer::header(Opcode::kPut, 60, 0),
        [&] {
          RequestMeta meta;
          meta.ns = node.ns.id;
          return Peer::encoded(meta);
        }(),
        Peer::table_of(items));
    for (const std::byte byte : slow) peer.send({&byte, 1});
    peer.send_put_item(60, 0, items[0].bytes, true, 7);
    CHECK(is_done(peer.receive_frame().statuses()[0]));
  }
}

TEST_CASE("the first complete write stands; replace changes it") {
  TestNode node;
  Peer peer = node.connect();
  const std::vector<Item> first{make_item(1, 0, 5000)};
  const std::vector<Item> second{make_item(1, 0, 6000, 1)};
  CHECK(peer.put(node.ns.id, first) == Statuses{kOk});
  CHECK(peer.put(node.ns.id, second) == Statuses{Status::kAlready});
  check_bytes(peer.get(node.ns.id, first), first);
  RequestMeta replace;
  replace.replace = true;
  CHECK(peer.put(node.ns.id, second, replace) == Statuses{kOk});
  check_bytes(peer.get(node.ns.id, second), second);
  CHECK(peer.get(node.ns.id, first).statuses == Statuses{Status::kMissLength});
  CHECK(node.stat("objects") == 1);
}

TEST_CASE("two connections filling one key: one wins, the other hears already") {
  TestNode node;
  Peer a = node.connect();
  Peer b = node.connect();
  const std::vector<Item> items{make_item(1, 0, 100'000)};
  a.send_put_head(1, node.ns.id, items);
  a.send(Peer::frame(Peer::header(Opcode::kPut, 1, 0, 0), {}, Bytes(items[0].bytes).first(50'000)));
  REQUIRE(TestNode::eventually([&] { return node.stat("filling") == 1; }));
  CHECK(b.get(node.ns.id, items).statuses == Statuses{Status::kMissNotFound});
  CHECK(b.put(node.ns.id, items) == Statuses{kOk});
  RequestMeta last;
  last.checksum = xxh3_64(items[0].bytes);
  a.send(Peer::frame(Peer::header(Opcode::kPut, 1, kFlagLastOfItem | kFlagEndOfRequest, 0),
                     Peer::encoded(last), Bytes(items[0].bytes).subspan(50'000)));
  CHECK(a.receive_frame().statuses() == Statuses{Status::kAlready});
  check_bytes(a.get(node.ns.id, items), items);
  CHECK(node.stat("filling") == 0);
}

TEST_CASE("wrong checksums, short and long items, and withdrawn ones leave nothing visible") {
  TestNode node;
  Peer peer = node.connect();
  const auto items = make_items(1, 6, 10'000);
  const std::uint64_t id = peer.next_id();
  peer.send_put_head(id, node.ns.id, items);
  peer.send_put_item(id, 0, items[0].bytes, false, 4000, 1);             // checksum
  peer.send_put_item(id, 1, Bytes(items[1].bytes).first(9'999), false);  // short
  auto longer = items[2].bytes;
  longer.push_back(std::byte{1});
  peer.send_put_item(id, 2, longer, false, 6000);  // long
  peer.send(Peer::frame(Peer::header(Opcode::kPut, id, 0, 3), {}, Bytes(items[3].bytes).first(100)));
  RequestMeta aborted;
  aborted.aborted = true;
  peer.send(Peer::frame(Peer::header(Opcode::kPut, id, kFlagLastOfItem, 3), Peer::encoded(aborted),
                        {}));  // withdrawn
  peer.send(
      Peer::frame(Peer::header(Opcode::kPut, id, kFlagLastOfItem, 4), {}, items[4].bytes));  // no checksum
  peer.send_put_item(id, 5, items[5].bytes, true);
  const Frame answer = peer.receive_frame();
  CHECK_FALSE(answer.header.is_error());
  CHECK(answer.statuses() == Statuses{Status::kRefusedChecksum, Status::kRefusedBadRequest,
                                      Status::kRefusedBadRequest, Status::kRefusedAborted,
                                      Status::kRefusedBadRequest, kOk});
  const auto got = peer.get(node.ns.id, items);
  CHECK(got.statuses == Statuses{Status::kMissNotFound, Status::kMissNotFound, Status::kMissNotFound,
                                 Status::kMissNotFound, Status::kMissNotFound, kOk});
  CHECK(node.stat("objects") == 1);
}

TEST_CASE("rejected items are drained and the connection goes on") {
  auto options = TestNode::options();
  options.store.catalog.max_object_bytes = 100'000;
  TestNode node(std::move(options));
  Peer peer = node.connect();
  auto items = make_items(1, 3, 50'000);
  CHECK(peer.put(node.ns.id, {items[1]}) == Statuses{kOk});
  items[2] = make_item(3, 0, 200'000);
  CHECK(peer.put(node.ns.id, items, {}, 10'000) == Statuses{kOk, Status::kAlready, Status::kRefusedTooLarge});
  CHECK(node.stat("payload_drained_bytes") == 250'000);
  auto empty = items;
  empty[0].ref.length = 0;
  empty[0].bytes = {std::byte{1}};
  CHECK(peer.put(node.ns.id, {empty[0]}) == Statuses{Status::kRefusedBadRequest});
  RequestMeta durable;
  durable.ack = Ack::kDisk;
  CHECK(peer.put(node.ns.id, {make_item(9, 0, 10)}, durable) == Statuses{Status::kRefusedUnsupported});
  const TestNamespace unknown("unknown");
  CHECK(peer.put(unknown.id, items) == Statuses(3, Status::kMissNamespaceUnknown));
  CHECK(peer.get(unknown.id, items).statuses == Statuses(3, Status::kMissNamespaceUnknown));
  CHECK(peer.call(Opcode::kPing).reply().status == kOk);
}

TEST_CASE("a PUT whose items are out of order is refused as a whole, after its last frame") {
  TestNode node;
  Peer peer = node.connect();
  const auto items = make_items(1, 3, 1000);
  for (const std::uint32_t wrong : {0U, 7U}) {  // behind, and beyond the table
    CAPTURE(wrong);
    const std::uint64_t id = peer.next_id();
    peer.send_put_head(id, node.ns.id, items);
    peer.send_put_item(id, 1, items[1].bytes, false);
    peer.send_put_item(id, wrong, items[0].bytes, false);
    peer.send_put_item(id, 2, items[2].bytes, true);
    const Frame answer = peer.receive_frame();
    CHECK(answer.header.is_error());
    CHECK(answer.reply().status == Status::kRefusedBadRequest);
    CHECK(peer.get(node.ns.id, items).statuses ==
          Statuses{Status::kMissNotFound, kOk, Status::kMissNotFound});
  }
  const std::uint64_t id = peer.next_id();  // an item that begins while another is open
  const auto other = make_items(11, 2, 1000);
  peer.send_put_head(id, node.ns.id, other);
  peer.send(Peer::frame(Peer::header(Opcode::kPut, id, 0, 0), {}, Bytes(other[0].bytes).first(10)));
  peer.send_put_item(id, 1, other[1].bytes, true);
  CHECK(peer.receive_frame().reply().status == Status::kRefusedBadRequest);
  CHECK(peer.get(node.ns.id, other).statuses == Statuses(2, Status::kMissNotFound));
}

TEST_CASE("items never sent are aborted; an empty frame may end a PUT; an empty batch is refused") {
  TestNode node;
  Peer peer = node.connect();
  const auto items = make_items(1, 4, 1000);
  std::uint64_t id = peer.next_id();
  peer.send_put_head(id, node.ns.id, items);
  peer.send_put_item(id, 2, items[2].bytes, false);
  peer.send(Peer::frame(Peer::header(Opcode::kPut, id, kFlagEndOfRequest), {}, {}));
  CHECK(peer.receive_frame().statuses() ==
        Statuses{Status::kRefusedAborted, Status::kRefusedAborted, kOk, Status::kRefusedAborted});
  RequestMeta meta;
  meta.ns = node.ns.id;
  id = peer.next_id();
  peer.send_request(Opcode::kPut, id, meta, Peer::table_of(items), kFlagEndOfRequest);
  CHECK(peer.receive_frame().reply().status == Status::kRefusedBadRequest);
  const Buffer nothing(8);
  for (const Opcode opcode : {Opcode::kPut, Opcode::kGet, Opcode::kExists, Opcode::kRemove}) {
    const Frame answer = peer.call(opcode, meta, nothing);
    CHECK(answer.header.is_error());
    CHECK(answer.reply().status == Status::kRefusedBadRequest);
  }
}

TEST_CASE("requests interleave on one connection") {
  TestNode node;
  Peer peer = node.connect();
  const auto stored = make_items(100, 4, 700'000);
  CHECK(peer.put(node.ns.id, stored) == Statuses(4, kOk));
  const std::vector<Item> a{make_item(1, 0, 50'000)};
  const std::vector<Item> b{make_item(2, 0, 50'000)};
  peer.send_put_head(1, node.ns.id, a);
  peer.send_put_head(2, node.ns.id, b);
  peer.send(Peer::frame(Peer::header(Opcode::kPut, 1, 0, 0), {}, Bytes(a[0].bytes).first(20'000)));
  peer.send_get(3, node.ns.id, stored);
  peer.send_get(4, node.ns.id, {stored[2], stored[0]});
  peer.send(Peer::frame(Peer::header(Opcode::kPut, 2, 0, 0), {}, Bytes(b[0].bytes).first(30'000)));
  peer.send_request(Opcode::kPing, 5);
  const auto finish = [&](std::uint64_t id, const Item& item, std::size_t from) {
    RequestMeta last;
    last.checksum = xxh3_64(item.bytes);
    peer.send(Peer::frame(Peer::header(Opcode::kPut, id, kFlagLastOfItem | kFlagEndOfRequest, 0),
                          Peer::encoded(last), Bytes(item.bytes).subspan(from)));
  };
  finish(2, b[0], 30'000);
  finish(1, a[0], 20'000);
  std::map<std::uint64_t, int> ends;
  std::map<std::pair<std::uint64_t, std::uint32_t>, Buffer> bytes;
  while (ends.size() < 5) {
    const Frame in = peer.receive_frame();
    if (in.header.end_of_request()) {
      ++ends[in.header.request_id];
      CHECK_FALSE(in.header.is_error());
      for (const Status status : in.statuses()) CHECK(status == kOk);
    } else {
      auto& target = bytes[{in.header.request_id, in.header.item}];
      target.insert(target.end(), in.payload.begin(), in.payload.end());
    }
  }
  for (std::uint32_t i = 0; i < 4; ++i) CHECK(bytes[{3, i}] == stored[i].bytes);
  CHECK(bytes[{4, 0}] == stored[2].bytes);
  CHECK(bytes[{4, 1}] == stored[0].bytes);
  check_bytes(peer.get(node.ns.id, {a[0], b[0]}), {a[0], b[0]});
}

TEST_CASE("EXISTS tells complete chunks, missing parts and the prefix") {
  TestNode node;
  Peer peer = node.connect(Lane::kControl);
  std::vector<Item> items;
  for (std::uint64_t block = 0; block < 6; ++block) {
    items.push_back(make_item(block, 0, 5000));
    if (block != 3) items.push_back(make_item(block, 1, 5000));
  }
  CHECK(peer.put(node.ns.id, items) == Statuses(items.size(), kOk));
  std::vector<Item> chunks;
  for (std::uint64_t block = 0; block < 8; ++block) chunks.push_back(make_item(block, 0, 1));
  const Frame answer = peer.exists(node.ns.id, exists_table(chunks, {make_part(0), make_part(1)}));
  CHECK(answer.statuses() == Statuses{kOk, kOk, kOk, Status::kMissPartMissing, kOk, kOk,
                                      Status::kMissNotFound, Status::kMissNotFound});
  CHECK(answer.reply().prefix == 3);
  CHECK(answer.reply().lease_id == 0);
  const Frame one = peer.exists(node.ns.id, exists_table(chunks, {make_part(0)}));
  CHECK(one.reply().prefix == 6);
  ExistsTable huge = exists_table(chunks, {});
  huge.chunks.resize(kMaxChunksPerRequest);
  huge.parts.resize(64);
  CHECK(peer.exists(node.ns.id, huge).reply().status == Status::kRefusedLimit);
}

TEST_CASE("REMOVE takes one part or the whole chunk") {
  TestNode node;
  Peer peer = node.connect();
  const std::vector<Item> items{make_item(1, 0, 100), make_item(1, 1, 100), make_item(2, 0, 100),
                                make_item(2, 1, 100)};
  CHECK(peer.put(node.ns.id, items) == Statuses(4, kOk));
  RequestMeta meta;
  meta.ns = node.ns.id;
  Item whole = make_item(2, 0, 0);
  whole.ref.part = kAllParts;
  const Frame answer =
      peer.call(Opcode::kRemove, meta, Peer::table_of({items[0], whole, make_item(9, 0, 0)}));
  CHECK(answer.statuses() == Statuses{kOk, kOk, Status::kMissNotFound});
  CHECK(peer.get(node.ns.id, items).statuses ==
        Statuses{Status::kMissNotFound, kOk, Status::kMissNotFound, Status::kMissNotFound});
}

TEST_CASE("GET reports every item's own reason and checks the length asked for") {
  TestNode node;
  Peer peer = node.connect();
  const std::vector<Item> items{make_item(1, 0, 1000), make_item(2, 0, 2000)};
  CHECK(peer.put(node.ns.id, items) == Statuses(2, kOk));
  auto asked = items;
  asked[1].ref.length = 1999;
  asked.push_back(make_item(3, 0, 10));
  asked.push_back(items[0]);
  asked[3].ref.length = 0;  // any
  const auto got = peer.get(node.ns.id, asked);
  CHECK(got.statuses == Statuses{kOk, Status::kMissLength, Status::kMissNotFound, kOk});
  CHECK(got.bytes.size() == 2);
  CHECK(got.bytes.at(3) == items[0].bytes);
}

TEST_CASE("work whose deadline has passed is dropped") {
  TestNode node;
  Peer peer = node.connect();
  const auto items = make_items(1, 2, 1000);
  CHECK(peer.put(node.ns.id, {items[0]}) == Statuses{kOk});
  RequestMeta meta;
  meta.deadline_us = 1;
  const std::uint64_t id = peer.next_id();
  peer.send_put_head(id, node.ns.id, {items[1]}, meta);
  std::this_thread::sleep_for(5ms);
  peer.send_put_item(id, 0, items[1].bytes, true);
  CHECK(peer.receive_frame().statuses() == Statuses{Status::kMissDeadline});
  // A GET that waits behind another one which the reader does not take.
  const auto large = make_items(50, 20, 1 << 20);
  CHECK(peer.put(node.ns.id, large) == Statuses(20, kOk));
  peer.send_get(1000, node.ns.id, large);
  meta.deadline_us = 20'000;
  peer.send_get(1001, node.ns.id, {items[0]}, meta);
  std::this_thread::sleep_for(100ms);
  check_bytes(peer.receive_get(1000), large);
  CHECK(peer.receive_get(1001).statuses == Statuses{Status::kMissDeadline});
}

TEST_CASE("CANCEL ends a GET, a PUT and a SUBSCRIBE with the rest cancelled") {
  TestNode node;
  Peer peer = node.connect();
  const auto large = make_items(50, 40, 1 << 20);
  CHECK(peer.put(node.ns.id, large) == Statuses(40, kOk));
  peer.send_get(1, node.ns.id, large);
  std::this_thread::sleep_for(50ms);  // the sockets fill up
  RequestMeta cancel;
  cancel.target_request = 1;
  peer.send_request(Opcode::kCancel, 2, cancel);
  REQUIRE(TestNode::eventually([&] { return node.stat("cancelled") == 1; }));
  const auto got = peer.receive_get(1);
  CHECK(got.statuses.back() == Status::kMissCancelled);
  std::size_t whole = 0;
  for (std::uint32_t i = 0; i < large.size(); ++i) {
    if (got.statuses[i] != kOk) continue;
    ++whole;
    CHECK(got.bytes.at(i) == large[i].bytes);
  }
  CHECK(whole < large.size());
  CHECK(node.stat("pins") == 0);

  const auto items = make_items(1, 3, 10'000);
  peer.send_put_head(3, node.ns.id, items);
  peer.send_put_item(3, 0, items[0].bytes, false);
  peer.send(Peer::frame(Peer::header(Opcode::kPut, 3, 0, 1), {}, Bytes(items[1].bytes).first(10)));
  cancel.target_request = 3;
  peer.send_request(Opcode::kCancel, 4, cancel);
  RequestMeta last;
  last.checksum = xxh3_64(items[1].bytes);
  peer.send(Peer::frame(Peer::header(Opcode::kPut, 3, kFlagLastOfItem, 1), Peer::encoded(last),
                        Bytes(items[1].bytes).subspan(10)));
  peer.send_put_item(3, 2, items[2].bytes, true);
  CHECK(peer.receive_frame().statuses() == Statuses{kOk, Status::kMissCancelled, Status::kMissCancelled});

  RequestMeta wait;
  wait.wait_ms = 60'000;
  peer.send_request(Opcode::kSubscribe, 5, wait);
  cancel.target_request = 5;
  peer.send_request(Opcode::kCancel, 6, cancel);
  const Frame ended = peer.receive_frame();
  CHECK(ended.header.request_id == 5);
  CHECK(ended.reply().status == Status::kMissCancelled);
  cancel.target_request = 12345;  // unknown: nothing happens
  peer.send_request(Opcode::kCancel, 7, cancel);
  CHECK(peer.call(Opcode::kPing).reply().status == kOk);
}

TEST_CASE("a lease keeps its chunks through eviction until it is released, expires or its connection ends") {
  auto options = TestNode::options(32 * kMiB);
  TestNode node(std::move(options));
  Peer peer = node.connect();
  const auto kept = make_items(1, 8, 1 << 20);
  std::uint64_t filler = 1000;
  const auto press = [&] {  // twice the capacity
    for (int i = 0; i < 64; ++i) REQUIRE(is_done(peer.put(node.ns.id, {make_item(filler++, 0, 1 << 20)})[0]));
  };
  const auto all_evicted = [&] {
    return peer.exists(node.ns.id, exists_table(kept, {make_part(0)})).statuses() ==
           Statuses(8, Status::kMissEvicted);
  };
  for (const int how : {0, 1, 2}) {
    CAPTURE(how);
    CHECK(peer.put(node.ns.id, kept) == Statuses(8, kOk));
    Peer holder = node.connect(Lane::kControl);
    const Frame answer = holder.exists(node.ns.id, exists_table(kept, {make_part(0)}), 60'000);
    const auto lease = answer.reply();
    REQUIRE(lease.lease_id != 0);
    CHECK(lease.lease_ms == 60'000);
    CHECK(node.stat("leased_bytes") == 8 * kMiB);
    press();
    check_bytes(peer.get(node.ns.id, kept), kept);
    RequestMeta release;
    release.lease_id = lease.lease_id;
    if (how == 0) {
      CHECK(holder.call(Opcode::kRelease, release).reply().status == kOk);
      CHECK(holder.call(Opcode::kRelease, release).reply().status == Status::kMissExpired);
    } else if (how == 1) {
      RequestMeta renew = release;
      renew.lease_ms = 50;
      CHECK(holder.call(Opcode::kLease, renew).reply().status == kOk);
    } else {
      holder.disconnect();
    }
    CHECK(TestNode::eventually([&] { return node.stat("leases") == 0; }));
    CHECK(TestNode::eventually([&] { return node.stat("leased_bytes") == 0; }));
    if (how == 1) CHECK(holder.call(Opcode::kLease, release).reply().status == Status::kMissExpired);
    press();
    CHECK(all_evicted());
    CHECK(peer.get(node.ns.id, kept).statuses == Statuses(8, Status::kMissEvicted));
  }
}

TEST_CASE("a client killed in the middle of a PUT leaves nothing visible and no slot behind") {
  TestNode node;
  const auto items = make_items(1, 2, 1 << 20);
  for (const bool reset : {false, true}) {
    Peer victim = node.connect();
    victim.send_put_head(1, node.ns.id, items);
    victim.send_put_item(1, 0, Bytes(items[0].bytes).first(600'000), false);
    victim.send(Peer::frame(Peer::header(Opcode::kPut, 1, 0, 1), {}, Bytes(items[1].bytes).first(500'000)));
    REQUIRE(TestNode::eventually([&] { return node.stat("filling") == 1; }));
    if (reset) {
      victim.reset();
    } else {
      victim.disconnect();
    }
    CHECK(TestNode::eventually([&] { return node.stat("filling") == 0; }));
    CHECK(node.stat("used_bytes") == 0);
    Peer other = node.connect();
    CHECK(other.get(node.ns.id, items).statuses == Statuses(2, Status::kMissNotFound));
  }
}

TEST_CASE("a removed object is read to its end by who had begun, and its slot is freed after that") {
  TestNode node;
  Peer reader = node.connect();
  Peer other = node.connect();
  const std::vector<Item> items{make_item(1, 0, 12 << 20)};
  CHECK(other.put(node.ns.id, items) == Statuses{kOk});
  reader.send_get(1, node.ns.id, items);
  REQUIRE(TestNode::eventually([&] { return node.stat("pins") == 1; }));
  RequestMeta meta;
  meta.ns = node.ns.id;
  CHECK(other.call(Opcode::kRemove, meta, Peer::table_of(items)).statuses() == Statuses{kOk});
  CHECK(node.stat("condemned") == 1);
  CHECK(other.get(node.ns.id, items).statuses == Statuses{Status::kMissNotFound});
  const std::vector<Item> again{make_item(1, 0, 12 << 20, 5)};
  CHECK(other.put(node.ns.id, again) == Statuses{kOk});
  check_bytes(reader.receive_get(1), items);
  CHECK(TestNode::eventually([&] { return node.stat("condemned") == 0; }));
  check_bytes(reader.get(node.ns.id, again), again);
}
