// What requests and answers in flight hold in memory, all connections together. Each has a little of its own;
// what is beyond it comes out of one budget, so that many connections cannot add up to more than the node
// has.
#pragma once

#include <atomic>
#include <cstddef>
#include <utility>

#include "net/server_options.h"

namespace dfkv::server {

// Shared by all reactors.
class RequestBudget {
 public:
  explicit RequestBudget(std::size_t limit_bytes) : limit_bytes_(limit_bytes) {}

  [[nodiscard]] bool take(std::size_t bytes) {
    if (used_bytes_.fetch_add(bytes, std::memory_order_relaxed) + bytes <= limit_bytes_) return true;
    give_back(bytes);
    return false;
  }
  void give_back(std::size_t bytes) { used_bytes_.fetch_sub(bytes, std::memory_order_relaxed); }
  [[nodiscard]] std::size_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool is_short() const { return used_bytes() > limit_bytes_ / 2; }

 private:
  const std::size_t limit_bytes_;
  std::atomic<std::size_t> used_bytes_{0};
};

// A part of a budget, given back at the end.
class BudgetShare {
 public:
  BudgetShare() = default;
  // Empty when the budget has no room.
  BudgetShare(RequestBudget& budget, std::size_t bytes) {
    if (!budget.take(bytes)) return;
    budget_ = &budget;
    bytes_ = bytes;
  }
  ~BudgetShare() {
    if (budget_ != nullptr) budget_->give_back(bytes_);
  }
  BudgetShare(BudgetShare&& other) noexcept
      : budget_(std::exchange(other.budget_, nullptr)), bytes_(other.bytes_) {}
  BudgetShare& operator=(BudgetShare&& other) noexcept {
    std::swap(budget_, other.budget_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  [[nodiscard]] bool empty() const { return budget_ == nullptr; }

 private:
  RequestBudget* budget_ = nullptr;
  std::size_t bytes_ = 0;
};

// What one connection holds. Its reactor's thread.
class HeldBytes {
 public:
  explicit HeldBytes(RequestBudget& budget) : budget_(budget) {}
  ~HeldBytes() { budget_.give_back(shared_); }
  HeldBytes(const HeldBytes&) = delete;
  HeldBytes& operator=(const HeldBytes&) = delete;

  // False: neither its own share nor the budget has room, and nothing is held.
  [[nodiscard]] bool take(std::size_t bytes) {
    const std::size_t shared = beyond_own(held_ + bytes);
    if (shared > shared_ && !budget_.take(shared - shared_)) return false;
    held_ += bytes;
    shared_ = shared;
    return true;
  }
  void give_back(std::size_t bytes) {
    held_ -= bytes;
    const std::size_t shared = beyond_own(held_);
    budget_.give_back(shared_ - shared);
    shared_ = shared;
  }
  [[nodiscard]] bool budget_is_short() const { return budget_.is_short(); }

 private:
  static std::size_t beyond_own(std::size_t bytes) { return bytes > kOwnBytes ? bytes - kOwnBytes : 0; }

  RequestBudget& budget_;
  std::size_t held_ = 0;
  std::size_t shared_ = 0;  // taken from the budget
};

}  // namespace dfkv::server
