// Devices with the faults that disks have. Each stands in front of another device and is told what to do
// while it is in use, from any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "slab/device.h"

namespace dfkv::test {

// Memory as devices that go past the page cache want it.
template <typename T>
struct PageAllocator {
  using value_type = T;
  PageAllocator() = default;
  template <typename U>
  explicit PageAllocator(const PageAllocator<U>&) {}
  T* allocate(std::size_t count) {
    return static_cast<T*>(::operator new (count * sizeof(T), std::align_val_t{4096}));
  }
  void deallocate(T* memory, std::size_t) { ::operator delete (memory, std::align_val_t{4096}); }
  bool operator==(const PageAllocator&) const = default;
};
using Pages = std::vector<std::byte, PageAllocator<std::byte>>;

// What a FaultyDevice does now. Shared with the test, which changes it.
struct Faults {
  std::atomic<int> read_error{0};          // errno of every read
  std::atomic<int> write_error{0};         // errno of every write
  std::atomic<int> sync_error{0};          // errno of every sync
  std::atomic<int> writes_until_error{0};  // n: the n-th write from now fails once, with EIO
  std::atomic<int> delay_us{0};            // before every read and write
  std::atomic<bool> short_moves{false};    // reads and writes move one block
  std::atomic<std::uint64_t> reads{0}, writes{0}, syncs{0};
  std::atomic<int> reading{0}, most_reading{0};  // reads at the same time
};

class FaultyDevice final : public Device {
 public:
  FaultyDevice(std::unique_ptr<Device> inner, Faults& faults) : inner_(std::move(inner)), faults_(faults) {}

  std::int64_t read_some(std::uint64_t offset, MutableBytes into) override {
    ++faults_.reads;
    const InFlight counted(faults_);
    delay();
    if (const int error = faults_.read_error; error != 0) return -error;
    return inner_->read_some(offset, into.first(cut(into.size())));
  }
  std::int64_t write_some(std::uint64_t offset, Bytes from) override {
    ++faults_.writes;
    delay();
    if (const int error = write_fault(); error != 0) return -error;
    return inner_->write_some(offset, from.first(cut(from.size())));
  }
  int sync() override {
    ++faults_.syncs;
    if (const int error = faults_.sync_error; error != 0) return error;
    return inner_->sync();
  }
  std::optional<Range> next_written(std::uint64_t offset) override { return inner_->next_written(offset); }
  [[nodiscard]] std::uint64_t bytes() const override { return inner_->bytes(); }
  [[nodiscard]] std::size_t alignment() const override { return inner_->alignment(); }

 private:
  struct InFlight {
    explicit InFlight(Faults& to) : faults(to) {
      const int now = ++faults.reading;
      int most = faults.most_reading;
      while (now > most && !faults.most_reading.compare_exchange_weak(most, now)) {
      }
    }
    ~InFlight() { --faults.reading; }
    InFlight(const InFlight&) = delete;
    InFlight& operator=(const InFlight&) = delete;
    Faults& faults;
  };

  void delay() const {
    if (const int us = faults_.delay_us; us != 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
  }
  [[nodiscard]] std::size_t cut(std::size_t size) const {
    return faults_.short_moves ? std::min<std::size_t>(size, std::max<std::size_t>(alignment(), 64)) : size;
  }
  int write_fault() {
    if (faults_.writes_until_error > 0 && --faults_.writes_until_error == 0) return EIO;
    return faults_.write_error;
  }

  std::unique_ptr<Device> inner_;
  Faults& faults_;
};

// A disk whose cache is lost with the power: a write reaches the device behind at once, at a later sync, or
// never, sector by sector and in any order. Ending the process is the loss of power.
class ForgettingDevice final : public Device {
 public:
  // keep_percent: how many of the sectors wait for the sync.
  ForgettingDevice(std::unique_ptr<Device> inner, std::size_t sector_bytes, std::uint64_t seed,
                   unsigned keep_percent)
      : inner_(std::move(inner)), sector_(sector_bytes), random_(seed), keep_percent_(keep_percent) {}

  std::int64_t read_some(std::uint64_t offset, MutableBytes into) override {
    const std::lock_guard lock(mutex_);
    if (const int error = inner_->read(offset, into); error != 0) return -error;
    const std::uint64_t end = offset + into.size();
    for (auto it = cache_.lower_bound(offset / sector_); it != cache_.end() && it->first * sector_ < end;
         ++it) {
      const std::uint64_t from = std::max(offset, it->first * sector_);
      const std::uint64_t to = std::min(end, (it->first + 1) * sector_);
      std::copy_n(it->second.begin() + static_cast<std::ptrdiff_t>(from - it->first * sector_), to - from,
                  into.begin() + static_cast<std::ptrdiff_t>(from - offset));
    }
    return static_cast<std::int64_t>(into.size());
  }
  std::int64_t write_some(std::uint64_t offset, Bytes from) override {
    const std::lock_guard lock(mutex_);
    std::size_t done = 0;
    while (done < from.size()) {
      const std::uint64_t number = (offset + done) / sector_;
      const std::size_t inside = (offset + done) % sector_;
      const std::size_t count = std::min(sector_ - inside, from.size() - done);
      if (const int error = write_sector(number, inside, from.subspan(done, count)); error != 0)
        return -error;
      done += count;
    }
    return static_cast<std::int64_t>(done);
  }
  int sync() override {
    const std::lock_guard lock(mutex_);
    while (!cache_.empty()) {
      // Any order: the power may fail in between.
      auto it = cache_.begin();
      std::advance(it, static_cast<std::ptrdiff_t>(random_() % std::min<std::size_t>(cache_.size(), 8)));
      if (const int error = inner_->write(it->first * sector_, it->second); error != 0) return error;
      cache_.erase(it);
    }
    return inner_->sync();
  }
  std::optional<Range> next_written(std::uint64_t offset) override {
    const std::lock_guard lock(mutex_);
    auto found = inner_->next_written(offset);
    const auto it = cache_.lower_bound(offset / sector_);
    if (it != cache_.end() && (!found || it->first * sector_ < found->begin)) {
      found = Range{std::max(offset, it->first * sector_), (it->first + 1) * sector_};
    }
    return found;
  }
  [[nodiscard]] std::uint64_t bytes() const override { return inner_->bytes(); }
  [[nodiscard]] std::size_t alignment() const override { return inner_->alignment(); }

 private:
  int write_sector(std::uint64_t number, std::size_t inside, Bytes from) {
    Pages sector(sector_);
    const auto cached = cache_.find(number);
    if (cached != cache_.end()) {
      sector = cached->second;
    } else if (from.size() != sector_) {
      if (const int error = inner_->read(number * sector_, sector); error != 0) return error;
    }
    std::ranges::copy(from, sector.begin() + static_cast<std::ptrdiff_t>(inside));
    if (random_() % 100 < keep_percent_) {
      cache_[number] = std::move(sector);
      return 0;
    }
    cache_.erase(number);
    return inner_->write(number * sector_, sector);
  }

  std::unique_ptr<Device> inner_;
  const std::size_t sector_;
  std::mutex mutex_;
  std::mt19937_64 random_;
  const unsigned keep_percent_;
  std::map<std::uint64_t, Pages> cache_;
};

}  // namespace dfkv::test
