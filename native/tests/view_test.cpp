#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "wire/view.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "golden.h"
#include "wire/msgpack.h"

namespace dfkv {
namespace {

std::string listed(const std::vector<std::string>& values) {
  std::string out;
  for (const std::string& value : values) out += (out.empty() ? "" : "|") + golden::hex_text(value);
  return out.empty() ? "-" : out;
}

std::string or_dash(const std::string& text) { return text.empty() ? "-" : golden::hex_text(text); }

golden::Row row_of(const ViewNode& node) {
  return {"node",
          node.id,
          std::to_string(node.incarnation),
          golden::hex(node.boot_id),
          std::to_string(static_cast<int>(node.state)),
          std::to_string(node.read_weight),
          std::to_string(node.write_weight),
          or_dash(node.zone),
          std::to_string(node.features),
          listed(node.tcp),
          listed(node.rdma),
          or_dash(node.unix_path)};
}

TEST_CASE("golden views, read and written again") {
  std::optional<View> view;
  std::size_t next = 0;
  for (const golden::Row& row : golden::rows("view.txt")) {
    CAPTURE(row[1]);
    if (row[0] == "node") {
      REQUIRE(view);
      REQUIRE(next < view->nodes.size());
      CHECK(row_of(view->nodes[next++]) == row);
      continue;
    }
    const golden::Buffer data = golden::unhex(row[7]);
    view = decode_view(data);
    REQUIRE(view);
    next = 0;
    CHECK(golden::hex(view->cluster_id) == row[2]);
    CHECK(view->revision == golden::number(row[3]));
    CHECK(golden::hex(view->digest) == row[4]);
    CHECK(view->placement_rule == golden::number(row[5]));
    CHECK(view->nodes.size() == golden::number(row[6]));
    View shuffled = *view;
    std::reverse(shuffled.nodes.begin(), shuffled.nodes.end());
    shuffled.digest = {};
    CHECK(golden::hex(encode_view(shuffled)) == row[7]);
    CHECK(shuffled.digest == view->digest);
  }
}

View some_view() {
  View view;
  view.cluster_id.fill(std::byte{1});
  view.revision = 5;
  ViewNode node;
  node.id = "a";
  node.zone = "z";
  node.features = 1;
  node.tcp = {"127.0.0.1:1"};
  node.rdma = {"fe80::1"};
  node.unix_path = "/s";
  view.nodes.push_back(node);
  node.id = "b";
  view.nodes.push_back(node);
  return view;
}

TEST_CASE("cut at every byte, and with every byte changed") {
  View view = some_view();
  const golden::Buffer data = encode_view(view);
  for (std::size_t size = 0; size < data.size(); ++size) CHECK_FALSE(decode_view(Bytes(data).first(size)));
  golden::Buffer longer = data;
  longer.push_back(std::byte{0});
  CHECK_FALSE(decode_view(longer));
  for (std::size_t at = 0; at < data.size(); ++at) {
    golden::Buffer changed = data;
    for (int value = 0; value < 256; ++value) {
      changed[at] = static_cast<std::byte>(value);
      std::optional<View> read = decode_view(changed);
      if (!read) continue;
      // Only the cluster id and the revision lie outside the digest: the nodes are still the ones that were
      // sent.
      (void)encode_view(*read);
      CHECK(read->digest == view.digest);
    }
  }
}

TEST_CASE("the digest follows every field of a node and the rule, and nothing else") {
  View view = some_view();
  (void)encode_view(view);
  const auto digest = view.digest;
  const auto digest_with = [](auto change) {
    View changed = some_view();
    change(changed);
    (void)encode_view(changed);
    return changed.digest;
  };
  CHECK(digest_with([](View& v) { v.revision = 6; }) == digest);
  CHECK(digest_with([](View& v) { v.cluster_id[0] = std::byte{2}; }) == digest);
  CHECK(digest_with([](View& v) { std::swap(v.nodes[0], v.nodes[1]); }) == digest);
  CHECK(digest_with([](View& v) { v.placement_rule = 2; }) != digest);
  CHECK(digest_with([](View& v) { v.nodes[0].id = "c"; }) != digest);
  CHECK(digest_with([](View& v) { v.nodes[0].incarnation = 1; }) != digest);
  CHECK(digest_with([](View& v) { v.nodes[0].boot_id[3] = std::byte{1}; }) != digest);
  CHECK(digest_with([](View& v) { v.nodes[0].state = NodeState::kDraining; }) != digest);
  CHECK(digest_with([](View& v) { v.nodes[0].read_weight = 1; }) != digest);
  CHECK(digest_with([](View& v) { v.nodes[0].write_weight = 1; }) != digest);
  CHECK(digest_with([](View& v) { v.nodes[0].zone = "y"; }) != digest);
  CHECK(digest_with([](View& v) { v.nodes[0].features = 2; }) != digest);
  CHECK(digest_with([](View& v) { v.nodes[0].tcp.push_back("h:2"); }) != digest);
  CHECK(digest_with([](View& v) { v.nodes[0].rdma.clear(); }) != digest);
  CHECK(digest_with([](View& v) { v.nodes[0].unix_path.clear(); }) != digest);
  CHECK(digest_with([](View& v) { v.nodes.pop_back(); }) != digest);
}

TEST_CASE("views that cannot be encoded") {
  const auto refuses = [](auto change) {
    View view = some_view();
    change(view);
    CHECK_THROWS_AS((void)encode_view(view), std::invalid_argument);
  };
  for (const std::string& id : {std::string(), std::string(129, 'a'), std::string("a/b"), std::string("a b"),
                                std::string("\xC3\xA4"), std::string("a\0b", 3)}) {
    CAPTURE(id);
    refuses([&id](View& v) { v.nodes[0].id = id; });
  }
  refuses([](View& v) { v.nodes[1].id = v.nodes[0].id; });
  refuses([](View& v) { v.nodes[0].zone = std::string(129, 'z'); });
  refuses([](View& v) { v.nodes[0].zone = "\xFF"; });
  refuses([](View& v) { v.nodes[0].tcp.assign(65, "h:1"); });
  refuses([](View& v) { v.nodes[0].tcp = {std::string(257, 'h')}; });
  refuses([](View& v) { v.nodes[0].rdma.assign(65, "g"); });
  refuses([](View& v) { v.nodes[0].unix_path = std::string(257, 'u'); });
  refuses([](View& v) { v.nodes.resize(kMaxViewNodes + 1); });
}

TEST_CASE("as many nodes as a view may hold") {
  View view;
  for (std::size_t i = 0; i < kMaxViewNodes; ++i) {
    ViewNode node;
    node.id = "node-" + std::to_string(100000 + i);
    view.nodes.push_back(node);
  }
  const golden::Buffer data = encode_view(view);
  const std::optional<View> read = decode_view(data);
  REQUIRE(read);
  CHECK(read->nodes.size() == kMaxViewNodes);
}

// A view made by hand: the digest is right, the rest is what the case says.
golden::Buffer sealed(const golden::Buffer& nodes, const std::string& more = "", int entries = 5) {
  golden::Buffer message = golden::pattern(0);
  const std::string prefix = "dfkv.view.1";
  const Bytes start = as_bytes(prefix.data(), prefix.size());
  message.assign(start.begin(), start.end());
  for (const int byte : {1, 0, 0, 0}) message.push_back(static_cast<std::byte>(byte));
  message.insert(message.end(), nodes.begin(), nodes.end());
  const Sha256Digest digest = sha256(message);
  golden::Buffer out;
  msgpack::Writer writer(out);
  writer.map(static_cast<std::uint32_t>(entries));
  writer.uint(1);
  writer.bin(golden::Buffer(16));
  writer.uint(2);
  writer.uint(9);
  writer.uint(3);
  writer.bin(Bytes(digest).first(16));
  writer.uint(4);
  writer.uint(1);
  writer.uint(5);
  writer.raw(nodes);
  writer.raw(golden::unhex(more.empty() ? "-" : more));
  return out;
}

golden::Buffer node_map(const std::string& id, const std::string& changes = "", std::uint32_t entries = 6,
                        std::uint64_t state = 1) {
  golden::Buffer out;
  msgpack::Writer writer(out);
  writer.map(entries);
  writer.uint(1);
  writer.str(id);
  writer.uint(2);
  writer.uint(0);
  writer.uint(3);
  writer.bin(golden::Buffer(16));
  writer.uint(4);
  writer.uint(state);
  writer.uint(5);
  writer.uint(100);
  if (entries >= 6) {
    writer.uint(6);
    writer.uint(100);
  }
  writer.raw(golden::unhex(changes.empty() ? "-" : changes));
  return out;
}

golden::Buffer array_of(const std::vector<golden::Buffer>& items) {
  golden::Buffer out;
  msgpack::Writer writer(out);
  writer.array(static_cast<std::uint32_t>(items.size()));
  for (const golden::Buffer& item : items) writer.raw(item);
  return out;
}

TEST_CASE("views of other versions and hostile ones") {
  CHECK(decode_view(sealed(array_of({node_map("a"), node_map("b")}))));
  CHECK(decode_view(sealed(array_of({node_map("a")}), "cc8005", 6)));          // ignorable key of the view
  CHECK_FALSE(decode_view(sealed(array_of({node_map("a")}), "0605", 6)));      // critical key of the view
  CHECK(decode_view(sealed(array_of({node_map("a", "cc80c0", 7)}))));          // ignorable key of a node
  CHECK_FALSE(decode_view(sealed(array_of({node_map("a", "0c05", 7)}))));      // critical key of a node
  CHECK_FALSE(decode_view(sealed(array_of({node_map("b"), node_map("a")}))));  // not in order
  CHECK_FALSE(decode_view(sealed(array_of({node_map("a"), node_map("a")}))));  // twice
  CHECK_FALSE(decode_view(sealed(array_of({node_map("a/b")}))));               // malformed id
  CHECK_FALSE(decode_view(sealed(array_of({node_map("a", "", 6, 4)}))));       // unknown state
  CHECK_FALSE(decode_view(sealed(array_of({node_map("a", "", 5)}))));          // a weight is missing
  CHECK_FALSE(decode_view(sealed(array_of({node_map("a", "0605", 7)}))));      // a key twice
  CHECK_FALSE(decode_view(sealed(golden::unhex("ddffffffff"))));               // lying count of nodes
  CHECK_FALSE(decode_view(sealed(array_of({node_map("a", "09ddffffffff", 7)}))));  // lying count of addresses
  CHECK_FALSE(decode_view(sealed(array_of({node_map("a", "07dbffffffff", 7)}))));  // lying length of a zone
  CHECK_FALSE(decode_view(golden::Buffer(kMaxViewBytes + 1)));
  golden::Buffer wrong_digest = sealed(array_of({node_map("a")}));
  wrong_digest[25] ^= std::byte{1};
  CHECK_FALSE(decode_view(wrong_digest));
}

}  // namespace
}  // namespace dfkv
