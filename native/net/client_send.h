// The send path of one PUT request: frames whose payload leaves straight from the caller's memory. I/O thread
// only.
#pragma once

#include <sys/uio.h>

#include <memory>
#include <span>
#include <vector>

#include "net/client_operation.h"
#include "net/client_receive.h"
#include "wire/checksum.h"

namespace dfkv::client {

class PutSender {
 public:
  // `first_frame` is the request frame with the table. Fragments are at most max_fragment_bytes.
  PutSender(std::shared_ptr<Operation> op, std::vector<std::uint32_t> keys, std::uint64_t request_id,
            std::vector<std::byte> first_frame, std::uint32_t max_fragment_bytes);

  // The next bytes to send, at most about kPieceBytes of them. 0: everything has been sent.
  std::size_t gather(std::span<iovec> iov);
  void advance(std::size_t bytes);
  // Frames of other requests may go between frames, not into one.
  [[nodiscard]] bool mid_frame() const { return started_ && !frame_sent(); }
  [[nodiscard]] bool started() const { return started_; }
  [[nodiscard]] bool finished() const { return frame_sent() && item_ == keys_.size(); }

  // Forgets the caller's memory. A fragment that is half sent is completed with filler, which its checksum or
  // the withdrawal after it makes void; what is left of the batch is withdrawn.
  void withdraw();

 private:
  [[nodiscard]] bool frame_sent() const { return head_sent_ == head_.size() && payload_left_ == 0; }
  void next_frame();
  void next_fragment();
  void next_withdrawals();
  void hash_fragment(std::size_t bytes);

  std::shared_ptr<Operation> op_;  // null: withdrawn
  std::vector<std::uint32_t> keys_;
  std::uint64_t request_id_;
  std::uint32_t max_fragment_bytes_;

  std::vector<std::byte> head_;  // header and meta of the current frame, or whole frames
  std::size_t head_sent_ = 0;
  std::uint32_t payload_left_ = 0;
  bool started_ = false;

  std::uint32_t item_ = 0;       // being sent; keys_.size() when all are
  std::uint64_t item_sent_ = 0;  // bytes of it in frames begun so far
  SegmentCursor cursor_;         // what has been sent
  StreamingChecksum checksum_;
};

}  // namespace dfkv::client
