// What a connection has to send, in order: small frames that it owns, and payload that stays in pinned slots
// until the kernel has taken it.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "slab/recycled.h"
#include "slab/store.h"
#include "wire/bytes.h"

namespace dfkv::server {

enum class SendResult : std::uint8_t { kDrained, kBlocked, kBudget, kBroken };

class OutputQueue {
 public:
  // A whole frame.
  void push(std::vector<std::byte> frame);
  // A frame whose payload is sent from where it lies. request and item name it for drop_unsent().
  void push_payload(Bytes head, Bytes payload, std::shared_ptr<ReadPin> pin, std::uint64_t request,
                    std::uint32_t item);
  // Sends up to about `budget` bytes.
  [[nodiscard]] SendResult flush(int fd, std::size_t budget);
  // Drops the payload frames of a request of which nothing was sent yet. Calls dropped(item) for each.
  template <typename Dropped>
  void drop_unsent(std::uint64_t request, Dropped&& dropped) {
    for (std::size_t i = sent_ != 0 ? 1 : 0; i < segments_.size();) {
      if (!segments_[i].pin || segments_[i].request != request) {
        ++i;
        continue;
      }
      bytes_ -= segments_[i].size();
      dropped(segments_[i].item);
      segments_.erase(segments_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  void clear();

  [[nodiscard]] bool empty() const { return segments_.empty(); }
  [[nodiscard]] std::size_t frames() const { return segments_.size(); }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }  // not sent yet
  [[nodiscard]] std::size_t owned_bytes() const {
    return owned_bytes_;
  }  // of frames that hold memory of their own
  [[nodiscard]] std::uint64_t bytes_sent() const { return bytes_sent_; }
  [[nodiscard]] std::uint64_t payload_bytes_sent() const { return payload_bytes_sent_; }

 private:
  static constexpr std::size_t kInlineHeadBytes = 96;  // a header and the meta of a GET item

  struct Segment {
    std::array<std::byte, kInlineHeadBytes> inline_head;
    std::size_t inline_bytes = 0;
    std::vector<std::byte> owned;
    Bytes payload;
    std::shared_ptr<ReadPin> pin;
    std::uint64_t request = 0;
    std::uint32_t item = 0;

    [[nodiscard]] Bytes head() const {
      return owned.empty() ? Bytes(inline_head).first(inline_bytes) : Bytes(owned);
    }
    [[nodiscard]] std::size_t size() const { return head().size() + payload.size(); }
  };

  [[nodiscard]] std::size_t gather(std::array<iovec, 64>& out, std::size_t budget) const;
  void consume(std::size_t count);

  RecycledDeque<Segment> segments_;
  std::size_t sent_ = 0;  // of the first segment
  std::size_t bytes_ = 0;
  std::size_t owned_bytes_ = 0;
  std::uint64_t bytes_sent_ = 0;
  std::uint64_t payload_bytes_sent_ = 0;
};

}  // namespace dfkv::server
