// The client against peers that behave: batches, routing, views, limits.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "net/client.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <numeric>

#include "tests/client_harness.h"

using namespace dfkv;
using namespace dfkv::test;

TEST_CASE("put, exists, get and remove: random sizes, scattered memory") {
  FakePeer peer;
  Client client(options_for(peer.port));
  const auto ns = add_test_namespace(client);
  const std::uint64_t seed = std::random_device{}();
  INFO("seed ", seed);
  std::mt19937_64 random(seed);

  constexpr std::size_t kItems = 24;
  std::vector<ByteVector> stored;
  for (std::size_t i = 0; i < kItems; ++i) {
    const std::size_t size = i == 0 ? 1 : i == 1 ? (3 << 20) + 17 : 1 + random() % 300'000;
    stored.push_back(random_bytes(size, random));
  }
  Batch put(Kind::kPut, ns);
  for (std::size_t i = 0; i < kItems; ++i) put.item(block_of(i), 5, cut_randomly(stored[i], 9, random));
  const auto put_op = put.submit(client);
  REQUIRE(put_op->wait(10s));
  for (std::size_t i = 0; i < kItems; ++i) {
    CHECK(name_of(status_of(*put_op, i)) == "ok");
    CHECK(peer.load(block_of(i), 5) == stored[i]);
  }

  Batch exists(Kind::kExists, ns);
  exists.parts({5});
  for (std::size_t i = 0; i < kItems + 3; ++i) exists.chunk(block_of(i));
  const auto exists_op = exists.submit(client);
  REQUIRE(exists_op->wait(10s));
  CHECK(exists_op->prefix() == kItems);
  CHECK(name_of(status_of(*exists_op, kItems)) == "not_found");

  std::vector<ByteVector> received;
  for (const auto& bytes : stored) received.emplace_back(bytes.size());
  Batch get(Kind::kGet, ns);
  for (std::size_t i = 0; i < kItems; ++i) get.item(block_of(i), 5, cut_randomly(received[i], 100, random));
  const auto get_op = get.submit(client);
  REQUIRE(get_op->wait(10s));
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < kItems; ++i) {
    CHECK(name_of(status_of(*get_op, i)) == "ok");
    CHECK(received[i] == stored[i]);
    total += stored[i].size();
  }
  CHECK(get_op->payload_bytes() == total);
  CHECK(put_op->payload_bytes() == total);
  // Payload goes into the caller's memory without a stop, but for the few bytes behind a header.
  CHECK(client.counters().user_copied_bytes.load() <= kItems * 4 * 128);

  ByteVector one(1);
  const auto remove_op =
      Batch(Kind::kRemove, ns).item(block_of(0), 5, one).item(block_of(99), 5, one).submit(client);
  REQUIRE(remove_op->wait(10s));
  CHECK(name_of(status_of(*remove_op, 0)) == "ok");
  CHECK(name_of(status_of(*remove_op, 1)) == "not_found");
  CHECK(!peer.load(block_of(0), 5));
  CHECK(client.counters().inflight_operations.load() == 0);
  CHECK(client.counters().inflight_bytes.load() == 0);
}

TEST_CASE("a segment at address 0 is verified and thrown away") {
  FakePeer peer;
  Client client(options_for(peer.port));
  const auto ns = add_test_namespace(client);
  std::mt19937_64 random(7);
  const auto bytes = random_bytes(700'000, random);
  peer.store(block_of(1), 0, bytes);
  ByteVector head(1000);
  ByteVector tail(500);
  const auto at = [](ByteVector& memory) { return reinterpret_cast<std::uint64_t>(memory.data()); };
  const auto op = Batch(Kind::kGet, ns)
                      .item(block_of(1), 0, {{at(head), 1000}, {0, 698'500}, {at(tail), 500}})
                      .submit(client);
  REQUIRE(op->wait(5s));
  CHECK(name_of(status_of(*op)) == "ok");
  CHECK(std::equal(head.begin(), head.end(), bytes.begin()));
  CHECK(std::equal(tail.rbegin(), tail.rend(), bytes.rbegin()));
}

TEST_CASE("keys go to their owners, and a lookup's prefix runs over all of them") {
  FakePeer a("node-a");
  FakePeer b("node-b");
  View view;
  view.revision = 5;
  view.nodes.resize(2);
  view.nodes[0].id = "node-a";
  view.nodes[0].tcp = {a.address()};
  view.nodes[1].id = "node-b";
  view.nodes[1].tcp = {b.address()};
  a.set_view(view);
  b.set_view(view);
  Client client(options_for(a.port));
  const auto ns = add_test_namespace(client);
  constexpr std::size_t kChunks = 100;
  std::vector<ByteVector> stored(kChunks, ByteVector(64, std::byte{3}));
  Batch put(Kind::kPut, ns);
  for (std::size_t i = 0; i < kChunks; ++i) put.item(block_of(i), 1, stored[i]);
  const auto put_op = put.submit(client);
  REQUIRE(put_op->wait(5s));
  CHECK(put_op->view_revision() == 5);
  const auto ring = client::read_ring(view);
  for (std::size_t i = 0; i < kChunks; ++i) {
    auto& owner = ring.owner(route_of(block_of(i))) == 0 ? a : b;
    auto& other = ring.owner(route_of(block_of(i))) == 0 ? b : a;
    CHECK(owner.load(block_of(i), 1));
    CHECK(!other.load(block_of(i), 1));
  }
  CHECK(a.objects() > 20);
  CHECK(b.objects() > 20);
  Batch exists(Kind::kExists, ns);
  exists.parts({1});
  for (std::size_t i = 0; i < kChunks; ++i) exists.chunk(block_of(i == 60 ? 1000 : i));
  exists.input.lease_ms = 1000;
  const auto op = exists.submit(client);
  REQUIRE(op->wait(5s));
  CHECK(op->prefix() == 60);
  CHECK(op->leases().size() == 2);
  CHECK(op->round_trips() == 2);
  client.release(op->leases());
  CHECK(eventually([&] { return a.released_lease == 77 && b.released_lease == 77; }));
}

TEST_CASE("a draining node is read and not written; removal asks both") {
  FakePeer a("node-a");
  FakePeer b("node-b");
  View view;
  view.revision = 1;
  view.nodes.resize(2);
  view.nodes[0].id = "node-a";
  view.nodes[0].tcp = {a.address()};
  view.nodes[0].state = NodeState::kDraining;
  view.nodes[1].id = "node-b";
  view.nodes[1].tcp = {b.address()};
  a.set_view(view);
  Client client(options_for(a.port));
  const auto ns = add_test_namespace(client);
  std::uint64_t n = 0;
  while (client::read_ring(view).owner(route_of(block_of(n))) != 0) ++n;
  ByteVector memory(10, std::byte{1});
  auto op = Batch(Kind::kPut, ns).item(block_of(n), 0, memory).submit(client);
  REQUIRE(op->wait(5s));
  CHECK(name_of(status_of(*op)) == "ok");
  CHECK(b.load(block_of(n), 0));
  a.store(block_of(n), 0, memory);
  op = Batch(Kind::kGet, ns).item(block_of(n), 0, memory).submit(client);
  REQUIRE(op->wait(5s));
  CHECK(name_of(status_of(*op)) == "ok");
  op = Batch(Kind::kRemove, ns).item(block_of(n), 0, memory).submit(client);
  REQUIRE(op->wait(5s));
  CHECK(name_of(status_of(*op)) == "ok");
  CHECK(!a.load(block_of(n), 0));
  CHECK(!b.load(block_of(n), 0));
}

TEST_CASE("large batches are spread over the bulk connections, small ones are not") {
  FakePeer peer;
  std::mutex mutex;
  std::map<int, std::size_t> items_by_connection;
  peer.set_hook([&](FakePeer::Conn& conn, const Frame& frame) {
    std::vector<ItemRef> items;
    if (frame.opcode() == Opcode::kGet && decode_item_table(frame.payload, items)) {
      const std::lock_guard lock(mutex);
      items_by_connection[conn.number] += items.size();
    }
    return false;
  });
  auto options = options_for(peer.port);
  options.connections_per_node = 3;
  Client client(options);
  const auto ns = add_test_namespace(client);
  std::mt19937_64 random(11);
  std::vector<ByteVector> memory;
  for (std::uint64_t i = 0; i < 12; ++i) {
    peer.store(block_of(i), 0, random_bytes(512 * 1024, random));
    memory.emplace_back(512 * 1024);
  }
  // All three connections stand.
  REQUIRE(eventually([&] { return client.counters().connects.load() >= 5; }));
  auto small =
      Batch(Kind::kGet, ns).item(block_of(0), 0, memory[0]).item(block_of(1), 0, memory[1]).submit(client);
  REQUIRE(small->wait(5s));
  {
    const std::lock_guard lock(mutex);
    CHECK(items_by_connection.size() == 1);
    items_by_connection.clear();
  }
  Batch large(Kind::kGet, ns);
  for (std::uint64_t i = 0; i < 12; ++i) large.item(block_of(i), 0, memory[i]);
  const auto op = large.submit(client);
  REQUIRE(op->wait(5s));
  CHECK(items_by_connection.size() == 3);
  for (const auto& [connection, items] : items_by_connection) CHECK(items == 4);
  for (std::uint64_t i = 0; i < 12; ++i) {
    CHECK(name_of(status_of(*op, i)) == "ok");
    CHECK(peer.load(block_of(i), 0) == memory[i]);
  }
  peer.stop();  // before what its hook refers to goes
}

TEST_CASE("small negotiated limits: fragments and tables fit them") {
  FakePeer peer;
  peer.max_fragment_bytes = 16 * 1024;
  std::atomic<std::uint32_t> largest{0};
  peer.set_hook([&](FakePeer::Conn&, const Frame& frame) {
    largest = std::max(largest.load(), frame.header.payload_bytes);
    return false;
  });
  Client client(options_for(peer.port));
  const auto ns = add_test_namespace(client);
  std::mt19937_64 random(3);
  auto bytes = random_bytes(200'000, random);
  Batch put(Kind::kPut, ns);
  put.item(block_of(0), 0, bytes);
  std::vector<ByteVector> tiny(1000, ByteVector(1));
  for (std::size_t i = 0; i < tiny.size(); ++i) put.item(block_of(i + 1), 0, tiny[i]);
  const auto op = put.submit(client);
  REQUIRE(op->wait(10s));
  for (std::size_t i = 0; i <= tiny.size(); ++i) CHECK(name_of(status_of(*op, i)) == "ok");
  CHECK(peer.load(block_of(0), 0) == bytes);
  CHECK(largest <= 16 * 1024);
  Batch exists(Kind::kExists, ns);
  exists.parts({0});
  for (std::size_t i = 0; i <= tiny.size(); ++i) exists.chunk(block_of(i));
  const auto found = exists.submit(client);
  REQUIRE(found->wait(5s));
  CHECK(found->prefix() == tiny.size() + 1);
  CHECK(largest <= 16 * 1024);
  peer.stop();  // before what its hook refers to goes
}

TEST_CASE("every namespace is registered before anything else on every connection") {
  FakePeer peer;
  std::mutex mutex;
  std::map<int, std::vector<Opcode>> order;
  peer.set_hook([&](FakePeer::Conn& conn, const Frame& frame) {
    const std::lock_guard lock(mutex);
    if (frame.header.item == kWholeRequest) order[conn.number].push_back(frame.opcode());
    return false;
  });
  Client client(options_for(peer.port));
  const auto ns = add_test_namespace(client);
  ByteVector memory(100);
  for (int i = 0; i < 4; ++i) {
    const auto op = Batch(Kind::kPut, ns).item(block_of(1), 0, memory).submit(client);
    REQUIRE(op->wait(5s));
    CHECK(is_done(status_of(*op)));
  }
  peer.stop();  // before what its hook refers to is read
  std::size_t puts = 0;
  for (const auto& [number, opcodes] : order) {
    const auto put = std::ranges::find(opcodes, Opcode::kPut);
    if (put == opcodes.end()) continue;
    ++puts;
    CHECK(std::find(opcodes.begin(), put, Opcode::kPutNs) != put);
  }
  CHECK(puts >= 1);
}

TEST_CASE("a node that forgot the namespace is told again") {
  FakePeer peer;
  Client client(options_for(peer.port));
  const auto ns = add_test_namespace(client);
  peer.store(block_of(1), 0, ByteVector(8));
  const auto ask = [&] {
    const auto op = Batch(Kind::kExists, ns).parts({0}).chunk(block_of(1)).submit(client);
    REQUIRE(op->wait(5s));
    return name_of(status_of(*op));
  };
  CHECK(ask() == "ok");
  // Every connection has registered it: none does so between here and the next question.
  REQUIRE(eventually([&] { return client.counters().namespaces_registered.load() == 3; }));
  peer.forget_namespaces();
  CHECK(ask() == "namespace_unknown");
  CHECK(ask() == "ok");
}

TEST_CASE("views: the newer is taken, an older or empty one never") {
  FakePeer a("node-a");
  FakePeer b("node-b");
  View both;
  both.revision = 7;
  both.nodes.resize(2);
  both.nodes[0].id = "node-a";
  both.nodes[0].tcp = {a.address()};
  both.nodes[1].id = "node-b";
  both.nodes[1].tcp = {b.address()};
  a.set_view(both);
  Client client(options_for(a.port));
  REQUIRE(client.wait_ready(5s));
  const auto revision = [&] { return decode_view(client.encoded_view())->revision; };
  CHECK(revision() == 7);
  View older = both;
  older.revision = 6;
  older.nodes.resize(1);
  a.set_view(older);
  CHECK(eventually([&] { return client.counters().views_refused.load() == 1; }));
  View empty = both;
  empty.revision = 8;
  for (auto& node : empty.nodes) node.state = NodeState::kGone;
  a.set_view(empty);
  CHECK(eventually([&] { return client.counters().views_refused.load() == 2; }));
  CHECK(revision() == 7);
  View newer = both;
  newer.revision = 9;
  a.set_view(newer);
  CHECK(eventually([&] { return revision() == 9; }));
}

TEST_CASE("judge_view") {
  using client::judge_view;
  using client::ViewVerdict;
  View view;
  view.cluster_id[0] = std::byte{5};
  view.revision = 10;
  view.nodes.resize(1);
  view.nodes[0].id = "a";
  const auto other = [&](int cluster, std::uint64_t revision) {
    View changed = view;
    changed.cluster_id[0] = static_cast<std::byte>(cluster);
    changed.revision = revision;
    return changed;
  };
  CHECK(judge_view(nullptr, {}, view) == ViewVerdict::kTake);
  CHECK(judge_view(&view, {}, view) == ViewVerdict::kSame);
  CHECK(judge_view(&view, {}, other(5, 9)) == ViewVerdict::kOlder);
  CHECK(judge_view(&view, {}, other(5, 11)) == ViewVerdict::kTake);
  CHECK(judge_view(&view, {}, other(4, 99)) == ViewVerdict::kOlder);
  CHECK(judge_view(&view, {}, other(6, 1)) == ViewVerdict::kTake);
  CHECK(judge_view(&view, {true, false}, other(4, 1)) == ViewVerdict::kTake);
  CHECK(judge_view(&view, {false, true}, other(4, 1)) == ViewVerdict::kTake);
  CHECK(judge_view(&view, {false, true}, other(5, 9)) == ViewVerdict::kOlder);
  CHECK(judge_view(&view, {false, true}, view) == ViewVerdict::kTake);
  View empty = view;
  empty.revision = 11;
  empty.nodes[0].read_weight = 0;
  CHECK(judge_view(&view, {}, empty) == ViewVerdict::kEmpty);
  CHECK(judge_view(nullptr, {}, empty) == ViewVerdict::kEmpty);
  View ruled = other(5, 11);
  ruled.placement_rule = 2;
  CHECK(judge_view(&view, {}, ruled) == ViewVerdict::kUnknownRule);
}

TEST_CASE("a view that leaves out a node that answers does not take it away") {
  using client::keep_answering;
  View current;
  current.nodes.resize(4);
  for (std::size_t i = 0; i < 4; ++i) current.nodes[i].id = std::string(1, static_cast<char>('a' + i));
  current.nodes[2].state = NodeState::kJoining;
  const auto shrunken = [&] {
    View view = current;
    view.nodes.erase(view.nodes.begin() + 1, view.nodes.end());
    view.nodes.push_back(current.nodes[3]);
    view.nodes[1].state = NodeState::kGone;
    return view;
  };
  const auto all = [](const std::string&) { return true; };
  const auto none = [](const std::string&) { return false; };
  auto view = shrunken();
  CHECK(keep_answering(current, view, none).empty());
  CHECK(view.nodes.size() == 2);
  // b is put back in its place; c was never used; d says itself that it is gone.
  CHECK(keep_answering(current, view, all) == std::vector<std::string>{"b"});
  REQUIRE(view.nodes.size() == 3);
  CHECK(view.nodes[1].id == "b");
  CHECK(view.nodes[2].state == NodeState::kGone);
  auto other_cluster = shrunken();
  other_cluster.cluster_id[0] = std::byte{1};
  CHECK(keep_answering(current, other_cluster, all).empty());
}

TEST_CASE("a node that answers is used although the view has lost it, until it stops") {
  auto b = std::make_unique<FakePeer>("node-b");
  FakePeer a("node-a");
  View both;
  both.revision = 7;
  both.nodes.resize(2);
  both.nodes[0].id = "node-a";
  both.nodes[0].tcp = {a.address()};
  both.nodes[1].id = "node-b";
  both.nodes[1].tcp = {b->address()};
  a.set_view(both);
  Client client(options_for(a.port));
  const auto nodes = [&] { return client.report().size(); };
  REQUIRE(eventually([&] { return nodes() == 2 && client.report()[1].connections == 3; }));
  View lost = both;
  lost.revision = 8;
  lost.nodes.resize(1);
  a.set_view(lost);
  REQUIRE(eventually([&] { return decode_view(client.encoded_view())->revision == 8; }));
  CHECK(nodes() == 2);
  b.reset();
  CHECK(eventually([&] { return nodes() == 1; }));
}

TEST_CASE("the last view is kept in a file for the next start") {
  const auto folder = std::filesystem::temp_directory_path() / ("dfkv-view-" + std::to_string(::getpid()));
  std::filesystem::remove_all(folder);
  FakePeer node("node-a");
  View view;
  view.revision = 3;
  view.nodes.resize(1);
  view.nodes[0].id = "node-a";
  view.nodes[0].tcp = {node.address()};
  node.set_view(view);
  auto options = options_for(node.port);
  options.last_view_path = folder / "deep" / "seeds.view";
  {
    Client client(options);
    REQUIRE(client.wait_ready(5s));
    CHECK(eventually([&] { return std::filesystem::exists(options.last_view_path); }));
  }
  Options later = options_for(1);  // nobody listens there
  later.last_view_path = options.last_view_path;
  Client client(later);
  CHECK(client.wait_ready(5s));
  CHECK(std::distance(std::filesystem::directory_iterator(folder / "deep"), {}) == 1);
  std::filesystem::remove_all(folder);
}

TEST_CASE("addresses") {
  using client::Endpoint;
  using client::parse_endpoint;
  using client::reachable_endpoint;
  CHECK(parse_endpoint("h:1")->host == "h");
  CHECK(parse_endpoint("[::1]:80")->host == "::1");
  CHECK(!parse_endpoint("h"));
  CHECK(!parse_endpoint("h:"));
  CHECK(!parse_endpoint("h:0"));
  CHECK(!parse_endpoint("h:65536"));
  CHECK(!parse_endpoint("::1:80"));
  CHECK(!parse_endpoint("[]:80"));
  CHECK(reachable_endpoint({"0.0.0.0", 5}, "10.0.0.9").host == "10.0.0.9");
  CHECK(reachable_endpoint({"127.0.0.1", 5}, "10.0.0.9").host == "10.0.0.9");
  CHECK(reachable_endpoint({"127.0.0.1", 5}, "localhost").host == "127.0.0.1");
  CHECK(reachable_endpoint({"10.0.0.7", 5}, "10.0.0.9").host == "10.0.0.7");
}

TEST_CASE("the last view serves while no seed answers") {
  FakePeer node("node-a");
  View view;
  view.revision = 3;
  view.nodes.resize(1);
  view.nodes[0].id = "node-a";
  view.nodes[0].tcp = {node.address()};
  Options options = options_for(1);  // nobody listens there
  options.last_view = encode_view(view);
  Client client(options);
  const auto ns = add_test_namespace(client);
  ByteVector memory(10);
  const auto op = Batch(Kind::kPut, ns).item(block_of(1), 0, memory).submit(client);
  REQUIRE(op->wait(5s));
  CHECK(name_of(status_of(*op)) == "ok");
}

TEST_CASE("limits on what is under way") {
  FakePeer peer;
  peer.set_hook([](FakePeer::Conn&, const Frame& frame) { return frame.opcode() == Opcode::kGet; });
  auto options = options_for(peer.port);
  options.max_pending_operations = 2;
  options.max_inflight_bytes = 1000;
  Client client(options);
  const auto ns = add_test_namespace(client);
  ByteVector memory(600);
  const auto get = [&](std::uint64_t n) {
    return Batch(Kind::kGet, ns).item(block_of(n), 0, memory).submit(client, 30s);
  };
  const auto first = get(1);
  const auto too_many_bytes = get(2);
  REQUIRE(too_many_bytes->done());
  CHECK(name_of(status_of(*too_many_bytes)) == name_of(Status::kAgainBusy));
  const auto ask = [&] { return Batch(Kind::kExists, ns).parts({0}).chunk(block_of(1)).submit(client, 30s); };
  const auto second = ask_nodes(client, Kind::kPing, 30s);
  (void)second->wait(5s);
  CHECK(!first->done());
  const auto held = Batch(Kind::kGet, ns).item(block_of(3), 0, {{0, 10}}).submit(client, 30s);
  const auto third = ask();
  REQUIRE(third->done());
  CHECK(name_of(status_of(*third)) == name_of(Status::kAgainBusy));
  Operation::cancel(first);
  CHECK(ask()->wait(5s));
  CHECK(client.counters().refused_busy.load() == 2);
}

TEST_CASE("empty batches end at once; tables that do not fit together are refused") {
  FakePeer peer;
  Client client(options_for(peer.port));
  const auto ns = add_test_namespace(client);
  CHECK(Batch(Kind::kGet, ns).submit(client)->done());
  CHECK(Batch(Kind::kExists, ns).parts({0}).submit(client)->done());
  CHECK(Batch(Kind::kPut, ns).submit(client)->done());
  ByteVector memory(10);
  CHECK_THROWS_AS(Batch(Kind::kExists, ns).chunk(block_of(1)).submit(client), std::invalid_argument);
  CHECK_THROWS_AS(Batch(Kind::kPut, ns).item(block_of(1), 0, {{0, 10}}).submit(client),
                  std::invalid_argument);
  CHECK_THROWS_AS(Batch(Kind::kGet, ns).item(block_of(1), 0, {}).submit(client), std::invalid_argument);
  CHECK_THROWS_AS(Batch(Kind::kGet, ns).parts({0}).item(block_of(1), 0, memory).submit(client),
                  std::invalid_argument);
  Batch wrong(Kind::kPut, ns);
  wrong.item(block_of(1), 0, memory);
  store_le<std::uint32_t>(wrong.input.table.data() + 32, 11);
  CHECK_THROWS_AS(wrong.submit(client), std::invalid_argument);
}

TEST_CASE("operations that ask every node") {
  FakePeer peer;
  Client client(options_for(peer.port));
  const auto ping = ask_nodes(client, Kind::kPing, 5s);
  REQUIRE(ping->wait(5s));
  REQUIRE(ping->answers().size() == 1);
  CHECK(ping->answers()[0].node_id == "node-a");
  CHECK(is_done(ping->answers()[0].status));
  // Pages of a list are put together.
  peer.set_hook([](FakePeer::Conn& conn, const Frame& frame) {
    if (frame.opcode() != Opcode::kList) return false;
    ReplyMeta meta;
    const auto cursor = frame.request().cursor;
    meta.cursor = cursor < 3 ? cursor + 1 : 0;
    const std::byte page[] = {static_cast<std::byte>(cursor)};
    return conn.reply(frame, meta, page);
  });
  const auto list = ask_nodes(client, Kind::kList, 5s);
  REQUIRE(list->wait(5s));
  REQUIRE(list->answers()[0].payloads.size() == 4);
  CHECK(list->answers()[0].payloads[3][0] == std::byte{3});
}

TEST_CASE("watched operations are told through the queue and its descriptor") {
  FakePeer peer;
  Client client(options_for(peer.port));
  const auto ns = add_test_namespace(client);
  const auto op = Batch(Kind::kExists, ns).parts({0}).chunk(block_of(1)).submit(client);
  op->watch(client.completions(), 42);
  pollfd fd{client.completions()->fd(), POLLIN, 0};
  REQUIRE(::poll(&fd, 1, 5000) == 1);
  CHECK(client.completions()->take(0ns) == std::vector<std::uint64_t>{42});
  CHECK(::poll(&fd, 1, 0) == 0);
  op->watch(client.completions(), 43);  // done already
  CHECK(client.completions()->take(1s) == std::vector<std::uint64_t>{43});
}

TEST_CASE("many threads submit, cancel and release at once") {
  FakePeer peer;
  Client client(options_for(peer.port));
  const auto ns = add_test_namespace(client);
  std::mt19937_64 random(5);
  std::vector<ByteVector> stored;
  for (std::uint64_t i = 0; i < 8; ++i) {
    stored.push_back(random_bytes(50'000, random));
    peer.store(block_of(i), 0, stored.back());
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 mine(static_cast<std::uint64_t>(t));
      for (int round = 0; round < 60; ++round) {
        const auto n = mine() % 8;
        ByteVector memory(50'000);
        const auto op = Batch(Kind::kGet, ns).item(block_of(n), 0, memory).submit(client);
        if (mine() % 4 == 0) {
          Operation::cancel(op);
          if (!op->done()) ++wrong;
        } else if (!op->wait(10s)) {
          ++wrong;
        }
        if (status_of(*op) == Status::kOk && memory != stored[n]) ++wrong;
        if (status_of(*op) != Status::kOk && status_of(*op) != Status::kMissCancelled) ++wrong;
        client.release({{"node-a", 5}});
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("close ends what is in flight, and is final") {
  FakePeer peer;
  peer.set_hook([](FakePeer::Conn&, const Frame& frame) { return frame.opcode() == Opcode::kGet; });
  Client client(options_for(peer.port));
  const auto ns = add_test_namespace(client);
  ByteVector memory(100);
  const auto op = Batch(Kind::kGet, ns).item(block_of(1), 0, memory).submit(client, 60s);
  const auto start = Clock::now();
  CHECK(client.close(2s));
  CHECK(milliseconds_since(start) < 500);
  REQUIRE(op->done());
  CHECK(name_of(status_of(*op)) == "cancelled");
  CHECK_THROWS_AS((void)Batch(Kind::kGet, ns).item(block_of(1), 0, memory).submit(client),
                  std::runtime_error);
  CHECK(client.close(2s));
}
