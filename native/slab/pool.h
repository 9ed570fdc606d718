// Records with stable 32-bit numbers that are given out again after release. Grows in blocks, so that growing
// never moves what is there. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace dfkv {

template <typename T>
class Pool {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  // A record in its default state.
  [[nodiscard]] std::uint32_t take() {
    ++live_;
    if (!free_.empty()) {
      const std::uint32_t index = free_.back();
      free_.pop_back();
      (*this)[index] = T{};
      return index;
    }
    if (used_ % kBlock == 0) blocks_.push_back(std::make_unique<T[]>(kBlock));
    return used_++;
  }
  void give_back(std::uint32_t index) {
    free_.push_back(index);
    --live_;
  }
  [[nodiscard]] T& operator[](std::uint32_t index) { return blocks_[index / kBlock][index % kBlock]; }
  [[nodiscard]] const T& operator[](std::uint32_t index) const {
    return blocks_[index / kBlock][index % kBlock];
  }
  [[nodiscard]] std::uint32_t live() const { return live_; }
  [[nodiscard]] std::uint32_t end() const { return used_; }  // every number given out so far is below

 private:
  static constexpr std::uint32_t kBlock = 1024;
  std::vector<std::unique_ptr<T[]>> blocks_;
  std::vector<std::uint32_t> free_;
  std::uint32_t used_ = 0;
  std::uint32_t live_ = 0;
};

}  // namespace dfkv
