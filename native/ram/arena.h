// The memory of the RAM tier: one anonymous memory file, mapped once.
#pragma once

#include <cstdint>
#include <span>

#include "net/fd.h"
#include "wire/bytes.h"

namespace dfkv {

class Arena {
 public:
  // Maps `capacity_bytes` without touching the pages: they come with the first write. Throws
  // std::system_error (ENOMEM when the machine or the container has less than that to give).
  explicit Arena(std::uint64_t capacity_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  [[nodiscard]] MutableBytes slice(std::uint64_t offset, std::uint64_t bytes) const {
    return memory_.subspan(offset, bytes);
  }
  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] std::uint64_t capacity_bytes() const { return memory_.size(); }

 private:
  Fd fd_;
  MutableBytes memory_;
};

// What could be used now: free memory of the machine and of each control group around this process, whichever
// is less. 0: not known.
[[nodiscard]] std::uint64_t available_memory_bytes();

}  // namespace dfkv
