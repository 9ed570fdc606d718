// Crashes and damage. A child process runs a store with threads that record what they were promised, in
// memory that outlives it; it is killed at a random moment, in half of the rounds with a disk that forgets or
// reorders what was not synced. Then every key is exactly right or exactly absent.
//
// DFKV_CRASH_ROUNDS and DFKV_CRASH_SEED choose more rounds, or those of an earlier run.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <random>
#include <thread>

#include "ram/ram_store.h"
#include "slab_samples.h"
#include "store_calls.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

constexpr auto kOk = Status::kOk;
constexpr std::uint64_t kMiB = 1024 * 1024;
constexpr std::size_t kThreads = 3;
constexpr std::size_t kKeys = 120;  // of one thread
constexpr std::size_t kParts = 3;   // of a chunk
constexpr int kDefaultRounds = 30;

enum Promise : std::uint32_t { kNothing, kVisible, kDurable };

// What one thread knows of one key. Written by the child, read by the parent after its death.
struct KeyState {
  std::atomic<std::uint32_t> version{0};  // what is promised; 0: that it is absent
  std::atomic<std::uint32_t> promise{kNothing};
  std::atomic<std::uint32_t> pending{0};  // a version being put
  std::atomic<std::uint32_t> leaving{0};  // being removed or erased
  std::atomic<std::uint32_t> last{0};     // the latest version begun
};
struct Shared {
  std::atomic<std::uint32_t> ready{0};
  std::atomic<std::uint32_t> failed{0};
  std::atomic<std::uint64_t> operations{0};
  KeyState keys[kThreads][kKeys];
};

// The child has no test case around it: what fails there ends it.
void expect(bool holds, const char* what) {
  if (holds) return;
  std::perror(what);
  std::abort();
}

class SharedFile {
 public:
  explicit SharedFile(const std::filesystem::path& path) {
    const Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    expect(static_cast<bool>(fd), "open");
    expect(::ftruncate(fd.get(), sizeof(Shared)) == 0, "ftruncate");
    void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    expect(memory != MAP_FAILED, "mmap");
    shared_ =
        static_cast<Shared*>(memory);  // a new file reads as zeros, which is what everything starts with
  }
  ~SharedFile() { ::munmap(shared_, sizeof(Shared)); }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;
  Shared* operator->() { return shared_; }
  Shared& operator*() { return *shared_; }

 private:
  Shared* shared_ = nullptr;
};

TestNamespace space_of(std::size_t thread) { return TestNamespace("crash " + std::to_string(thread)); }

ObjectKey key_of(std::size_t thread, std::size_t at) {
  return {space_of(thread).id, make_block(at / kParts), make_part(static_cast<std::uint16_t>(at % kParts))};
}

std::vector<std::byte> payload_of(std::size_t thread, std::size_t at, std::uint32_t version) {
  const std::uint64_t seed = (thread * kKeys + at) * 1'000'003 + version;
  std::mt19937_64 random(seed);
  const std::size_t most = random() % 8 == 0 ? 200'000 : 30'000;
  return make_payload(seed, 1 + random() % most);
}

struct Setup {
  bool roomy = true;
  bool forgetting = false;
  std::uint64_t seed = 0;
};

std::unique_ptr<RamStore> open_store(const std::filesystem::path& path, const Setup& setup) {
  RamStoreOptions options;
  options.catalog.capacity_bytes = 6 * kMiB;
  SlabStoreOptions one;
  one.path = path;
  one.capacity_bytes = (setup.roomy ? 96 : 16) * kMiB;
  one.node_id = "n-1";
  if (setup.forgetting) {
    one.wrap = [setup](std::unique_ptr<Device> device, DeviceRole role) -> std::unique_ptr<Device> {
      std::mt19937_64 random(setup.seed + static_cast<std::uint64_t>(role));
      const std::size_t sector = role == DeviceRole::kTable ? 512 : 4096;
      const unsigned keep = random() % 2 == 0 ? 100 : static_cast<unsigned>(random() % 100);
      return std::make_unique<ForgettingDevice>(std::move(device), sector, random(), keep);
    };
  }
  options.disk.emplace().directories.push_back(std::move(one));
  options.disk->readers = options.disk->writers = 2;
  auto store = std::make_unique<RamStore>(std::move(options));
  for (std::size_t thread = 0; thread < kThreads; ++thread) {
    const TestNamespace space = space_of(thread);
    std::vector<std::uint16_t> differs;
    expect(store->put_namespace(space.id, space.descriptor, "", differs) == kOk, "put_namespace");
  }
  return store;
}

// ---- the child

class Worker {
 public:
  Worker(RamStore& store, Shared& shared, std::size_t self, const Setup& setup)
      : store_(store), shared_(shared), self_(self), roomy_(setup.roomy), random_(setup.seed * 31 + self) {}

  void run() {
    while (true) {
      const std::size_t at = random_() % kKeys;
      const std::uint64_t what = random_() % 32;
      if (what < 10) {
        put(at, Ack::kRam, false);
      } else if (what < 14) {
        put(at, Ack::kDisk, false);
      } else if (what < 17) {
        put(at, what == 16 ? Ack::kDisk : Ack::kRam, true);
      } else if (what < 20) {
        remove(at);
      } else if (what == 20 && random_() % 12 == 0) {
        erase();
      } else if (what == 21 && random_() % 4 == 0) {
        static_cast<void>(synced(store_));
      } else {
        get(at);
      }
      ++shared_.operations;
    }
  }

 private:
  KeyState& state(std::size_t at) { return shared_.keys[self_][at]; }
  void fail(const char* what) {
    std::fprintf(stderr, "crash child: %s\n", what);
    ++shared_.failed;
  }

  void put(std::size_t at, Ack ack, bool replace) {
    KeyState& key = state(at);
    // Other bytes under a key that is there, or was until it was evicted, need a replacement.
    const std::uint32_t version = !replace && key.version != 0 ? key.version.load() : ++key.last;
    key.pending = version;
    const auto bytes = payload_of(self_, at, version);
    PutOptions options;
    options.ack = ack;
    options.replace = replace;
    auto start = store_.begin_put(key_of(self_, at), 0, static_cast<std::uint32_t>(bytes.size()), options);
    Status status = start.status;
    if (start.ticket) {
      std::ranges::copy(bytes, start.ticket->bytes().begin());
      status = committed(*start.ticket, xxh3_64(bytes));
    }
    // On a full disk that leases and writes under way hold there may be no room: visible is what it is all
    // the same.
    const bool in_memory = status == Status::kAgainDisk && ack == Ack::kDisk && !roomy_;
    if (status == kOk || in_memory) {
      // In this order: what is read in between is allowed by both.
      key.promise = kNothing;
      key.version = version;
      key.promise = ack == Ack::kDisk && status == kOk ? kDurable : kVisible;
    } else if (status == Status::kAlready) {
      if (replace) fail("a replacement was refused as already there");
    } else if (status != Status::kAgainNoMemory) {
      fail("a PUT failed");
    }
    key.pending = 0;
  }

  void remove(std::size_t at) {
    const bool chunk = random_() % 3 == 0;
    const std::size_t first = chunk ? at / kParts * kParts : at;
    const std::size_t end = chunk ? std::min(first + kParts, kKeys) : at + 1;
    for (std::size_t i = first; i < end; ++i) state(i).leaving = 1;
    ObjectKey key = key_of(self_, at);
    if (chunk) key.part = kAllParts;
    if (range_of(removed(store_, key)) == StatusRange::kAgain) return fail("a REMOVE failed");
    for (std::size_t i = first; i < end; ++i) gone(i);
  }

  void erase() {
    for (std::size_t i = 0; i < kKeys; ++i) state(i).leaving = 1;
    if (erased(store_, space_of(self_).id).first != kOk) return fail("an ERASE failed");
    for (std::size_t i = 0; i < kKeys; ++i) gone(i);
  }

  void gone(std::size_t at) {
    state(at).promise = kNothing;
    state(at).version = 0;
    state(at).leaving = 0;
  }

  void get(std::size_t at) {
    const std::uint32_t version = state(at).version;
    const auto read = acquired(store_, key_of(self_, at));
    if (!read.pin) return;
    if (version == 0) return fail("something that is not there was read");
    if (!same_bytes(read.pin->bytes(), payload_of(self_, at, version))) fail("wrong bytes were read");
  }

  RamStore& store_;
  Shared& shared_;
  const std::size_t self_;
  const bool roomy_;
  std::mt19937_64 random_;
};

int run_child(const std::filesystem::path& folder, const Setup& setup) {
  SharedFile shared(folder / "shared");
  const auto store = open_store(folder / "store", setup);
  shared->ready = 1;
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] { Worker(*store, *shared, i, setup).run(); });
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}

// ---- the parent

void crash(const std::filesystem::path& folder, const Setup& setup, Shared& shared, unsigned live_ms) {
  const std::string mode = std::string(setup.roomy ? "1" : "0") + (setup.forgetting ? "1" : "0");
  const std::string seed = std::to_string(setup.seed);
  shared.ready = 0;
  shared.failed = 0;
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::execl("/proc/self/exe", "slab_crash_test", "--crash-child", folder.c_str(), mode.c_str(), seed.c_str(),
            nullptr);
    ::_exit(127);
  }
  int status = 0;
  for (int i = 0; i < 6000 && shared.ready == 0 && ::waitpid(child, &status, WNOHANG) == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const bool ready = shared.ready == 1;
  if (ready) std::this_thread::sleep_for(std::chrono::milliseconds(live_ms));
  ::kill(child, SIGKILL);
  REQUIRE(ready);
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGKILL);
  CHECK(shared.failed.load() == 0);
}

struct Tally {
  std::size_t right = 0, absent = 0, durable = 0, corrupt = 0;
};

void verify(const std::filesystem::path& folder, Setup setup, Shared& shared, Tally& tally) {
  setup.forgetting = false;
  const auto store = open_store(folder / "store", setup);
  CHECK(store->disk()->directory(0).recovery().remark == "");
  CHECK(store->violations(true) == std::vector<std::string>{});
  for (std::size_t thread = 0; thread < kThreads; ++thread) {
    for (std::size_t at = 0; at < kKeys; ++at) {
      KeyState& key = shared.keys[thread][at];
      const auto read = acquired(*store, key_of(thread, at));
      INFO("key ", thread, "/", at, ": version ", key.version.load(), ", promise ", key.promise.load(),
           ", pending ", key.pending.load(), ", leaving ", key.leaving.load(), ", status ",
           status_name(read.status));
      std::uint32_t found = 0;
      if (read.pin) {
        for (const std::uint32_t version : {key.version.load(), key.pending.load()}) {
          if (version != 0 && same_bytes(read.pin->bytes(), payload_of(thread, at, version))) found = version;
        }
        CHECK(found != 0);
        ++tally.right;
      } else {
        CHECK(range_of(read.status) == StatusRange::kMiss);
        ++tally.absent;
        const bool must_be = setup.roomy && key.promise == kDurable && key.leaving == 0 && key.pending == 0;
        CHECK_FALSE(must_be);
      }
      if (key.promise == kDurable) ++tally.durable;
      key.version = found;
      key.promise =
          found == 0 ? kNothing : kDurable;  // the loss of power does not reach what this process leaves
      key.pending = key.leaving = 0;
    }
  }
  tally.corrupt += store->stats().disk->corrupt;
  CHECK(synced(*store) == kOk);
  CHECK(store->violations(true) == std::vector<std::string>{});
  CHECK(store->stats().pins == 0);
}

std::uint64_t number_from(const char* name, std::uint64_t otherwise) {
  const char* const text = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nothing sets it
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace

TEST_CASE("after every crash each key is exactly right or exactly absent") {
  const auto rounds = number_from("DFKV_CRASH_ROUNDS", kDefaultRounds);
  const std::uint64_t base = number_from("DFKV_CRASH_SEED", std::random_device{}());
  MESSAGE("seed ", base, ", ", rounds, " rounds");
  TempDirectory folders[4];
  std::vector<std::unique_ptr<SharedFile>> shared;
  for (const TempDirectory& folder : folders) {
    std::filesystem::create_directory(folder.path() / "store");
    shared.push_back(std::make_unique<SharedFile>(folder.path() / "shared"));
  }
  Tally tally;
  std::uint64_t operations = 0;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    std::mt19937_64 random(base + round);
    const std::size_t which = round % 4;
    const Setup setup{which % 2 == 0, which / 2 == 1, base + round};
    const std::string mode =
        std::string(setup.roomy ? "roomy" : "full") + (setup.forgetting ? ", forgetting" : "");
    INFO("seed ", base, ", round ", round, ": ", mode);
    crash(folders[which].path(), setup, **shared[which], 30 + random() % 500);
    verify(folders[which].path(), setup, **shared[which], tally);
  }
  for (const auto& one : shared) operations += (*one)->operations;
  MESSAGE(operations, " operations; keys right ", tally.right, ", absent ", tally.absent,
          ", promised from disk ", tally.durable, ", found corrupt ", tally.corrupt);
  CHECK(operations > 20 * rounds);
  CHECK(tally.right > 10 * rounds);
  CHECK(tally.durable > rounds);
}

int main(int argc, char** argv) {
  if (argc == 5 && std::string_view(argv[1]) == "--crash-child") {
    const std::string_view mode = argv[3];
    return run_child(argv[2], {mode[0] == '1', mode[1] == '1', std::strtoull(argv[4], nullptr, 10)});
  }
  return doctest::Context(argc, argv).run();
}
