#include "net/output_queue.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "net/server_options.h"

namespace dfkv::server {

void OutputQueue::push(std::vector<std::byte> frame) {
  bytes_ += frame.size();
  owned_bytes_ += frame.size();
  segments_.emplace_back().owned = std::move(frame);
}

void OutputQueue::push_payload(Bytes head, Bytes payload, std::shared_ptr<ReadPin> pin, std::uint64_t request,
                               std::uint32_t item) {
  Segment& segment = segments_.emplace_back();
  if (head.size() <= kInlineHeadBytes) {
    std::ranges::copy(head, segment.inline_head.begin());
    segment.inline_bytes = head.size();
  } else {
    segment.owned.assign(head.begin(), head.end());
    owned_bytes_ += head.size();
  }
  segment.payload = payload;
  segment.pin = std::move(pin);
  segment.request = request;
  segment.item = item;
  bytes_ += segment.size();
}

SendResult OutputQueue::flush(int fd, std::size_t budget) {
  const std::uint64_t stop_at = bytes_sent_ + budget;
  while (!segments_.empty()) {
    if (bytes_sent_ >= stop_at) return SendResult::kBudget;
    std::array<iovec, 64> pieces;
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = gather(pieces, std::min<std::size_t>(stop_at - bytes_sent_, kSendPieceBytes));
    const ssize_t count = ::sendmsg(fd, &message, MSG_NOSIGNAL);
    if (count >= 0) {
      consume(static_cast<std::size_t>(count));
      continue;
    }
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == EWOULDBLOCK ? SendResult::kBlocked : SendResult::kBroken;
  }
  return SendResult::kDrained;
}

std::size_t OutputQueue::gather(std::array<iovec, 64>& out, std::size_t budget) const {
  std::size_t count = 0;
  std::size_t skip = sent_;
  std::size_t gathered = 0;
  for (const Segment& segment : segments_) {
    for (Bytes piece : {segment.head(), segment.payload}) {
      const std::size_t skipped = std::min(skip, piece.size());
      skip -= skipped;
      piece = piece.subspan(skipped);
      piece = piece.first(std::min(piece.size(), budget - gathered));
      if (piece.empty()) continue;
      // iovec is shared with readv and therefore not const; sendmsg only reads.
      out[count++] = {const_cast<std::byte*>(piece.data()), piece.size()};
      gathered += piece.size();
      if (count == out.size() || gathered >= budget) return count;
    }
  }
  return count;
}

void OutputQueue::consume(std::size_t count) {
  bytes_sent_ += count;
  bytes_ -= count;
  while (count > 0) {
    Segment& segment = segments_.front();
    const std::size_t head = segment.head().size();
    const std::size_t left = segment.size() - sent_;
    const std::size_t step = std::min(count, left);
    const std::size_t after = sent_ + step;
    payload_bytes_sent_ += std::max(after, head) - std::max(sent_, head);
    sent_ = after;
    count -= step;
    if (step < left) return;
    owned_bytes_ -= segment.owned.size();
    segments_.pop_front();
    sent_ = 0;
  }
}

void OutputQueue::clear() {
  segments_.clear();
  sent_ = bytes_ = owned_bytes_ = 0;
}

}  // namespace dfkv::server
