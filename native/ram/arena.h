// The memory of the RAM tier: one private anonymous mapping, of huge pages where the kernel gives them.
#pragma once

#include <cstdint>
#include <span>

#include "ram/pages_ahead.h"
#include "wire/bytes.h"

namespace dfkv {

class Arena {
 public:
  // Maps `capacity_bytes`. Pages come with the first write, or before it: `ahead_bytes` of them are kept
  // ready behind the highest slice so far. Throws std::system_error (ENOMEM when the machine or the container
  // has less than that to give).
  explicit Arena(std::uint64_t capacity_bytes, std::uint64_t ahead_bytes = 0);
  ~Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  [[nodiscard]] MutableBytes slice(std::uint64_t offset, std::uint64_t bytes) {
    ahead_.reach(offset + bytes);
    return mapping_.memory().subspan(offset, bytes);
  }
  [[nodiscard]] std::uint64_t capacity_bytes() const { return mapping_.memory().size(); }
  // How much of it, from the start, was made ready ahead of its use.
  [[nodiscard]] std::uint64_t ready_bytes() const { return ahead_.ready_bytes(); }

 private:
  class Mapping {
   public:
    explicit Mapping(std::uint64_t bytes);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    [[nodiscard]] MutableBytes memory() const { return memory_; }

   private:
    MutableBytes whole_;
    MutableBytes memory_;
  };

  Mapping mapping_;
  PagesAhead ahead_;  // ends before the mapping does
};

// What could be used now: free memory of the machine and of each control group around this process, whichever
// is less. 0: not known.
[[nodiscard]] std::uint64_t available_memory_bytes();

}  // namespace dfkv
