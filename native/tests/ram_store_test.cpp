// The RAM store, one thread at a time: what is visible when, what is evicted, and what leases keep.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "ram/ram_store.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "store_calls.h"
#include "store_samples.h"
#include "wire/checksum.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * 1024;
constexpr auto kOk = Status::kOk;

struct TestStore {
  LeaseTable::Clock::time_point now = LeaseTable::Clock::now();
  TestNamespace ns{"store"};
  std::unique_ptr<RamStore> store;

  explicit TestStore(std::uint64_t capacity_bytes = 16 * kMiB) : TestStore(options(capacity_bytes)) {}
  explicit TestStore(RamStoreOptions given) {
    given.now = [this] { return now; };
    store = std::make_unique<RamStore>(std::move(given));
    std::vector<std::uint16_t> differs;
    REQUIRE(store->put_namespace(ns.id, ns.descriptor, "test", differs) == kOk);
  }
  ~TestStore() { CHECK(store->violations(false) == std::vector<std::string>{}); }

  static RamStoreOptions options(std::uint64_t capacity_bytes) {
    RamStoreOptions out;
    out.catalog.capacity_bytes = capacity_bytes;
    out.catalog.policy = make_lru_policy();  // so that the order of eviction is plain
    return out;
  }
  [[nodiscard]] ObjectKey key(std::uint64_t block, std::uint16_t stage = 0) const {
    return {ns.id, make_block(block), make_part(stage)};
  }
  static std::vector<std::byte> payload(const ObjectKey& key, std::size_t bytes, std::uint64_t version) {
    return make_payload(load_le<std::uint64_t>(key.block.bytes.data()) ^ key.part ^ (version << 40), bytes);
  }
  PutStart begin(const ObjectKey& at, std::size_t bytes, bool replace = false) {
    PutOptions put;
    put.replace = replace;
    return store->begin_put(at, route_of(at.block), static_cast<std::uint32_t>(bytes), put);
  }
  Status put(const ObjectKey& at, std::size_t bytes, std::uint64_t version = 0, bool replace = false) {
    auto start = begin(at, bytes, replace);
    if (!start.ticket) return start.status;
    const auto source = payload(at, bytes, version);
    std::ranges::copy(source, start.ticket->bytes().begin());
    return committed(*start.ticket, xxh3_64(source));
  }
  ReadResult get(const ObjectKey& at) {
    ReadResult out;
    store->acquire(at, [&out](ReadResult result) { out = std::move(result); });
    return out;
  }
  [[nodiscard]] bool holds(const ObjectKey& at, std::size_t bytes, std::uint64_t version = 0) {
    const auto read = get(at);
    return read.pin && same_bytes(read.pin->bytes(), payload(at, bytes, version)) &&
           read.pin->checksum() == xxh3_64(read.pin->bytes());
  }
  [[nodiscard]] Status miss(const ObjectKey& at) { return get(at).status; }
  [[nodiscard]] ExistsResult exists(std::uint64_t first, std::size_t count, std::vector<Part> parts,
                                    std::uint32_t lease_ms = 0, std::uint64_t owner = 1) {
    ExistsTable table;
    table.parts = std::move(parts);
    for (std::uint64_t i = 0; i < count; ++i) table.chunks.push_back({make_block(first + i), 0});
    return store->exists(ns.id, table, lease_ms, owner);
  }
};

}  // namespace

TEST_CASE("an object is visible only once it is complete") {
  TestStore t;
  const auto key = t.key(1);
  {
    const auto start = t.begin(key, 10'000);
    REQUIRE(start.ticket);
    CHECK(start.ticket->bytes().size() == 10'000);
    CHECK(t.miss(key) == Status::kMissNotFound);
    CHECK(t.store->stats().filling == 1);
  }
  CHECK(t.store->stats().filling == 0);
  CHECK(t.store->stats().used_bytes == 0);
  CHECK(t.put(key, 10'000) == kOk);
  CHECK(t.holds(key, 10'000));
  CHECK(t.store->stats().used_bytes == 12 * kKiB);
  CHECK(t.store->stats().stored_bytes == 10'000);
}

TEST_CASE("the first complete write stands") {
  TestStore t;
  const auto key = t.key(1);
  auto slow = t.begin(key, 5000);
  CHECK(t.put(key, 4000, 1) == kOk);
  CHECK(committed(*slow.ticket, 0) == Status::kAlready);
  CHECK(t.put(key, 6000, 2) == Status::kAlready);
  CHECK(t.holds(key, 4000, 1));
  CHECK(t.store->stats().objects == 1);
  CHECK(t.store->stats().put_already == 2);
}

TEST_CASE("replace changes the bytes at once; a reader of the old ones keeps them") {
  TestStore t;
  const auto key = t.key(1);
  CHECK(t.put(key, 5000, 1) == kOk);
  auto reader = t.get(key);
  REQUIRE(reader.pin);
  CHECK(t.put(key, 6000, 2, true) == kOk);
  CHECK(t.holds(key, 6000, 2));
  CHECK(same_bytes(reader.pin->bytes(), TestStore::payload(key, 5000, 1)));
  CHECK(t.store->stats().condemned == 1);
  reader.pin.reset();
  CHECK(t.store->stats().condemned == 0);
  CHECK(t.store->stats().used_bytes == 8 * kKiB);
  CHECK(t.store->violations(true) == std::vector<std::string>{});
}

TEST_CASE("removing what is pinned hides it at once and frees it with the last pin") {
  TestStore t;
  for (std::uint16_t stage = 0; stage < 3; ++stage) CHECK(t.put(t.key(1, stage), 5000) == kOk);
  auto first = t.get(t.key(1, 0));
  auto second = t.get(t.key(1, 0));
  ObjectKey whole = t.key(1);
  whole.part = kAllParts;
  CHECK(removed(*t.store, whole) == kOk);
  CHECK(removed(*t.store, whole) == Status::kMissNotFound);
  for (std::uint16_t stage = 0; stage < 3; ++stage) CHECK(t.miss(t.key(1, stage)) == Status::kMissNotFound);
  CHECK(t.store->stats().used_bytes == 8 * kKiB);
  CHECK(t.put(t.key(1, 0), 5000, 9) == kOk);
  CHECK(same_bytes(first.pin->bytes(), TestStore::payload(t.key(1, 0), 5000, 0)));
  first.pin.reset();
  CHECK(t.store->stats().condemned == 1);
  second.pin.reset();
  CHECK(t.store->stats().condemned == 0);
  CHECK(t.holds(t.key(1, 0), 5000, 9));
}

TEST_CASE("keys are told apart in full, however their hashes collide") {
  for (const std::uint64_t mask : {std::uint64_t{0}, std::uint64_t{3} << 32}) {
    auto options = TestStore::options(16 * kMiB);
    options.catalog.index_hash_mask = mask;
    TestStore t(std::move(options));
    const TestNamespace other("other");
    std::vector<std::uint16_t> differs;
    REQUIRE(t.store->put_namespace(other.id, other.descriptor, "", differs) == kOk);
    for (std::uint64_t block = 0; block < 20; ++block) CHECK(t.put(t.key(block, 0), 5000) == kOk);
    for (std::uint16_t stage = 1; stage < 20; ++stage) CHECK(t.put(t.key(7, stage), 5000) == kOk);
    for (std::uint64_t block = 0; block < 20; ++block) CHECK(t.holds(t.key(block), 5000));
    for (std::uint16_t stage = 0; stage < 20; ++stage) CHECK(t.holds(t.key(7, stage), 5000));
    CHECK_FALSE(t.get(t.key(21)).pin);
    CHECK_FALSE(t.get(t.key(3, 1)).pin);
    CHECK_FALSE(t.get({other.id, make_block(7), make_part(0)}).pin);
    CHECK(t.exists(0, 20, {make_part(0)}).prefix == 20);
    CHECK(t.exists(0, 20, {make_part(1)}).prefix == 0);
    CHECK(removed(*t.store, t.key(21)) != kOk);
    CHECK(removed(*t.store, t.key(5)) == kOk);
    for (std::uint64_t block = 0; block < 20; ++block) CHECK(t.holds(t.key(block), 5000) == (block != 5));
  }
}

TEST_CASE("under pressure the chunk used longest ago goes, and the miss says so") {
  TestStore t;
  constexpr std::size_t kBytes = 256 * kKiB;
  std::uint64_t block = 0;
  while (t.store->stats().evicted_objects == 0) CHECK(t.put(t.key(block++), kBytes) == kOk);
  const std::uint64_t fits = block - 1;
  CHECK(fits == 64);
  CHECK(t.miss(t.key(0)) == Status::kMissEvicted);
  const std::vector<BlockId> used{make_block(1)};
  t.store->touch(t.ns.id, used);
  CHECK(t.put(t.key(block++), kBytes) == kOk);
  CHECK(t.holds(t.key(1), kBytes));
  CHECK(t.miss(t.key(2)) == Status::kMissEvicted);
  CHECK(t.miss(t.key(9999)) == Status::kMissNotFound);
  CHECK(t.put(t.key(2), kBytes) == kOk);  // stored again, then removed: not "evicted" any more
  CHECK(removed(*t.store, t.key(2)) == kOk);
  CHECK(t.miss(t.key(2)) == Status::kMissNotFound);
  CHECK(t.store->stats().evicted_bytes == t.store->stats().evicted_objects * kBytes);
}

TEST_CASE("the tail of a prefix goes before its head") {
  TestStore t;
  constexpr std::size_t kBytes = 256 * kKiB;
  std::vector<BlockId> prefix;
  for (std::uint64_t block = 0; block < 32; ++block) {
    CHECK(t.put(t.key(block), kBytes) == kOk);
    prefix.push_back(make_block(block));
  }
  t.store->touch(t.ns.id, prefix);
  for (std::uint64_t block = 100; block < 100 + 32 + 10; ++block) CHECK(t.put(t.key(block), kBytes) == kOk);
  CHECK(t.exists(0, 32, {make_part(0)}).prefix == 22);
}

TEST_CASE("the parts of a chunk go together") {
  TestStore t;
  constexpr std::size_t kBytes = 256 * kKiB;
  for (std::uint64_t block = 0; block < 64; ++block) {
    for (std::uint16_t stage = 0; stage < 4; ++stage) CHECK(t.put(t.key(block, stage), kBytes) == kOk);
  }
  for (std::uint64_t block = 0; block < 64; ++block) {
    std::vector<bool> there;
    for (std::uint16_t stage = 0; stage < 4; ++stage)
      there.push_back(t.get(t.key(block, stage)).pin != nullptr);
    CHECK(std::ranges::count(there, there[0]) == 4);
  }
  CHECK(t.store->stats().evicted_objects >= 48 * 4);
}

TEST_CASE("what is pinned is never evicted, and when all of it is, PUT says so") {
  TestStore t(4 * kMiB);
  constexpr std::size_t kBytes = 256 * kKiB;
  std::vector<ReadResult> pins;
  for (std::uint64_t block = 0; block < 16; ++block) {
    CHECK(t.put(t.key(block), kBytes) == kOk);
    pins.push_back(t.get(t.key(block)));
  }
  CHECK(t.put(t.key(100), kBytes) == Status::kAgainNoMemory);
  CHECK(t.put(t.key(101), 4096) == Status::kAgainNoMemory);
  pins[3].pin.reset();
  CHECK(t.put(t.key(100), kBytes) == kOk);
  CHECK(t.miss(t.key(3)) == Status::kMissEvicted);
  for (std::uint64_t block = 0; block < 16; ++block) CHECK(t.holds(t.key(block), kBytes) == (block != 3));
  pins.clear();
  CHECK(t.store->violations(true) == std::vector<std::string>{});
}

TEST_CASE("unfinished PUTs hold only their share of the memory") {
  TestStore t(4 * kMiB);
  std::vector<PutStart> fillings;
  while (true) {
    auto start = t.begin(t.key(fillings.size()), 256 * kKiB);
    if (!start.ticket) {
      CHECK(start.status == Status::kAgainNoMemory);
      break;
    }
    fillings.push_back(std::move(start));
  }
  CHECK(fillings.size() == 8);  // half
  fillings.clear();
  CHECK(t.put(t.key(1), 256 * kKiB) == kOk);
}

TEST_CASE("objects that can never fit are refused, and the largest that may is taken") {
  auto options = TestStore::options(8 * kMiB);
  options.catalog.max_object_bytes = 5 * kMiB;
  TestStore t(std::move(options));
  CHECK(t.put(t.key(1), 5 * kMiB + 1) == Status::kRefusedTooLarge);
  CHECK(t.begin(t.key(1), 0).status == Status::kRefusedBadRequest);
  for (std::uint64_t block = 0; block < 200; ++block) CHECK(t.put(t.key(block), 20 * kKiB) == kOk);
  CHECK(t.put(t.key(1000), 5 * kMiB) == kOk);
  CHECK(t.holds(t.key(1000), 5 * kMiB));
  TestStore tiny(2 * kMiB);  // smaller than an allowed object
  CHECK(tiny.put(tiny.key(1), 5 * kMiB) == Status::kRefusedTooLarge);
}

TEST_CASE("a full store of one size makes room for another and keeps what it has just written") {
  TestStore t(32 * kMiB);
  std::uint64_t block = 0;
  const auto shift_to = [&](std::size_t bytes) {
    CAPTURE(bytes);
    // Half the capacity in objects of the new size: all of them must be there, colder ones of the old size
    // went.
    const std::uint64_t count = 16 * kMiB / bytes;
    const std::uint64_t first = block;
    for (std::uint64_t i = 0; i < count; ++i) {
      REQUIRE(t.put(t.key(block++), bytes) == kOk);
      REQUIRE(t.holds(t.key(block - 1), bytes));
    }
    std::uint64_t there = 0;
    for (std::uint64_t i = 0; i < count; ++i) there += t.holds(t.key(first + i), bytes) ? 1 : 0;
    CHECK(there == count);
  };
  for (std::uint64_t i = 0; i < 32 * kMiB / (100 * kKiB); ++i)
    REQUIRE(t.put(t.key(block++), 100 * kKiB) == kOk);
  shift_to(300 * kKiB);
  shift_to(5000);
  shift_to(3 * kMiB);
  shift_to(64 * kKiB);
  shift_to(1 * kMiB);
  shift_to(100 * kKiB);
}

TEST_CASE("two sizes in steady use share the memory by their use, not by who came first") {
  TestStore t(32 * kMiB);
  std::uint64_t block = 0;
  while (t.store->stats().evicted_objects == 0) REQUIRE(t.put(t.key(block++), 60 * kKiB) == kOk);
  std::vector<std::uint64_t> small;
  std::vector<std::uint64_t> large;
  for (int round = 0; round < 400; ++round) {
    for (int i = 0; i < 4; ++i) {
      small.push_back(block);
      REQUIRE(t.put(t.key(block++), 60 * kKiB) == kOk);
    }
    large.push_back(block);
    REQUIRE(t.put(t.key(block++), 250 * kKiB) == kOk);
  }
  // Half of the bytes written are of each size. The latest 20 MiB are all there, give or take what clearing a
  // run of extents takes.
  const auto present = [&](const std::vector<std::uint64_t>& blocks, std::size_t latest) {
    std::size_t there = 0;
    for (std::size_t i = blocks.size() - latest; i < blocks.size(); ++i)
      there += t.get(t.key(blocks[i])).pin ? 1 : 0;
    return static_cast<double>(there) / static_cast<double>(latest);
  };
  CHECK(present(small, 160) > 0.9);
  CHECK(present(large, 40) > 0.9);
  CHECK(present(small, 40) == 1.0);
  CHECK(present(large, 10) == 1.0);
}

TEST_CASE("a lease pins the parts asked for of the leading complete chunks") {
  TestStore t(4 * kMiB);
  constexpr std::size_t kBytes = 64 * kKiB;
  for (std::uint64_t block = 0; block < 10; ++block) {
    for (std::uint16_t stage = 0; stage < 2; ++stage) {
      if (block == 6 && stage == 1) continue;
      CHECK(t.put(t.key(block, stage), kBytes) == kOk);
    }
  }
  const auto lease = t.exists(0, 10, {make_part(0), make_part(1)}, 1000);
  CHECK(lease.prefix == 6);
  CHECK(lease.lease_id != 0);
  CHECK(lease.lease_ms == 1000);
  CHECK(lease.statuses[6] == Status::kMissPartMissing);
  CHECK(lease.statuses[7] == kOk);
  CHECK(t.store->stats().leased_bytes == 12 * kBytes);
  CHECK(t.store->stats().pins == 0);  // of reads
  for (std::uint64_t block = 100; block < 300; ++block) CHECK(t.put(t.key(block), kBytes) == kOk);
  for (std::uint64_t block = 0; block < 10; ++block) {
    CHECK(t.get(t.key(block)).status == (block < 6 ? kOk : Status::kMissEvicted));
  }
  CHECK(t.store->release(lease.lease_id));
  CHECK_FALSE(t.store->release(lease.lease_id));
  CHECK(t.store->violations(true) == std::vector<std::string>{});
}

TEST_CASE("leases end at their deadline, with their owner, and can be renewed before") {
  TestStore t;
  for (std::uint64_t block = 0; block < 4; ++block) CHECK(t.put(t.key(block), 5000) == kOk);
  const auto a = t.exists(0, 2, {make_part(0)}, 1000, 1);
  const auto b = t.exists(0, 4, {make_part(0)}, 1999, 2);
  const auto c = t.exists(3, 1, {make_part(0)}, 9'000'000, 2);
  CHECK(a.lease_id != b.lease_id);
  CHECK(c.lease_ms == 60'000);  // the longest that is given
  CHECK(t.store->stats().leases == 3);
  CHECK(t.store->stats().leased_bytes == 4 * 8 * kKiB);  // shared slots count once
  t.now += std::chrono::milliseconds(999);
  t.store->tick();
  CHECK(t.store->stats().leases == 3);
  CHECK(t.store->renew(a.lease_id, 1000));
  t.now += std::chrono::milliseconds(999);
  t.store->tick();
  CHECK(t.store->stats().leases == 3);
  t.now += std::chrono::milliseconds(1);
  CHECK_FALSE(t.store->renew(a.lease_id, 1000));  // over, though not collected yet
  CHECK_FALSE(t.store->renew(b.lease_id, 1000));
  t.store->tick();
  CHECK(t.store->stats().leases == 1);
  CHECK_FALSE(t.store->release(a.lease_id));
  t.store->release_owner(1);
  CHECK(t.store->stats().leases == 1);
  t.store->release_owner(2);
  CHECK(t.store->stats().leases == 0);
  CHECK(t.store->violations(true) == std::vector<std::string>{});
}

TEST_CASE("leases hold at most their share, whole chunks at a time") {
  auto options = TestStore::options(4 * kMiB);
  options.catalog.max_leased_fraction = 0.25;
  TestStore t(std::move(options));
  constexpr std::size_t kBytes = 128 * kKiB;
  for (std::uint64_t block = 0; block < 10; ++block) {
    for (std::uint16_t stage = 0; stage < 3; ++stage) CHECK(t.put(t.key(block, stage), kBytes) == kOk);
  }
  const std::vector<Part> parts{make_part(0), make_part(1), make_part(2)};
  const auto lease = t.exists(0, 10, parts, 1000);
  CHECK(lease.prefix == 10);
  CHECK(t.store->stats().leased_bytes == 6 * kBytes);  // two chunks of the eight parts that the share holds
  const auto more = t.exists(5, 2, parts, 1000);
  CHECK(more.lease_id == 0);
  CHECK(more.lease_ms == 0);
  CHECK(t.exists(0, 2, parts, 1000).lease_id != 0);  // the same bytes again cost nothing
  t.store->release_owner(1);
  CHECK(t.store->violations(true) == std::vector<std::string>{});
}

TEST_CASE("ERASE hides everything at once, and a PUT begun before it stays out") {
  TestStore t;
  const TestNamespace other("kept");
  std::vector<std::uint16_t> differs;
  REQUIRE(t.store->put_namespace(other.id, other.descriptor, "", differs) == kOk);
  for (std::uint64_t block = 0; block < 600; ++block) CHECK(t.put(t.key(block), 4096) == kOk);
  const ObjectKey kept{other.id, make_block(1), make_part(0)};
  CHECK(t.put(kept, 4096) == kOk);
  auto filling = t.begin(t.key(1000), 4096);
  auto reader = t.get(t.key(5));
  CHECK(erased(*t.store, t.ns.id).second == 600);
  CHECK(committed(*filling.ticket, 0) == Status::kAgainBusy);
  CHECK(t.miss(t.key(1000)) == Status::kMissNotFound);
  CHECK(t.miss(t.key(5)) == Status::kMissNotFound);
  CHECK(t.exists(0, 600, {make_part(0)}).prefix == 0);
  CHECK(t.holds(kept, 4096));
  CHECK(t.store->list()[0].objects == 0);
  CHECK(t.store->list()[1].objects == 1);
  CHECK(same_bytes(reader.pin->bytes(), TestStore::payload(t.key(5), 4096, 0)));
  reader.pin.reset();
  CHECK(t.store->stats().used_bytes == 4096);
  CHECK(t.put(t.key(5), 4096, 3) == kOk);
  CHECK(t.holds(t.key(5), 4096, 3));
  CHECK(erased(*t.store, TestNamespace("unknown").id).second == 0);
}

TEST_CASE("a quarantined object is a miss") {
  TestStore t;
  CHECK(t.put(t.key(1), 5000) == kOk);
  t.store->quarantine(t.key(1));
  CHECK(t.miss(t.key(1)) == Status::kMissNotFound);
  CHECK(t.store->violations(true) == std::vector<std::string>{});
}

TEST_CASE("namespaces are checked, counted and bounded") {
  auto options = TestStore::options(4 * kMiB);
  options.namespaces.max_namespaces = 3;
  TestStore t(std::move(options));
  const auto put = [&t](const std::vector<std::byte>& descriptor, const NamespaceId& id) {
    std::vector<std::uint16_t> differs;
    const Status status = t.store->put_namespace(id, descriptor, "x", differs);
    return std::make_pair(status, differs);
  };
  const auto two_off = make_descriptor({{2, "other"}, {4, "salt"}});
  const auto one_off = make_descriptor({{2, "test"}, {4, "store"}, {5, "more"}});
  CHECK(put(two_off, namespace_id(two_off)) == std::make_pair(kOk, std::vector<std::uint16_t>{2, 4}));
  CHECK(put(one_off, namespace_id(one_off)) == std::make_pair(kOk, std::vector<std::uint16_t>{5}));
  CHECK(put(one_off, namespace_id(two_off)).first == Status::kRefusedNamespace);
  const TestNamespace fourth("fourth");
  CHECK(put(fourth.descriptor, fourth.id).first == Status::kRefusedOverQuota);
  CHECK(put(t.ns.descriptor, t.ns.id) ==
        std::make_pair(kOk, std::vector<std::uint16_t>{5}));  // known: renewed
  CHECK(t.store->stats().namespaces == 3);
  CHECK(t.put({fourth.id, make_block(1), make_part(0)}, 100) == Status::kMissNamespaceUnknown);
  CHECK(t.miss({fourth.id, make_block(1), make_part(0)}) == Status::kMissNamespaceUnknown);
  ExistsTable table{{make_part(0)}, {{make_block(1), 0}}};
  CHECK(t.store->exists(fourth.id, table, 1000, 1).statuses[0] == Status::kMissNamespaceUnknown);
  CHECK(t.put(t.key(1), 5000) == kOk);
  CHECK(t.put(t.key(1, 1), 6000) == kOk);
  const auto listed = t.store->list();
  REQUIRE(listed.size() == 3);
  CHECK(listed[0].id == t.ns.id);
  CHECK(listed[0].objects == 2);
  CHECK(listed[0].stored_bytes == 11'000);
  CHECK(listed[0].label == "x");
}
