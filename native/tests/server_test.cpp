// The server's connections over real sockets: handshake, framing, limits, deadlines, views, start and stop.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <system_error>

#include "server_harness.h"
#include "wire/payloads.h"
#include "wire/view.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

constexpr auto kOk = Status::kOk;

Buffer bytes_of(std::string_view text) {
  const Bytes view = as_bytes(text.data(), text.size());
  return {view.begin(), view.end()};
}

Buffer make_view(std::uint64_t revision) {
  View view;
  view.revision = revision;
  ViewNode node;
  node.id = "node-a";
  node.tcp = {"127.0.0.1:7000"};
  view.nodes.push_back(node);
  return encode_view(view);
}

Buffer raw_hello() {
  HelloMeta mine;
  Buffer meta;
  encode_hello(mine, meta);
  return Peer::frame(Peer::header(Opcode::kHello, 0), meta, {});
}

}  // namespace

TEST_CASE("HELLO tells who the node is and settles the limits") {
  TestNode node;
  Peer peer(node.node.port());
  const HelloMeta theirs = peer.hello(Lane::kBulk, 128 * 1024);
  CHECK(theirs.node_id == "node-a");
  CHECK(theirs.incarnation == node.node.incarnation());
  CHECK(theirs.boot_id == node.node.boot_id());
  CHECK(theirs.boot_id != std::array<std::byte, 16>{});
  CHECK(theirs.auth_methods == kAuthNone);
  CHECK(theirs.max_fragment_bytes == 128 * 1024);
  CHECK(theirs.max_meta_bytes == kDefaultMaxMetaBytes);
  CHECK(peer.call(Opcode::kPing).reply().status == kOk);
  Peer other(node.node.port());
  CHECK(other.hello().nonce != theirs.nonce);
}

TEST_CASE("a handshake that cannot work is refused with a reason, and the connection closes") {
  TestNode node;
  const auto refused = [&](const HelloMeta& mine, Status status) {
    Peer peer(node.node.port());
    Buffer meta;
    encode_hello(mine, meta);
    peer.send(Peer::frame(Peer::header(Opcode::kHello, 0), meta, {}));
    const Frame answer = peer.receive_frame();
    CHECK(answer.header.is_error());
    CHECK(answer.reply().status == status);
    CHECK(!answer.reply().reason.empty());
    CHECK(peer.closed());
  };
  HelloMeta features;
  features.features_required = 1ULL << 60;
  refused(features, Status::kRefusedUnsupported);
  HelloMeta tiny;
  tiny.max_fragment_bytes = 100;
  refused(tiny, Status::kRefusedLimit);
  Peer early(node.node.port());  // a request, with a payload, before HELLO
  early.send(Peer::frame(Peer::header(Opcode::kGet, 1), {}, Buffer(1000)));
  CHECK(early.receive_frame().reply().status == Status::kRefusedUnauthenticated);
  CHECK(early.closed());
  Peer garbled(node.node.port());
  garbled.send(Peer::frame(Peer::header(Opcode::kHello, 0), Buffer(3, std::byte{0xC1}), {}));
  CHECK(garbled.receive_frame().reply().status == Status::kRefusedBadRequest);
  CHECK(garbled.closed());
  Peer heavy(node.node.port());  // more meta than a handshake needs is refused before it is read
  heavy.send(Peer::frame(Peer::header(Opcode::kHello, 0), Buffer(5000), {}));
  CHECK(heavy.receive_frame().reply().status == Status::kRefusedBadRequest);
  CHECK(heavy.closed());
  CHECK(node.stat("handshake_failures") == 5);
}

TEST_CASE("with a secret, both sides prove that they know it") {
  auto options = TestNode::options();
  const Buffer secret = bytes_of("correct horse");
  options.server.secret = secret;
  TestNode node(std::move(options));
  {
    Peer peer(node.node.port());
    const HelloMeta theirs = peer.hello();
    CHECK(theirs.auth_methods == kAuthHmac);
    const Frame answer = peer.authenticate(theirs, secret);
    REQUIRE(answer.reply().status == kOk);
    Buffer nonce(16, std::byte{7});
    const auto proof = auth_mac(secret, 's', nonce, theirs.nonce, theirs.node_id);
    CHECK(answer.reply().mac == Buffer(proof.begin(), proof.end()));
    CHECK(peer.put_namespace(node.ns.id, node.ns.descriptor) == kOk);
    CHECK(peer.put(node.ns.id, {make_item(1, 0, 100)})[0] == kOk);
  }
  {
    Peer peer(node.node.port());
    const HelloMeta theirs = peer.hello();
    const Frame answer = peer.authenticate(theirs, bytes_of("wrong"));
    CHECK(answer.header.is_error());
    CHECK(answer.reply().status == Status::kRefusedUnauthenticated);
    CHECK(answer.reply().mac.empty());
    CHECK(peer.closed());
  }
  {
    Peer peer(node.node.port());  // without AUTH
    (void)peer.hello();
    peer.send_request(Opcode::kStat, 1);
    CHECK(peer.receive_frame().reply().status == Status::kRefusedUnauthenticated);
    CHECK(peer.closed());
  }
  {
    Peer first(node.node.port());  // a proof is good for its own connection only
    Peer second(node.node.port());
    (void)first.hello();
    const HelloMeta other = second.hello();
    CHECK(first.authenticate(other, secret).reply().status == Status::kRefusedUnauthenticated);
  }
  // A wrong proof twice, none at all, and a peer that left when it was asked for one.
  CHECK(TestNode::eventually([&] { return node.stat("auth_failures") == 4; }));
  CHECK(node.stat("handshake_failures") == 3);
}

TEST_CASE("bad frames close their connection and no other") {
  TestNode node;
  Peer bystander = node.connect();
  const auto broken = [&](auto&& spoil) {
    Buffer frame = Peer::frame(Peer::header(Opcode::kPing, 9), {}, {});
    spoil(frame);
    Peer peer = node.connect();
    peer.send(frame);
    CHECK(peer.closed());
    CHECK(bystander.call(Opcode::kPing).reply().status == kOk);
  };
  const auto sealed = [](Buffer& frame) { store_le(frame.data() + 28, crc32c(Bytes(frame).first(28))); };
  broken([](Buffer& frame) { frame[0] = std::byte{'X'}; });
  broken([](Buffer& frame) { frame[20] ^= std::byte{1}; });  // and so its CRC
  broken([&](Buffer& frame) {
    frame[4] = std::byte{2};
    sealed(frame);
  });
  broken([&](Buffer& frame) {
    frame[6] |= std::byte{0x10};
    sealed(frame);
  });
  broken([&](Buffer& frame) {
    store_le(frame.data() + 20, kDefaultMaxMetaBytes + 1);
    sealed(frame);
  });
  broken([&](Buffer& frame) {
    store_le(frame.data() + 24, kDefaultMaxFragmentBytes + 1);
    sealed(frame);
  });
  for (const char* fault : {"magic", "crc", "major", "flags", "meta_limit", "payload_limit"}) {
    CAPTURE(fault);
    CHECK(node.stat(std::string("frame_faults_") + fault) == 1);
  }
  broken([&](Buffer& frame) {  // a reply
    frame[6] |= std::byte{kFlagReply};
    sealed(frame);
  });
  broken([&](Buffer& frame) {  // request id 0
    store_le(frame.data() + 8, std::uint64_t{0});
    sealed(frame);
  });
  broken([&](Buffer& frame) {  // an item of a PUT that never began
    frame = Peer::frame(Peer::header(Opcode::kPut, 77, 0, 0), {}, Buffer(10));
  });
  CHECK(node.stat("protocol_faults") == 3);
}

TEST_CASE("the negotiated limit binds, not the largest one") {
  TestNode node;
  Peer peer = node.connect(Lane::kBulk, 32 * 1024);
  peer.send(Peer::frame(Peer::header(Opcode::kPing, 9), {}, Buffer(32 * 1024 + 1)));
  CHECK(peer.closed());
  CHECK(node.stat("frame_faults_payload_limit") == 1);
}

TEST_CASE("a request id that is in flight already closes the connection") {
  TestNode node;
  const auto items = std::vector<Item>{make_item(1, 0, 1000)};
  RequestMeta wait;
  wait.wait_ms = 60'000;
  for (const int kind : {0, 1, 2}) {
    CAPTURE(kind);
    Peer peer = node.connect();
    if (kind == 0) {
      peer.send_put_head(5, node.ns.id, items);
      peer.send_put_head(5, node.ns.id, items);
    } else if (kind == 1) {
      peer.send_request(Opcode::kSubscribe, 5, wait);
      peer.send_get(5, node.ns.id, items);
    } else {
      peer.send_request(Opcode::kSubscribe, 5, wait);
      peer.send_put_item(5, 0, items[0].bytes, true);
    }
    CHECK(peer.closed());
  }
  CHECK(node.stat("protocol_faults") == 3);
}

TEST_CASE("unknown and unbuilt operations are answered and the connection lives") {
  TestNode node;
  Peer peer = node.connect();
  const auto check_unsupported = [&](std::uint8_t opcode) {
    FrameHeader header = Peer::header(Opcode::kPing, 9, 0);
    header.opcode = opcode;
    peer.send(Peer::frame(header, {}, Buffer(100'000)));  // several frames: the answer comes after the last
    header.flags = kFlagEndOfRequest;
    peer.send(Peer::frame(header, {}, Buffer(10)));
    const Frame answer = peer.receive_frame();
    CHECK(answer.header.opcode == opcode);
    CHECK(answer.header.request_id == 9);
    CHECK(answer.header.item == kWholeRequest);
    CHECK(answer.header.flags == (kFlagReply | kFlagEndOfRequest | kFlagError));
    CHECK(answer.reply().status == Status::kRefusedUnsupported);
  };
  // Memory alone cannot make anything last.
  CHECK(peer.call(Opcode::kSync).reply().status == Status::kRefusedUnsupported);
  for (const Opcode opcode : {Opcode::kOpenRegion, Opcode::kPrefetch}) {
    check_unsupported(static_cast<std::uint8_t>(opcode));
  }
  check_unsupported(0);
  check_unsupported(200);
  CHECK(node.stat("requests_unknown") >= 2);
  const Frame again = peer.call(Opcode::kHello);
  CHECK(again.reply().status == Status::kRefusedBadRequest);
  CHECK(peer.call(Opcode::kPing).reply().status == kOk);
}

TEST_CASE("requests that make no sense are refused and the connection lives") {
  TestNode node;
  Peer peer = node.connect();
  const auto refused = [&](const Buffer& frame, Status status) {
    peer.send(frame);
    const Frame answer = peer.receive_frame();
    CHECK(answer.header.is_error());
    CHECK(answer.reply().status == status);
    CHECK(!answer.reply().reason.empty());
  };
  const auto with_meta = [](Opcode opcode, std::initializer_list<int> meta) {
    Buffer bytes;
    for (const int byte : meta) bytes.push_back(static_cast<std::byte>(byte));
    return Peer::frame(Peer::header(opcode, 9), bytes, {});
  };
  refused(with_meta(Opcode::kStat, {0x81, 0x64, 0x01}), Status::kRefusedUnsupported);  // critical key 100
  refused(with_meta(Opcode::kStat, {0x81, 0x02, 0xC3}), Status::kRefusedBadRequest);   // deadline: true
  refused(with_meta(Opcode::kStat, {0xDF, 0xFF, 0xFF, 0xFF, 0xFF}), Status::kRefusedBadRequest);
  refused(Peer::frame(Peer::header(Opcode::kPing, 9, 0), {}, {}), Status::kRefusedBadRequest);  // no end
  refused(Peer::frame(Peer::header(Opcode::kPing, 9, kFlagEndOfRequest, 3), {}, {}),
          Status::kRefusedBadRequest);
  for (const Opcode opcode :
       {Opcode::kGet, Opcode::kExists, Opcode::kRemove, Opcode::kErase, Opcode::kPutNs, Opcode::kPut}) {
    refused(Peer::frame(Peer::header(opcode, 9), {}, {}), Status::kRefusedBadRequest);  // no namespace
  }
  RequestMeta meta;
  meta.ns = node.ns.id;
  Buffer table = Peer::table_of({make_item(1, 0, 10)});
  table.pop_back();
  refused(Peer::frame(Peer::header(Opcode::kGet, 9), Peer::encoded(meta), table), Status::kRefusedBadRequest);
  store_le(table.data(), kMaxItemsPerRequest + 1);
  refused(Peer::frame(Peer::header(Opcode::kRemove, 9), Peer::encoded(meta), table),
          Status::kRefusedBadRequest);
  refused(Peer::frame(Peer::header(Opcode::kExists, 9), Peer::encoded(meta), table),
          Status::kRefusedBadRequest);
  Buffer ignorable = Peer::encoded(meta);
  ignorable[0] = std::byte{0x82};
  for (const int byte : {0xCC, 0xC8, 0x05}) ignorable.push_back(static_cast<std::byte>(byte));  // key 200
  peer.send(Peer::frame(Peer::header(Opcode::kErase, 9), ignorable, {}));
  CHECK(peer.receive_frame().reply().status == kOk);
}

TEST_CASE("half-open connections end at the handshake timeout") {
  auto options = TestNode::options();
  options.server.handshake_timeout_ms = 1000;
  TestNode node(std::move(options));
  Peer silent(node.node.port());
  Peer partial(node.node.port());
  partial.send(Bytes(raw_hello()).first(20));
  Peer good = node.connect();
  CHECK(silent.closed());
  CHECK(partial.closed());
  CHECK(node.stat("handshake_timeouts") == 2);
  std::this_thread::sleep_for(1200ms);
  CHECK(good.call(Opcode::kPing).reply().status == kOk);  // an idle connection that is past it stays
}

TEST_CASE("who owes bytes and sends none is dropped after the stall timeout") {
  auto options = TestNode::options();
  options.server.stall_timeout_ms = 200;
  TestNode node(std::move(options));
  Peer idle = node.connect();
  Peer in_frame = node.connect();
  in_frame.send(Bytes(Peer::frame(Peer::header(Opcode::kPing, 1), {}, Buffer(100))).first(50));
  Peer in_put = node.connect();
  const std::vector<Item> items{make_item(1, 0, 1 << 20)};
  in_put.send_put_head(1, node.ns.id, items);
  in_put.send(Peer::frame(Peer::header(Opcode::kPut, 1, 0, 0), {}, Bytes(items[0].bytes).first(1000)));
  CHECK(in_frame.closed());
  CHECK(in_put.closed());
  CHECK(node.stat("stalls") == 2);
  CHECK(node.stat("filling") == 0);
  CHECK(idle.call(Opcode::kPing).reply().status == kOk);
}

TEST_CASE("a reader that takes nothing is dropped after the stall timeout, and its pins go") {
  auto options = TestNode::options();
  options.server.stall_timeout_ms = 1000;
  TestNode node(std::move(options));
  Peer peer = node.connect();
  std::vector<Item> items;
  for (std::uint64_t i = 0; i < 40; ++i) items.push_back(make_item(i, 0, 1 << 20));
  for (const Item& item : items) REQUIRE(peer.put(node.ns.id, {item})[0] == kOk);
  Peer slow = node.connect();
  slow.send_get(1, node.ns.id, items);
  REQUIRE(TestNode::eventually([&] { return node.stat("pins") > 0; }));
  CHECK(node.stat("pins") <= 4);  // the window, not the whole batch
  CHECK(TestNode::eventually([&] { return node.stat("stalls") == 1; }, 5s));
  CHECK(TestNode::eventually([&] { return node.stat("pins") == 0; }));
  CHECK(slow.closed());
  // One that takes its time, but takes, is served to the end.
  Peer steady = node.connect();
  steady.send_get(1, node.ns.id, items);
  Buffer piece(2 << 20);
  for (int i = 0; i < 10; ++i) {
    std::this_thread::sleep_for(150ms);
    REQUIRE(steady.receive(piece));
  }
  CHECK(node.stat("stalls") == 1);
  steady.reset();
}

TEST_CASE("a peer that asks and never reads its answers is not read from for ever") {
  TestNode node;
  Peer peer = node.connect();
  for (int i = 0; i < 15; ++i) {  // so that an answer to LIST is almost 1 MiB
    const TestNamespace large(std::string(60'000, 'x') + std::to_string(i));
    REQUIRE(peer.put_namespace(large.id, large.descriptor) == kOk);
  }
  const timeval soon{1, 0};
  ::setsockopt(peer.fd(), SOL_SOCKET, SO_SNDTIMEO, &soon, sizeof soon);
  const Buffer ballast(256 * 1024);  // ignored
  std::uint64_t asked = 0;
  try {
    while (asked < 1000) peer.send_request(Opcode::kList, ++asked, {}, ballast);
    FAIL("the server took every request");
  } catch (const std::runtime_error&) {
    // The send buffers are full: the server has stopped reading.
  }
  CHECK(node.stat("requests_list") < asked);
  // Once the answers are taken, the rest is served too. The last request was cut short, the ones before were
  // not.
  for (std::uint64_t id = 1; id < asked; ++id) REQUIRE(peer.receive_frame().header.request_id == id);
  CHECK(node.stat("stalls") == 0);
}

TEST_CASE("too many requests in flight are told to come again") {
  TestNode node;
  Peer peer = node.connect();
  RequestMeta wait;
  wait.wait_ms = 60'000;
  for (std::uint64_t id = 1001; id <= 1257; ++id) peer.send_request(Opcode::kSubscribe, id, wait);
  const Frame busy = peer.receive_frame();
  CHECK(busy.header.request_id == 1257);
  CHECK(busy.reply().status == Status::kAgainBusy);
  CHECK(busy.reply().retry_after_ms > 0);
  const std::vector<Item> items{make_item(1, 0, 1000)};
  CHECK(peer.get(node.ns.id, items).meta.status == Status::kAgainBusy);
  const std::uint64_t put = peer.next_id();
  peer.send_put_head(put, node.ns.id, items);  // refused, and yet its items are taken off the wire
  peer.send_put_item(put, 0, items[0].bytes, true);
  CHECK(peer.receive_frame().reply().status == Status::kAgainBusy);
  CHECK(peer.call(Opcode::kPing).reply().status == kOk);
  CHECK(node.stat("requests_busy") == 3);
  node.node.publish_view(make_view(1));
  for (int i = 0; i < 256; ++i) CHECK(peer.receive_frame().reply().status == kOk);
  CHECK(peer.put(node.ns.id, items)[0] == kOk);
}

TEST_CASE("SUBSCRIBE answers at once, when the view changes, or when the wait is over") {
  TestNode node;
  Peer peer = node.connect(Lane::kControl);
  RequestMeta meta;
  CHECK(peer.call(Opcode::kSubscribe, meta).payload.empty());  // no view yet
  meta.wait_ms = 30;
  auto began = Clock::now();
  CHECK(peer.call(Opcode::kSubscribe, meta).payload.empty());
  CHECK(Clock::now() - began >= 30ms);
  const Buffer first = make_view(5);
  meta.wait_ms = 30'000;
  peer.send_request(Opcode::kSubscribe, 1, meta);
  peer.send_request(Opcode::kPing, 2);
  CHECK(peer.receive_frame().header.request_id == 2);  // waiting holds up nobody
  node.node.publish_view(first);
  const Frame answer = peer.receive_frame();
  CHECK(answer.header.request_id == 1);
  CHECK(answer.payload == first);
  meta.known_revision = 4;
  CHECK(peer.call(Opcode::kSubscribe, meta).payload == first);  // differs from the known one: at once
  meta.known_revision = 5;
  peer.send_request(Opcode::kSubscribe, 3, meta);
  node.node.publish_view(first);  // the same revision wakes nobody
  const Buffer second = make_view(6);
  node.node.publish_view(second);
  CHECK(peer.receive_frame().payload == second);
  CHECK_THROWS_AS(node.node.publish_view(Buffer(100)), std::invalid_argument);
}

TEST_CASE("PUT_NS checks the digest and names the nearest; LIST pages; ERASE empties") {
  TestNode node;
  Peer peer = node.connect(Lane::kBulk, 16 * 1024);
  const TestNamespace other("another salt");
  RequestMeta meta;
  meta.ns = other.id;
  meta.descriptor = other.descriptor;
  meta.label = "a label";
  const ReplyMeta answer = peer.call(Opcode::kPutNs, meta).reply();
  CHECK(answer.status == kOk);
  CHECK(answer.nearest_differs_in == std::vector<std::uint16_t>{4});
  CHECK(peer.put_namespace(node.ns.id, other.descriptor) == Status::kRefusedNamespace);
  auto unsorted = make_descriptor({{4, "x"}, {2, "y"}});
  CHECK(peer.put_namespace(namespace_id(unsorted), unsorted) == Status::kRefusedNamespace);

  std::vector<TestNamespace> many;
  for (int i = 0; i < 30; ++i) many.emplace_back(std::string(1000, 'x') + std::to_string(i));
  for (const TestNamespace& ns : many) REQUIRE(peer.put_namespace(ns.id, ns.descriptor) == kOk);
  for (std::uint64_t i = 0; i < 5; ++i) REQUIRE(peer.put(other.id, {make_item(i, 0, 1000)})[0] == kOk);

  std::vector<NamespaceInfo> listed;
  RequestMeta list;
  int pages = 0;
  do {
    const Frame page = peer.call(Opcode::kList, list);
    REQUIRE(page.payload.size() <= 16 * 1024);
    const auto part = decode_namespaces(page.payload);
    REQUIRE(part);
    listed.insert(listed.end(), part->begin(), part->end());
    list.cursor = page.reply().cursor;
    ++pages;
  } while (list.cursor != 0);
  CHECK(pages > 1);
  REQUIRE(listed.size() == 32);
  CHECK(listed[1].id == other.id);
  CHECK(listed[1].descriptor == other.descriptor);
  CHECK(listed[1].label == "a label");
  CHECK(listed[1].objects == 5);
  CHECK(listed[1].stored_bytes == 5000);
  CHECK(listed[1].created_s > 1'600'000'000);
  list = {};
  list.limit = 3;
  const Frame three = peer.call(Opcode::kList, list);
  CHECK(decode_namespaces(three.payload)->size() == 3);
  CHECK(three.reply().cursor == 3);

  meta = {};
  meta.ns = other.id;
  CHECK(peer.call(Opcode::kErase, meta).reply().length == 5);
  CHECK(peer.call(Opcode::kErase, meta).reply().length == 0);
  CHECK(peer.get(other.id, {make_item(1, 0, 1000)}).statuses[0] == Status::kMissNotFound);
  CHECK(node.stat("objects") == 0);
  CHECK(node.stat("used_bytes") == 0);
}

TEST_CASE("only the node's own tenant may register, where one is set") {
  auto options = TestNode::options();
  options.store.tenant = bytes_of("mine");
  auto node = std::make_unique<Node>(std::move(options));
  node->start();
  Peer peer(node->port());
  (void)peer.hello();
  const auto mine = make_descriptor({{1, "mine"}, {2, "x"}});
  const auto yours = make_descriptor({{1, "yours"}, {2, "x"}});
  const auto nobodys = make_descriptor({{2, "x"}});
  CHECK(peer.put_namespace(namespace_id(mine), mine) == kOk);
  CHECK(peer.put_namespace(namespace_id(yours), yours) == Status::kRefusedNamespace);
  CHECK(peer.put_namespace(namespace_id(nobodys), nobodys) == Status::kRefusedNamespace);
  CHECK(node->stop(Clock::now() + 10s));
}

TEST_CASE("STAT gives the counters that stats() gives") {
  TestNode node;
  Peer peer = node.connect();
  REQUIRE(peer.put(node.ns.id, {make_item(1, 0, 1000)})[0] == kOk);
  const auto counters = decode_counters(peer.call(Opcode::kStat).payload);
  REQUIRE(counters);
  const auto own = node.node.stats();
  REQUIRE(counters->size() == own.size());
  for (std::size_t i = 0; i < own.size(); ++i) CHECK((*counters)[i].first == own[i].first);
  const std::map<std::string, std::uint64_t> by_name(counters->begin(), counters->end());
  CHECK(by_name.at("objects") == 1);
  CHECK(by_name.at("requests_put") == 1);
  CHECK(by_name.at("items_put_ok") == 1);
  CHECK(by_name.at("connections_open") == 1);
  CHECK(by_name.at("connections_total") == 1);
  CHECK(by_name.at("bytes_in") > 1000);
}

TEST_CASE("connections beyond the limit are refused; the ones that are there stay") {
  auto options = TestNode::options();
  options.server.max_connections = 2;
  TestNode node(std::move(options));
  Peer a = node.connect();
  auto b = std::make_unique<Peer>(node.connect());
  Peer c(node.node.port());
  CHECK(c.closed());
  CHECK(node.stat("connections_refused") == 1);
  CHECK(a.call(Opcode::kPing).reply().status == kOk);
  b.reset();
  REQUIRE(TestNode::eventually([&] { return node.stat("connections_open") == 1; }));
  Peer d = node.connect();
  CHECK(d.call(Opcode::kPing).reply().status == kOk);
}

TEST_CASE("half-open connections make way for newer ones, oldest first") {
  auto options = TestNode::options();
  options.server.max_connections = 8;
  options.server.handshake_timeout_ms = 60'000;
  options.server.secret = Buffer(16, std::byte{1});
  TestNode node(std::move(options));
  const auto introduce = [&node] {
    Peer peer(node.node.port());
    const Buffer secret(16, std::byte{1});
    REQUIRE(peer.authenticate(peer.hello(), secret).reply().status == kOk);
    return peer;
  };
  Peer first = introduce();
  std::vector<Peer> silent;
  for (int i = 0; i < 5; ++i) silent.emplace_back(node.node.port());
  for (int i = 0; i < 2; ++i) (void)silent.emplace_back(node.node.port()).hello();  // asked for a proof
  REQUIRE(TestNode::eventually([&] { return node.stat("connections_open") == 8; }));
  std::vector<Peer> good;
  for (int i = 0; i < 4; ++i) good.push_back(introduce());
  CHECK(node.stat("connections_shed") == 4);
  CHECK(node.stat("connections_refused") == 0);
  // Two reactors take turns, so that each sheds its own oldest.
  for (int i = 0; i < 4; ++i) CHECK(silent[static_cast<std::size_t>(i)].closed());
  for (int i = 0; i < 3; ++i) good.push_back(introduce());
  CHECK(node.stat("connections_shed") == 7);
  // Nobody is half open any more: who is in stays, and the next is refused.
  Peer late(node.node.port());
  CHECK(late.closed());
  CHECK(node.stat("connections_refused") == 1);
  CHECK(first.call(Opcode::kPing).reply().status == kOk);
  for (Peer& peer : good) CHECK(peer.call(Opcode::kPing).reply().status == kOk);
}

TEST_CASE("requests of all connections share one budget; every connection has a little of its own") {
  auto options = TestNode::options();
  options.server.max_request_bytes = 1 * kMiB;
  TestNode node(std::move(options));
  Buffer whole = Peer::frame(Peer::header(Opcode::kGet, 9), {}, Buffer(1 * kMiB));
  Peer a = node.connect();
  a.send(Bytes(whole).first(1000));  // announced, and not sent
  REQUIRE(TestNode::eventually([&] { return node.stat("request_bytes") == 1 * kMiB - server::kOwnBytes; }));
  Peer b = node.connect();
  RequestMeta meta;
  meta.ns = node.ns.id;
  const Frame busy = b.call(Opcode::kGet, meta, Buffer(1 * kMiB));
  CHECK(busy.reply().status == Status::kAgainBusy);
  CHECK(busy.reply().retry_after_ms > 0);
  std::vector<Item> many;
  for (std::uint64_t i = 0; i < 10'000; ++i) many.push_back(make_item(i, 0, 4));
  b.send_put_head(50, node.ns.id, many);
  b.send_request(Opcode::kPut, 50);
  CHECK(b.receive_frame().reply().status == Status::kAgainBusy);
  CHECK(node.stat("requests_busy") == 2);
  // What fits into the connection's own share goes on as ever.
  CHECK(b.put(node.ns.id, {make_item(1, 0, 5000)})[0] == kOk);
  CHECK(b.get(node.ns.id, {make_item(1, 0, 5000)}).statuses[0] == kOk);
  // Meta would have to be received before it could be refused.
  Peer c = node.connect();
  c.send(Peer::frame(Peer::header(Opcode::kPing, 1), Buffer(200 * kKiB), {}));
  CHECK(c.closed());
  a.disconnect();
  REQUIRE(TestNode::eventually([&] { return node.stat("request_bytes") == 0; }));
  // A store and a read that are under way hold their tables.
  b.send_put_head(51, node.ns.id, many);
  REQUIRE(TestNode::eventually([&] { return node.stat("request_bytes") > 300 * kKiB; }));
  b.send_request(Opcode::kPut, 51);
  CHECK(b.receive_frame().reply().status == kOk);
  const auto got = b.get(node.ns.id, many);
  CHECK(got.statuses.size() == many.size());
  CHECK(node.stat("request_bytes") == 0);
}

TEST_CASE("an address that others reach needs a secret, or the word that it is meant") {
  auto options = TestNode::options();
  options.server.host = "0.0.0.0";
  CHECK_THROWS_AS(Node{std::move(options)}, std::invalid_argument);
  options = TestNode::options();
  options.server.host = "::";
  CHECK_THROWS_AS(Node{std::move(options)}, std::invalid_argument);
  options = TestNode::options();
  options.server.host = "0.0.0.0";
  options.server.insecure = true;
  TestNode open(std::move(options));
  CHECK(open.connect().call(Opcode::kPing).reply().status == kOk);
  options = TestNode::options();
  options.server.host = "0.0.0.0";
  options.server.secret = bytes_of("s");
  CHECK_NOTHROW(Node{std::move(options)});
  options = TestNode::options();
  options.server.host = "127.0.0.1";
  options.server.port = open.node.port();
  CHECK_THROWS_AS(Node{std::move(options)}, std::system_error);
}

TEST_CASE("options out of range are refused with what to do") {
  const auto refused = [](auto&& spoil) {
    auto options = TestNode::options();
    spoil(options);
    CHECK_THROWS_AS(Node{std::move(options)}, std::invalid_argument);
  };
  refused([](NodeOptions& o) { o.server.node_id.clear(); });
  refused([](NodeOptions& o) { o.server.threads = 0; });
  refused([](NodeOptions& o) { o.server.max_connections = 0; });
  refused([](NodeOptions& o) { o.server.stall_timeout_ms = 0; });
  refused([](NodeOptions& o) { o.server.secret = Buffer{}; });
  refused([](NodeOptions& o) { o.store.catalog.capacity_bytes = 1000; });
  refused([](NodeOptions& o) { o.store.catalog.max_object_bytes = 0; });
  refused([](NodeOptions& o) { o.store.catalog.max_object_bytes = 2ULL << 30; });
  refused([](NodeOptions& o) { o.store.catalog.max_leased_fraction = 1.5; });
  auto options = TestNode::options(1ULL << 44);
  try {
    const Node node(std::move(options));
    FAIL("16 TiB were had");
  } catch (const std::system_error& error) {
    CHECK(error.code() == std::errc::not_enough_memory);
  }
}

TEST_CASE("stop ends everything in time, also with transfers under way, and more than once") {
  auto node = std::make_unique<Node>(TestNode::options());
  node->start();
  CHECK_THROWS_AS(node->start(), std::logic_error);
  const TestNamespace ns("server");
  Peer writer(node->port());
  (void)writer.hello();
  REQUIRE(writer.put_namespace(ns.id, ns.descriptor) == kOk);
  std::vector<Item> items;
  for (std::uint64_t i = 0; i < 20; ++i) items.push_back(make_item(i, 0, 1 << 20));
  for (const Item& item : items) REQUIRE(writer.put(ns.id, {item})[0] == kOk);
  Peer reader(node->port());
  (void)reader.hello();
  reader.send_get(1, ns.id, items);
  writer.send_put_head(1, ns.id, {make_item(99, 0, 1 << 20)});
  writer.send(Peer::frame(Peer::header(Opcode::kPut, 1, 0, 0), {}, Buffer(1000)));
  RequestMeta wait;
  wait.wait_ms = 60'000;
  writer.send_request(Opcode::kSubscribe, 2, wait);
  std::this_thread::sleep_for(20ms);
  const auto began = Clock::now();
  CHECK(node->stop(Clock::now() + 10s));
  CHECK(Clock::now() - began < 5s);
  CHECK(node->stop(Clock::now()));
  CHECK(writer.closed());
  CHECK(node->store().violations(true) == std::vector<std::string>{});
  CHECK_THROWS(Peer(node->port()));
  CHECK_THROWS_AS(node->start(), std::logic_error);
  Node never_started(TestNode::options());
  CHECK(never_started.stop(Clock::now()));
}

TEST_CASE("many short connections leave nothing behind") {
  TestNode node;
  for (int i = 0; i < 200; ++i) {
    Peer peer(node.node.port());
    if (i % 3 == 0) (void)peer.hello();
    if (i % 3 == 1) peer.send(Bytes(raw_hello()).first(static_cast<std::size_t>(i) % 32));
    if (i % 5 == 0) peer.reset();
  }
  CHECK(TestNode::eventually([&] { return node.stat("connections_open") == 0; }));
}
