// Many threads against one RAM store under eviction pressure, with a recorder that knows what may be read.
//
// Every thread owns a namespace, and knows for each of its keys the exact version that is stored, if any. All
// threads read all keys: bytes must be those of one version of that very key, not older than what its owner
// had made obsolete before the read began. Nothing may be left behind.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "ram/ram_store.h"
#include "slab_samples.h"
#include "store_calls.h"
#include "store_samples.h"
#include "wire/checksum.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

constexpr std::size_t kThreads = 4;
constexpr std::size_t kBlocks = 60;  // of one owner
constexpr std::size_t kParts = 3;
constexpr int kSteps = 2500;

std::size_t length_of(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  switch (random() % 20) {
    case 0:
      return 1 + random() % 1'500'000;
    case 1:
    case 2:
      return 1 + random() % 300'000;
    default:
      return 1 + random() % 40'000;
  }
}

struct Key {
  std::uint64_t seed = 0;
  ObjectKey key;
  std::atomic<std::uint64_t> started{0};   // versions that were begun: 1..started
  std::atomic<std::uint64_t> obsolete{0};  // versions up to this one can never be read again
};

// A version's payload begins with its number where there is room, so that a reader knows what to compare
// with.
std::vector<std::byte> payload_of(const Key& key, std::uint64_t version) {
  const std::uint64_t seed = key.seed * 1'000'003 + version;
  auto bytes = make_payload(seed, 8 + length_of(seed));
  store_le(bytes.data(), version);
  return bytes;
}

struct Recorder {
  std::unique_ptr<TempDirectory> directory;  // null: memory only
  Faults faults;
  std::unique_ptr<RamStore> store;
  std::vector<TestNamespace> spaces;
  std::vector<std::vector<Key>> keys;  // by owner
  std::atomic<std::uint64_t> hits{0}, misses{0}, unexplained{0}, leases{0};
  std::atomic<int> failures{0};

  void fail(const std::string& what) {
    if (failures++ < 10) MESSAGE(what);
  }
};

class Worker {
 public:
  Worker(Recorder& shared, std::size_t self, std::uint64_t seed)
      : shared_(shared), store_(*shared.store), self_(self), random_(seed), stored_(kBlocks * kParts) {}

  void run() {
    for (int step = 0; step < kSteps; ++step) {
      const std::size_t at = random_() % stored_.size();
      switch (random_() % 16) {
        case 0:
        case 1:
        case 2:
        case 3:
          write(at, false);
          break;
        case 4:
          write(at, true);
          break;
        case 5:
          remove(at);
          break;
        case 6:
          remove_chunk(at / kParts);
          break;
        case 7:
          lease(at / kParts);
          break;
        case 8:
          if (random_() % 40 == 0) erase();
          break;
        case 9:
          touch();
          break;
        case 10:
          pins_.resize(pins_.size() / 2);
          store_.tick();
          break;
        case 11:
        case 12:
          read_own(at);
          break;
        default:
          read_any();
      }
    }
    pins_.clear();
    store_.release_owner(self_);
  }

 private:
  struct Stored {
    std::uint64_t version = 0;  // 0: none
    bool gone_by_eviction = false;
  };

  Key& key(std::size_t at) { return shared_.keys[self_][at]; }
  bool one_in(unsigned count) { return random_() % count == 0; }

  void write(std::size_t at, bool replace) {
    Key& target = key(at);
    const std::uint64_t version = target.started.load() + 1;
    target.started.store(version);
    const auto bytes = payload_of(target, version);
    PutOptions options;
    options.replace = replace;
    auto start = store_.begin_put(target.key, 0, static_cast<std::uint32_t>(bytes.size()), options);
    if (start.status == Status::kAlready) {
      if (replace || stored_[at].version == 0) shared_.fail("already, though nothing is stored");
      return;
    }
    if (start.status == Status::kAgainNoMemory) return;
    if (!start.ticket) return shared_.fail("a PUT ended with " + std::string(status_name(start.status)));
    const MutableBytes slot = start.ticket->bytes();
    for (std::size_t done = 0; done < bytes.size();) {
      const std::size_t piece = std::min<std::size_t>(bytes.size() - done, 1 + random_() % 200'000);
      std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(done), piece,
                  slot.begin() + static_cast<std::ptrdiff_t>(done));
      done += piece;
      if (one_in(50)) return;  // abandoned
      if (one_in(20)) std::this_thread::yield();
    }
    if (committed(*start.ticket, xxh3_64(bytes)) != Status::kOk)
      return shared_.fail("a commit without rival failed");
    stored_[at] = {version, false};
    target.obsolete.store(version - 1);
  }

  void removed(std::size_t at) {
    stored_[at] = {};
    key(at).obsolete.store(key(at).started.load());
  }

  void remove(std::size_t at) {
    const Status status = test::removed(store_, key(at).key);
    if (status == Status::kOk && stored_[at].version == 0) shared_.fail("removed what was not there");
    removed(at);
  }

  void remove_chunk(std::size_t block) {
    ObjectKey whole = key(block * kParts).key;
    whole.part = kAllParts;
    (void)test::removed(store_, whole);
    for (std::size_t part = 0; part < kParts; ++part) removed(block * kParts + part);
  }

  void erase() {
    (void)erased(store_, shared_.spaces[self_].id);
    for (std::size_t at = 0; at < stored_.size(); ++at) removed(at);
  }

  void touch() {
    std::vector<BlockId> batch;
    for (std::size_t i = 0; i < 10; ++i) batch.push_back(make_block(random_() % kBlocks));
    store_.touch(shared_.spaces[random_() % kThreads].id, batch);
  }

  ReadResult acquire(const ObjectKey& at) { return acquired(store_, at); }

  // The version that the bytes are, 0 when they are none of this key's.
  std::uint64_t version_of(const Key& target, const ReadPin& pin) {
    if (pin.bytes().size() < 8 || pin.checksum() != xxh3_64(pin.bytes())) return 0;
    const auto version = load_le<std::uint64_t>(pin.bytes().data());
    if (version == 0 || version > target.started.load()) return 0;
    return same_bytes(pin.bytes(), payload_of(target, version)) ? version : 0;
  }

  void keep_sometimes(ReadResult read, const Key& target) {
    if (!one_in(4)) return;
    if (pins_.size() > 20) pins_.erase(pins_.begin());
    // What is pinned does not change, whatever happens to its key.
    if (!pins_.empty() && one_in(2)) {
      const auto& [old, pin] = pins_[random_() % pins_.size()];
      if (version_of(*old, *pin) == 0) shared_.fail("pinned bytes have changed");
    }
    pins_.emplace_back(&target, std::move(read.pin));
  }

  void read_own(std::size_t at) {
    Key& target = key(at);
    ReadResult read = acquire(target.key);
    if (!read.pin) {
      ++shared_.misses;
      if (shared_.directory && read.status == Status::kAgainNoMemory)
        return;  // on a disk, and nowhere to read it to
      if (read.status != Status::kMissNotFound && read.status != Status::kMissEvicted) {
        shared_.fail("a miss without a right reason");
      }
      if (stored_[at].version != 0) {
        // It must have been evicted. A part of a chunk that was stored anew since is explained as not found.
        if (read.status != Status::kMissEvicted) ++shared_.unexplained;
        stored_[at] = {0, true};
      }
      return;
    }
    ++shared_.hits;
    const std::uint64_t version = version_of(target, *read.pin);
    if (version == 0 || version != stored_[at].version) {
      shared_.fail("read version " + std::to_string(version) + " where " +
                   std::to_string(stored_[at].version) + " is stored");
    }
    keep_sometimes(std::move(read), target);
  }

  void read_any() {
    Key& target = shared_.keys[random_() % kThreads][random_() % stored_.size()];
    const std::uint64_t obsolete = target.obsolete.load();
    ReadResult read = acquire(target.key);
    if (!read.pin) {
      ++shared_.misses;
      return;
    }
    ++shared_.hits;
    const std::uint64_t version = version_of(target, *read.pin);
    if (version <= obsolete) {
      shared_.fail("read version " + std::to_string(version) + ", but everything up to " +
                   std::to_string(obsolete) + " is gone");
    }
    keep_sometimes(std::move(read), target);
  }

  // While its owner holds a lease, what it covers is read, not evicted.
  void lease(std::size_t block) {
    ExistsTable table;
    for (std::size_t part = 0; part < kParts; ++part) table.parts.push_back(key(part).key.part);
    for (std::size_t i = block; i < std::min(block + 4, kBlocks); ++i)
      table.chunks.push_back({make_block(i), 0});
    for (std::size_t part = 0; part < kParts; ++part) write(block * kParts + part, false);
    const bool short_lived = one_in(3);
    const auto result = store_.exists(shared_.spaces[self_].id, table, short_lived ? 1 : 60'000, self_);
    for (std::size_t i = 0; i < result.prefix; ++i) {
      for (std::size_t part = 0; part < kParts; ++part) {
        if (stored_[(block + i) * kParts + part].version == 0)
          shared_.fail("a chunk is said to be there and is not");
      }
    }
    if (result.lease_id == 0) return;
    if (short_lived) return;  // ends by itself
    ++shared_.leases;
    // Enough now and then to push out everything that is not pinned; elsewhere, because what replaces a
    // leased object is not leased.
    const int writes = one_in(10) ? 150 : 5;
    for (int i = 0; i < writes; ++i) {
      const std::size_t other = (block + 4 + random_() % (kBlocks - 8)) % kBlocks;
      write(other * kParts + random_() % kParts, true);
    }
    // The share of the leases may have covered only the first chunk.
    for (std::size_t part = 0; part < kParts; ++part) {
      if (stored_[block * kParts + part].version == 0) continue;
      const ReadResult read = acquire(key(block * kParts + part).key);
      if (!read.pin && read.status != Status::kAgainNoMemory) shared_.fail("a leased object is gone");
    }
    if (one_in(2)) (void)store_.renew(result.lease_id, 60'000);
    if (one_in(2)) {
      if (!store_.release(result.lease_id)) shared_.fail("a lease was lost");
    } else {
      store_.release_owner(self_);
    }
  }

  Recorder& shared_;
  RamStore& store_;
  const std::size_t self_;
  std::mt19937_64 random_;
  std::vector<Stored> stored_;
  std::vector<std::pair<const Key*, std::unique_ptr<ReadPin>>> pins_;
};

void run_recorder(std::uint64_t seed, std::uint64_t index_hash_mask, bool with_disk = false) {
  Recorder shared;
  RamStoreOptions options;
  options.catalog.capacity_bytes = 12 * 1024 * 1024;
  options.catalog.index_hash_mask = index_hash_mask;
  if (with_disk) {
    shared.directory = std::make_unique<TempDirectory>();
    shared.faults.delay_us = 50;
    SlabStoreOptions directory;
    directory.path = shared.directory->path();
    directory.capacity_bytes = 16 * 1024 * 1024;
    directory.wrap = [&shared](std::unique_ptr<Device> device, DeviceRole) -> std::unique_ptr<Device> {
      return std::make_unique<FaultyDevice>(std::move(device), shared.faults);
    };
    options.disk.emplace().directories.push_back(std::move(directory));
  }
  shared.store = std::make_unique<RamStore>(std::move(options));
  for (std::size_t owner = 0; owner < kThreads; ++owner) {
    const auto& space = shared.spaces.emplace_back("owner " + std::to_string(owner));
    std::vector<std::uint16_t> differs;
    REQUIRE(shared.store->put_namespace(space.id, space.descriptor, "", differs) == Status::kOk);
    auto& keys = shared.keys.emplace_back(kBlocks * kParts);
    for (std::size_t at = 0; at < keys.size(); ++at) {
      keys[at].seed = seed + owner * 10'000 + at;
      // Every owner uses the same blocks and parts: only the namespace tells them apart.
      keys[at].key = {space.id, make_block(at / kParts), make_part(static_cast<std::uint16_t>(at % kParts))};
    }
  }
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&shared, seed, i] { Worker(shared, i, seed + i).run(); });
  }
  std::atomic<bool> done{false};
  std::thread checker([&] {
    while (!done) {
      if (const auto found = shared.store->violations(false); !found.empty()) shared.fail(found[0]);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  for (std::thread& thread : threads) thread.join();
  done = true;
  checker.join();

  CHECK(shared.failures == 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  shared.store->tick();
  if (with_disk) (void)synced(*shared.store);
  CHECK(shared.store->violations(true) == std::vector<std::string>{});
  const auto stats = shared.store->stats();
  CHECK(stats.evicted_objects > 100);
  CHECK(shared.hits > 500);
  CHECK(shared.misses > 100);
  CHECK(shared.leases > 50);
  CHECK(shared.unexplained < shared.misses / 2);
  MESSAGE("hits " << shared.hits.load() << ", misses " << shared.misses.load() << ", evicted "
                  << stats.evicted_objects);
  for (const TestNamespace& space : shared.spaces) (void)erased(*shared.store, space.id);
  CHECK(shared.store->stats().used_bytes == 0);
  CHECK(shared.store->stats().objects == 0);
  if (!with_disk) return;
  MESSAGE("disk: read " << stats.disk->reads << ", written " << stats.disk->writes << ", evicted "
                        << stats.disk->evicted_objects << ", promoted " << stats.disk->promoted << ", joined "
                        << stats.disk->joined_reads);
  CHECK(stats.disk->evicted_objects > 100);
  CHECK(stats.disk->promoted > 5);
  CHECK(stats.disk->corrupt == 0);
  // Of the largest ones, while leases hold what would have to go.
  CHECK(stats.disk->lost_writes < stats.disk->writes / 50);
  for (int i = 0; i < 500 && shared.store->stats().disk->used_bytes != 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  CHECK(shared.store->stats().disk->used_bytes == 0);
}

}  // namespace

TEST_CASE("every read is exactly right or a miss, whatever happens at the same time") {
  const std::uint64_t seed = std::random_device{}();
  MESSAGE("seed " << seed);
  run_recorder(seed, ~std::uint64_t{0});
}

TEST_CASE("the same with a disk behind it") {
  const std::uint64_t seed = std::random_device{}();
  MESSAGE("seed " << seed);
  run_recorder(seed, ~std::uint64_t{0}, true);
}

TEST_CASE("also when the hashes of all keys collide") {
  const std::uint64_t seed = std::random_device{}();
  MESSAGE("seed " << seed);
  run_recorder(seed, std::uint64_t{7} << 32);
}
