// dfkv_core._native: what `dfkv bench recover` and `dfkv bench store` measure, on the store itself.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bind/parts.h"
#include "ram/ram_store.h"
#include "slab/slab_store.h"
#include "wire/checksum.h"

namespace nb = nanobind;

namespace dfkv {

namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr std::uint64_t kSpareSlots = 64;  // beyond what is stored, so that filling evicts nothing

NamespaceInfo bench_namespace() {
  NamespaceInfo info;
  const std::string_view text = "bench";
  info.descriptor.resize(6 + text.size());
  store_le(info.descriptor.data(), std::uint16_t{2});
  store_le(info.descriptor.data() + 2, static_cast<std::uint32_t>(text.size()));
  std::ranges::copy(as_bytes(text.data(), text.size()), info.descriptor.begin() + 6);
  info.id = namespace_id(info.descriptor);
  info.label = text;
  return info;
}

ObjectKey bench_key(const NamespaceId& ns, std::uint64_t number) {
  ObjectKey key{ns, {}, 0};
  store_le(key.block.bytes.data(), number * 0x9E3779B97F4A7C15U);
  store_le(key.block.bytes.data() + 8, number);
  return key;
}

std::uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t total = 0;
  std::uint64_t resident = 0;
  file >> total >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

SlabStoreOptions recover_options(const std::string& path, std::uint64_t objects, std::uint32_t object_bytes) {
  SlabStoreOptions options;
  options.path = path;
  options.capacity_bytes =
      (objects + objects / 50 + kSpareSlots) * slot_bytes_of(size_class_of(object_bytes)) +
      kMinDirectoryBytes;
  options.node_id = "bench";
  options.keep_payload = false;
  return options;
}

void fill_table(const std::string& path, std::uint64_t objects, std::uint32_t object_bytes) {
  const nb::gil_scoped_release release;
  SlabStore store(recover_options(path, objects, object_bytes));
  const NamespaceInfo space = bench_namespace();
  store.put_namespace(space);
  for (std::uint64_t i = 0; i < objects; ++i) {
    const Status status = store.write(store.begin_write(bench_key(space.id, i)), {i, object_bytes, i, 0, {}});
    if (status != Status::kOk)
      throw std::runtime_error("a write ended with " + std::string(status_name(status)));
  }
}

nb::dict recover_table(const std::string& path, std::uint64_t objects, std::uint32_t object_bytes) {
  RecoveryReport report;
  std::uint64_t grown = 0;
  {
    const nb::gil_scoped_release release;
    const std::uint64_t before = resident_bytes();
    const SlabStore store(recover_options(path, objects, object_bytes));
    grown = resident_bytes() - before;
    report = store.recovery();
  }
  nb::dict out;
  out["objects"] = report.objects;
  out["seconds"] = report.seconds;
  out["index_bytes"] = grown;
  out["table_bytes"] = report.table_bytes;
  return out;
}

// Counts what is under way, and keeps how long each took.
class Window {
 public:
  explicit Window(std::uint64_t depth) : depth_(depth) {}
  SteadyClock::time_point enter() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return under_way_ < depth_; });
    ++under_way_;
    return SteadyClock::now();
  }
  void leave(SteadyClock::time_point since, Status status) {
    const std::lock_guard lock(mutex_);
    took_us_.push_back(std::chrono::duration<double, std::micro>(SteadyClock::now() - since).count());
    if (status != Status::kOk) ++failed_;
    --under_way_;
    changed_.notify_all();
  }
  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return under_way_ == 0; });
  }
  std::vector<double> took_us_;
  std::uint64_t failed_ = 0;

 private:
  const std::uint64_t depth_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t under_way_ = 0;
};

// One store of `objects` objects for as long as the benchmark goes.
class StoreBench {
 public:
  StoreBench(const std::string& path, std::uint32_t object_bytes, std::uint64_t objects, unsigned depth)
      : object_bytes_(object_bytes), objects_(objects), depth_(depth), source_(object_bytes) {
    std::mt19937_64 random(1);
    for (std::size_t i = 0; i + 8 <= source_.size(); i += 8) store_le(source_.data() + i, random());
    checksum_ = xxh3_64(source_);
    const std::uint64_t slot = slot_bytes_of(size_class_of(object_bytes));
    RamStoreOptions options;
    // Memory for what is under way and little more: next to nothing is found in it, and a PUT is done when
    // its write is.
    options.catalog.capacity_bytes = (8 << 20) + slot * depth * 3;
    options.max_dirty_fraction = std::max(
        0.01, 1.5 * static_cast<double>(slot * depth) / static_cast<double>(options.catalog.capacity_bytes));
    SlabStoreOptions directory;
    directory.path = path;
    directory.capacity_bytes = objects * slot + kMinDirectoryBytes;
    directory.node_id = "bench";
    options.disk.emplace().directories.push_back(std::move(directory));
    options.disk->readers = options.disk->writers = depth;
    store_ = std::make_unique<RamStore>(std::move(options));
    space_ = bench_namespace();
    std::vector<std::uint16_t> ignored;
    static_cast<void>(store_->put_namespace(space_.id, space_.descriptor, space_.label, ignored));
  }

  void put(std::uint64_t count, Window& window) {
    for (std::uint64_t i = 0; i < count; ++i) {
      const ObjectKey key = bench_key(space_.id, next_++);
      const auto since = window.enter();
      PutStart start;
      while (true) {
        start = store_->begin_put(key, 0, object_bytes_, {});
        if (start.status != Status::kAgainNoMemory) break;
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      if (!start.ticket) {
        window.leave(since, start.status);
        continue;
      }
      std::ranges::copy(source_, start.ticket->bytes().begin());
      start.ticket->commit(checksum_, [&window, since](Status status) { window.leave(since, status); });
    }
    window.drain();
  }

  void get(std::uint64_t count, Window& window) {
    // The newer half, because a full store holds the older one in part, in an order that comes back late.
    const std::uint64_t half = objects_ / 2;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t number = next_ - 1 - (i * 0x9E3779B1U + next_) % half;
      const auto since = window.enter();
      store_->acquire(bench_key(space_.id, number),
                      [&window, since](ReadResult result) { window.leave(since, result.status); });
    }
    window.drain();
  }

  nb::dict run(const std::string& op, std::uint64_t count) {
    Window window(depth_);
    double seconds = 0;
    {
      const nb::gil_scoped_release release;
      window.took_us_.reserve(count);
      const auto start = SteadyClock::now();
      op == "get" ? get(count, window) : put(count, window);
      seconds = std::chrono::duration<double>(SteadyClock::now() - start).count();
      std::ranges::sort(window.took_us_);
    }
    const auto at = [&window](double share) {
      return window
          .took_us_[static_cast<std::size_t>(share * static_cast<double>(window.took_us_.size() - 1))];
    };
    nb::dict out;
    out["seconds"] = seconds;
    out["bytes"] = count * object_bytes_;
    out["failed"] = window.failed_;
    out["p50_us"] = at(0.5);
    out["p99_us"] = at(0.99);
    return out;
  }

 private:
  const std::uint32_t object_bytes_;
  const std::uint64_t objects_;
  const unsigned depth_;
  std::vector<std::byte> source_;
  std::uint64_t checksum_ = 0;
  NamespaceInfo space_;
  std::unique_ptr<RamStore> store_;
  std::uint64_t next_ = 0;
};

}  // namespace

void bind_bench(nb::module_& m) {
  m.def("bench_fill_table", &fill_table, nb::arg("path"), nb::arg("objects"), nb::arg("object_bytes"));
  m.def("bench_recover_table", &recover_table, nb::arg("path"), nb::arg("objects"), nb::arg("object_bytes"));
  nb::class_<StoreBench>(m, "StoreBench", nb::is_final())
      .def(nb::init<const std::string&, std::uint32_t, std::uint64_t, unsigned>(), nb::arg("path"),
           nb::arg("object_bytes"), nb::arg("objects"), nb::arg("depth"))
      .def("run", &StoreBench::run, nb::arg("op"), nb::arg("count"));
}

}  // namespace dfkv
