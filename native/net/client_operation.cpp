#include "net/client_operation.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "net/client_core.h"

namespace dfkv::client {

CompletionQueue::CompletionQueue() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) throw std::system_error(errno, std::generic_category(), "eventfd");
}

void CompletionQueue::push(std::uint64_t token) {
  {
    const std::lock_guard lock(mutex_);
    tokens_.push_back(token);
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto sent = ::write(event_.get(), &one, sizeof one);
  }
  changed_.notify_one();
}

void CompletionQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

std::vector<std::uint64_t> CompletionQueue::take(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  if (tokens_.empty() && !closed_ && timeout.count() > 0) {
    changed_.wait_until(lock, Clock::now() + timeout, [this] { return !tokens_.empty() || closed_; });
  }
  // Under the lock, like the write in push(): the descriptor is readable exactly while there are tokens.
  std::uint64_t count = 0;
  [[maybe_unused]] const auto got = ::read(event_.get(), &count, sizeof count);
  std::vector<std::uint64_t> taken(tokens_.begin(), tokens_.end());
  tokens_.clear();
  return taken;
}

namespace {
[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }
}  // namespace

void Input::validate() {
  if (!is_keyed(kind)) return;
  if (table.size() != count * entry_bytes()) {
    refuse("the table has " + std::to_string(table.size()) + " bytes; entries are " +
           std::to_string(entry_bytes()) + " bytes each");
  }
  if (kind == Kind::kExists) {
    if (parts.empty()) refuse("exists needs at least one required part");
    if (parts.size() > kMaxPartsPerRequest) {
      refuse(std::to_string(parts.size()) + " required parts; at most " +
             std::to_string(kMaxPartsPerRequest));
    }
    return;
  }
  if (!parts.empty()) refuse("required parts belong to exists alone");
  if (kind == Kind::kRemove) return;
  if (first_segment.size() != std::size_t{count} + 1 || first_segment.back() != segments.size()) {
    refuse("the counts name " + std::to_string(first_segment.empty() ? 0 : first_segment.back()) +
           " segments of " + std::to_string(first_segment.empty() ? 0 : first_segment.size() - 1) +
           " items; there are " + std::to_string(segments.size()) + " segments and " + std::to_string(count) +
           " items");
  }
  payload_bytes = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    std::uint64_t total = 0;
    for (auto s = first_segment[i]; s < first_segment[i + 1]; ++s) {
      if (segments[s].length > UINT32_MAX)
        refuse("a segment of item " + std::to_string(i) + " is over 4 GiB");
      total += segments[s].length;
      if (kind == Kind::kPut && segments[s].address == 0 && segments[s].length != 0) {
        refuse("item " + std::to_string(i) + " to put has a segment at address 0");
      }
    }
    const std::uint32_t asked = length(i);
    if (total == 0 || total > UINT32_MAX) {
      refuse("item " + std::to_string(i) + " has " + std::to_string(total) +
             " bytes of segments; an object has 1 byte to 4 GiB");
    }
    if (asked == 0 && kind == Kind::kGet) {
      store_le(table.data() + i * kItemRefBytes + 32, static_cast<std::uint32_t>(total));
    } else if (asked != total) {
      refuse("item " + std::to_string(i) + " has length " + std::to_string(asked) + " and " +
             std::to_string(total) + " bytes of segments");
    }
    payload_bytes += total;
  }
}

Operation::Operation(Input what, Clock::time_point when, std::weak_ptr<Core> core)
    : input(std::move(what)), deadline(when), core_(std::move(core)), started_(Clock::now()) {
  if (is_keyed(input.kind)) statuses_.assign(input.count, kPending);
}

bool Operation::wait(std::chrono::nanoseconds timeout) const {
  if (done()) return true;
  const auto until = Clock::now() + timeout;
  if (timeout.count() > 0 && lane_of(kind()) == Lane::kControl) {
    if (const auto core = core_.lock()) core->help(*this, until);
  }
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, until, [this] { return done(); });
}

void Operation::cancel(const std::shared_ptr<Operation>& operation) {
  if (operation->done()) return;
  if (const auto core = operation->core_.lock()) core->cancel(operation);
  // The I/O thread never blocks: this takes as long as what it is doing now.
  std::unique_lock lock(operation->mutex_);
  operation->changed_.wait(lock, [&] { return operation->done(); });
}

void Operation::watch(std::shared_ptr<CompletionQueue> queue, std::uint64_t token) {
  {
    const std::lock_guard lock(mutex_);
    if (!done()) {
      watchers_.emplace_back(std::move(queue), token);
      return;
    }
  }
  queue->push(token);
}

std::uint32_t Operation::prefix() const {
  std::uint32_t count = 0;
  while (count < statuses_.size() && is_done(static_cast<Status>(statuses_[count]))) ++count;
  return count;
}

void Operation::begin(std::uint32_t keys, std::uint64_t view_revision) {
  statuses_.assign(keys, kPending);
  view_revision_ = view_revision;
}

void Operation::expect_another(std::uint32_t key) {
  if (more_answers_.empty()) {
    more_answers_.assign(statuses_.size(), 0);
    best_.assign(statuses_.size(), kPending);
  }
  ++more_answers_[key];
}

void Operation::end_key(std::uint32_t key, Status status) {
  auto value = static_cast<std::uint16_t>(status);
  if (value == kPending) value = static_cast<std::uint16_t>(Status::kRefusedBadRequest);
  if (key_ended(key)) return;
  if (!more_answers_.empty()) {
    if (best_[key] == kPending || is_done(status)) best_[key] = value;
    if (more_answers_[key] > 0) {
      --more_answers_[key];
      return;
    }
    value = best_[key];
  }
  statuses_[key] = value;
  const bool payload = input.kind == Kind::kGet || input.kind == Kind::kPut;
  if (payload && is_done(static_cast<Status>(value))) payload_bytes_ += input.length(key);
}

void Operation::end_all(Status status) {
  more_answers_.clear();
  for (std::uint32_t key = 0; key < statuses_.size(); ++key) end_key(key, status);
}

void Operation::finish() {
  elapsed_us_ = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - started_).count());
  requests.clear();
  std::vector<std::pair<std::shared_ptr<CompletionQueue>, std::uint64_t>> watchers;
  {
    const std::lock_guard lock(mutex_);
    watchers.swap(watchers_);
    done_.store(true, std::memory_order_release);
    // Under the lock: a waiter may destroy this as soon as it can take it.
    changed_.notify_all();
  }
  for (const auto& [queue, token] : watchers) queue->push(token);
}

}  // namespace dfkv::client
