// How much must have come before the kernel wakes a reader (SO_RCVLOWAT). Large payload arrives in segments
// of 64 KiB and less; waking a sleeping thread for each of them costs the side that sends more than the copy
// does.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <cstddef>

namespace dfkv {

class ReceiveMark {
 public:
  // `left`: bytes that are sure to come before anything else is to be done; 1: whatever comes is wanted at
  // once. What has come already may lie in the socket, unannounced: who judges by silence reads first.
  void set(int fd, std::size_t left) {
    const int bytes = static_cast<int>(std::clamp<std::size_t>(left, 1, kMostBytes));
    if (bytes == bytes_) return;
    bytes_ = bytes;
    // A kernel that refuses wakes more often, and that is all.
    ::setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
  }
  [[nodiscard]] bool may_hide_bytes() const { return bytes_ > 1; }

 private:
  // As much as is received and hashed in one go: with more, sender and receiver take turns instead of working
  // side by side.
  static constexpr std::size_t kMostBytes = 256 * 1024;
  int bytes_ = 1;
};

}  // namespace dfkv
