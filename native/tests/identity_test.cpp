#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "wire/identity.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include "golden.h"

namespace dfkv {
namespace {

golden::Buffer bytes_of(std::string_view text) {
  const Bytes bytes = as_bytes(text.data(), text.size());
  return {bytes.begin(), bytes.end()};
}

void append_field(golden::Buffer& out, std::uint16_t tag, std::string_view value, std::uint32_t length) {
  const std::size_t at = out.size();
  out.resize(at + 6);
  store_le(out.data() + at, tag);
  store_le(out.data() + at + 2, length);
  const golden::Buffer bytes = bytes_of(value);
  out.insert(out.end(), bytes.begin(), bytes.end());
}

golden::Buffer descriptor(const std::vector<std::pair<std::uint16_t, std::string>>& fields) {
  golden::Buffer out;
  for (const auto& [tag, value] : fields)
    append_field(out, tag, value, static_cast<std::uint32_t>(value.size()));
  return out;
}

TEST_CASE("golden namespaces") {
  std::set<std::string> ids;
  const auto rows = golden::rows("namespace.txt");
  for (const golden::Row& row : rows) {
    CAPTURE(row[0]);
    const golden::Buffer data = golden::unhex(row[1]);
    CHECK(golden::hex(namespace_id(data).bytes) == row[2]);
    CHECK(parse_descriptor(data));
    ids.insert(row[2]);
  }
  CHECK(ids.size() == rows.size());
}

TEST_CASE("golden block chains, each from the tip before it") {
  BlockChain running;
  for (const golden::Row& row : golden::rows("block.txt")) {
    CAPTURE(row[0]);
    const golden::Buffer packed = golden::unhex(row[2]);
    std::vector<std::uint32_t> tokens(packed.size() / 4);
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = load_le<std::uint32_t>(packed.data() + 4 * i);
    std::vector<Extra> extras;
    for (const std::string& text : row[3] == "-" ? std::vector<std::string>{} : golden::split(row[3], ',')) {
      const std::size_t colon = text.find(':');
      extras.push_back({static_cast<std::uint8_t>(golden::number(text.substr(0, colon))),
                        golden::unhex(text.substr(colon + 1))});
    }
    if (row[0].ends_with("_0")) running = BlockChain();
    CHECK(golden::hex(running.tip()) == row[1]);
    BlockChain resumed(golden::exact<32>(row[1]));
    CHECK(golden::hex(resumed.append(tokens, extras).bytes) == row[5]);
    CHECK(golden::hex(resumed.tip()) == row[4]);
    std::reverse(extras.begin(), extras.end());
    CHECK(golden::hex(running.append(tokens, extras).bytes) == row[5]);
  }
}

TEST_CASE("golden opaque block ids") {
  std::set<std::string> ids;
  for (const golden::Row& row : golden::rows("opaque.txt")) {
    const auto algorithm = static_cast<std::uint8_t>(golden::number(row[0]));
    CHECK(golden::hex(opaque_block_id(algorithm, golden::unhex(row[1]), golden::unhex(row[2])).bytes) ==
          row[3]);
    CHECK(ids.insert(row[3]).second);
  }
}

TEST_CASE("golden parts and routes") {
  for (const golden::Row& row : golden::rows("part.txt")) {
    std::array<std::uint64_t, 7> value{};
    for (std::size_t i = 0; i < value.size(); ++i) value[i] = golden::number(row[i]);
    const PartFields fields{static_cast<std::uint8_t>(value[0]),  static_cast<std::uint8_t>(value[1]),
                            static_cast<std::uint16_t>(value[2]), static_cast<std::uint8_t>(value[3]),
                            static_cast<std::uint8_t>(value[4]),  static_cast<std::uint8_t>(value[5])};
    CHECK(encode_part(fields) == value[6]);
    CHECK(decode_part(value[6]) == fields);
  }
  CHECK_FALSE(decode_part(kAllParts));
  for (int bit = 56; bit < 64; ++bit) CHECK_FALSE(decode_part(Part{1} << bit));
  for (const golden::Row& row : golden::rows("route.txt")) {
    CHECK(route_of({golden::exact<16>(row[0])}) == golden::number(row[1]));
  }
}

TEST_CASE("extras that look alike are not the same block") {
  const std::vector<std::uint32_t> tokens{1, 2, 3};
  const std::vector<std::vector<Extra>> cases{
      {},
      {{1, bytes_of("x")}},
      {{2, bytes_of("x")}},
      {{1, bytes_of("")}},
      {{1, bytes_of("x")}, {2, bytes_of("x")}},
      {{1, bytes_of("x")}, {1, bytes_of("x")}},
      {{1, bytes_of("ab")}, {1, bytes_of("c")}},
      {{1, bytes_of("a")}, {1, bytes_of("bc")}},
      {{1, bytes_of("ab")}, {2, bytes_of("c")}},
      {{1, bytes_of("a")}, {2, bytes_of("bc")}},
      {{1, bytes_of("abc")}},
      // These two are the same bytes once the lengths are left out.
      {{1, bytes_of("a\x01"
                    "b")},
       {1, bytes_of("c")}},
      {{1, bytes_of("a")},
       {1, bytes_of("b\x01"
                    "c")}},
      {{1, bytes_of(std::string("x\x02\x01\x00\x00\x00y", 7))}},
  };
  std::set<std::string> ids;
  for (const std::vector<Extra>& extras : cases) {
    BlockChain chain;
    ids.insert(golden::hex(chain.append(tokens, extras).bytes));
  }
  CHECK(ids.size() == cases.size());
}

TEST_CASE("tokens cannot pass for extras, nor a block for two") {
  std::set<std::string> ids;
  const auto id_of = [&ids](const std::vector<std::vector<std::uint32_t>>& blocks,
                            std::vector<Extra> extras) {
    BlockChain chain;
    BlockId id;
    for (const auto& tokens : blocks) id = chain.append(tokens, extras);
    ids.insert(golden::hex(id.bytes));
  };
  id_of({{1, 2}}, {});
  id_of({{1}, {2}}, {});
  id_of({{2}, {1}}, {});
  id_of({{1, 2, 0}}, {});
  id_of({{1, 2}, {}}, {});
  id_of({{1}}, {{2, {}}});
  CHECK(ids.size() == 6);
}

TEST_CASE("descriptors: order, repeats, cuts and lengths") {
  const golden::Buffer good = descriptor({{1, "a"}, {2, ""}, {7, "long value"}});
  const auto fields = parse_descriptor(good);
  REQUIRE(fields);
  REQUIRE(fields->size() == 3);
  CHECK((*fields)[2].tag == 7);
  CHECK((*fields)[2].value.size() == 10);
  std::set<std::size_t> whole{0, 7, 13};
  for (std::size_t size = 0; size < good.size(); ++size) {
    CAPTURE(size);
    CHECK(parse_descriptor(Bytes(good).first(size)).has_value() == (whole.count(size) == 1));
  }
  CHECK_FALSE(parse_descriptor(descriptor({{2, "a"}, {1, "b"}})));
  CHECK_FALSE(parse_descriptor(descriptor({{2, "a"}, {2, "a"}})));
  CHECK_FALSE(parse_descriptor(descriptor({{0, "a"}})));
  for (const std::uint32_t length : {2u, 0x7FFFFFFFu, 0xFFFFFFFFu}) {
    golden::Buffer lying;
    append_field(lying, 1, "a", length);
    CHECK_FALSE(parse_descriptor(lying));
  }
  CHECK(parse_descriptor(descriptor({{1, std::string(kMaxDescriptorBytes - 6, 'x')}})));
  CHECK_FALSE(parse_descriptor(descriptor({{1, std::string(kMaxDescriptorBytes - 5, 'x')}})));
}

TEST_CASE("the difference of two descriptors names the tags") {
  const golden::Buffer a = descriptor({{1, "a"}, {2, "same"}, {5, "x"}, {9, "only a"}});
  const golden::Buffer b = descriptor({{1, "b"}, {2, "same"}, {5, "xx"}, {8, "only b"}});
  CHECK(descriptor_difference(a, b) == std::vector<std::uint16_t>{1, 5, 8, 9});
  CHECK(descriptor_difference(a, a).empty());
  CHECK(descriptor_difference(a, {}) == std::vector<std::uint16_t>{1, 2, 5, 9});
  const golden::Buffer empty_value = descriptor({{1, ""}});
  CHECK(descriptor_difference(empty_value, {}) == std::vector<std::uint16_t>{1});
}

TEST_CASE("keys compare by every byte") {
  ObjectKey key;
  std::set<ObjectKey> keys{key};
  for (std::size_t i = 0; i < 16; ++i) {
    ObjectKey other = key;
    other.ns.bytes[i] = std::byte{1};
    keys.insert(other);
    other = key;
    other.block.bytes[i] = std::byte{1};
    keys.insert(other);
  }
  for (int bit = 0; bit < 64; ++bit) {
    ObjectKey other = key;
    other.part = Part{1} << bit;
    keys.insert(other);
  }
  CHECK(keys.size() == 1 + 32 + 64);
}

}  // namespace
}  // namespace dfkv
