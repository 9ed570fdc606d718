#include "ram/pages_ahead.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace dfkv {

namespace {
// One call to the kernel: a huge page. Longer ones would keep other changes of the address space waiting.
constexpr std::uint64_t kStepBytes = 2 << 20;
constexpr std::uint64_t kGrainBytes = 64 << 10;  // whole pages on every machine
// The thread wakes for this much, or a quarter of what is kept ahead, and not for every slot.
constexpr std::uint64_t kBatchBytes = 16 << 20;
// Payload that has come goes before payload that may. Not lower: the thread holds a lock of the address space
// in the kernel, and must not be kept from giving it back.
constexpr int kNice = 5;
// While there is enough, payload that comes has the machine to itself: the next pages wait for so long a
// pause.
constexpr std::chrono::milliseconds kPause(10);
}  // namespace

PagesAhead::PagesAhead(MutableBytes memory, std::uint64_t ahead_bytes)
    : memory_(memory),
      ahead_bytes_(std::min<std::uint64_t>(ahead_bytes, memory.size()) / kGrainBytes * kGrainBytes) {
  if (ahead_bytes_ == 0) return;
  thread_ = std::thread([this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), "dfkv-pages");
}

PagesAhead::~PagesAhead() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  news_.notify_one();
  thread_.join();
}

std::uint64_t PagesAhead::wanted() const {
  const std::uint64_t end = reached_.load() + ahead_bytes_;
  return std::min<std::uint64_t>(memory_.size(), end / kGrainBytes * kGrainBytes);
}

void PagesAhead::wake() {
  // Taken and given back: the thread either has yet to look at `reached_`, or waits.
  { const std::lock_guard lock(mutex_); }
  news_.notify_one();
}

bool PagesAhead::low(std::uint64_t ready) const { return ready < reached_.load() + ahead_bytes_ / 4; }

// Waits until there is a batch to make ready, and then for a pause in the use, as long as there is enough.
bool PagesAhead::wait_for_work(std::uint64_t ready) {
  std::unique_lock lock(mutex_);
  const std::uint64_t batch = std::clamp<std::uint64_t>(ahead_bytes_ / 4, kGrainBytes, kBatchBytes);
  const std::uint64_t next = std::min<std::uint64_t>(memory_.size(), ready + batch);
  if (ready >= ahead_bytes_) {
    wake_at_.store(next - ahead_bytes_);
    news_.wait(lock, [&] { return ending_.load() || wanted() >= next; });
    wake_at_.store(kNever);
  }
  std::uint64_t before = kNever;
  for (std::uint64_t now = reached_.load(); now != before && !low(ready); now = reached_.load()) {
    before = now;
    if (news_.wait_for(lock, kPause, [&] { return ending_.load(); })) break;
  }
  return !ending_.load();
}

void PagesAhead::run() {
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kNice);
  std::uint64_t ready = 0;
  while (ready < memory_.size() && wait_for_work(ready)) {
    const std::uint64_t at = reached_.load();
    for (std::uint64_t until = wanted(); ready < until && (low(ready) || reached_.load() == at);
         until = wanted()) {
      const std::uint64_t step = std::min(kStepBytes, until - ready);
      // A kernel before 5.14 does not know the call, and one without memory refuses it: pages then come with
      // the first write.
      if (::madvise(memory_.data() + ready, step, MADV_POPULATE_WRITE) != 0) return;
      ready += step;
      ready_.store(ready);
      if (ending_.load()) return;
    }
  }
}

}  // namespace dfkv
