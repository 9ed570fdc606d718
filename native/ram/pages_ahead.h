// Pages of a mapping made ready before they are written to for the first time.
//
// The first write to a page of a fresh mapping costs more than the copy into it: the kernel is entered, a
// page is found, zeroed and mapped. A thread that receives payload would pay for it. This thread does, for a
// bounded stretch behind the highest byte in use, and no further.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "wire/bytes.h"

namespace dfkv {

class PagesAhead {
 public:
  // Makes up to `ahead_bytes` ready, at once and whenever the use grows. 0: no thread, nothing is made ready.
  // `memory` starts on a page and outlives this. Throws std::system_error when there is no thread left.
  PagesAhead(MutableBytes memory, std::uint64_t ahead_bytes);
  ~PagesAhead();
  PagesAhead(const PagesAhead&) = delete;
  PagesAhead& operator=(const PagesAhead&) = delete;

  // Bytes up to `end` are about to be used. Any thread.
  void reach(std::uint64_t end) {
    std::uint64_t before = reached_.load();
    while (end > before) {
      if (!reached_.compare_exchange_weak(before, end)) continue;
      if (end >= wake_at_.load()) wake();
      return;
    }
  }

  // How far the pages are ready. Any thread.
  [[nodiscard]] std::uint64_t ready_bytes() const { return ready_.load(); }

 private:
  void run();
  [[nodiscard]] bool wait_for_work(std::uint64_t ready);
  [[nodiscard]] bool low(std::uint64_t ready) const;
  void wake();
  [[nodiscard]] std::uint64_t wanted() const;

  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

  const MutableBytes memory_;
  const std::uint64_t ahead_bytes_;
  std::atomic<std::uint64_t> reached_{0};
  std::atomic<std::uint64_t> wake_at_{kNever};  // use up to there is news to the thread
  std::atomic<std::uint64_t> ready_{0};
  std::mutex mutex_;
  std::condition_variable news_;
  std::atomic<bool> ending_{false};
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace dfkv
