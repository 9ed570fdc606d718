#include "net/frame_receiver.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace dfkv::server {

namespace {
constexpr std::size_t kKeptMetaBytes =
    4096;  // a larger buffer is given back after use: most connections are idle
}  // namespace

void FrameReceiver::set_read_ahead(std::size_t bytes) {
  if (ahead_begin_ == ahead_end_) ahead_.resize(bytes);
}

ReceiveResult FrameReceiver::run(std::size_t budget) {
  const ReceiveResult result = read(budget);
  // Whoever waits for an event next, also with bytes left behind: fewer than an old mark would never be told
  // of.
  if (result == ReceiveResult::kDrained || result == ReceiveResult::kBudget)
    mark_.set(fd_, state_ == State::kPayload ? header_.payload_bytes - have_ : 1);
  return result;
}

ReceiveResult FrameReceiver::read(std::size_t budget) {
  const std::uint64_t stop_at = bytes_received_ + budget;
  while (true) {
    MutableBytes into;
    switch (state_) {
      case State::kHeader:
        into = MutableBytes(raw_header_).subspan(have_);
        break;
      case State::kMeta:
        into = MutableBytes(meta_).subspan(have_);
        break;
      case State::kPayload:
        if (sink_.payload_waits()) return ReceiveResult::kWaiting;
        const std::size_t left = header_.payload_bytes - have_;
        into = sink_.payload_space(left);
        into = into.first(std::min(into.size(), left));
        break;
    }
    std::size_t got = 0;
    bool copied = false;
    switch (pull(into, got, copied)) {
      case Pull::kBlocked:
        return ReceiveResult::kDrained;
      case Pull::kEnded:
        return ReceiveResult::kEnded;
      case Pull::kData:
        break;
    }
    if (!advance(got, copied, into)) return ReceiveResult::kStopped;
    // Whatever is in the read-ahead buffer is handled now: no event would announce it.
    if (bytes_received_ >= stop_at && ahead_begin_ == ahead_end_) return ReceiveResult::kBudget;
  }
}

FrameReceiver::Pull FrameReceiver::pull(MutableBytes into, std::size_t& got, bool& copied) {
  if (ahead_begin_ == ahead_end_) {
    if (state_ == State::kPayload || into.size() >= ahead_.size()) return receive(into, got);
    std::size_t filled = 0;
    const Pull result = receive(ahead_, filled);
    if (result != Pull::kData) return result;
    ahead_begin_ = 0;
    ahead_end_ = filled;
  }
  got = std::min(into.size(), ahead_end_ - ahead_begin_);
  std::copy_n(ahead_.begin() + static_cast<std::ptrdiff_t>(ahead_begin_), got, into.begin());
  ahead_begin_ += got;
  copied = true;
  return Pull::kData;
}

FrameReceiver::Pull FrameReceiver::receive(MutableBytes into, std::size_t& got) {
  while (true) {
    const ssize_t count = ::recv(fd_, into.data(), into.size(), 0);
    if (count > 0) {
      got = static_cast<std::size_t>(count);
      bytes_received_ += got;
      return Pull::kData;
    }
    if (count == 0) return Pull::kEnded;
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == EWOULDBLOCK ? Pull::kBlocked : Pull::kEnded;
  }
}

bool FrameReceiver::advance(std::size_t got, bool copied, MutableBytes into) {
  have_ += got;
  switch (state_) {
    case State::kHeader:
      return have_ < kFrameHeaderBytes || header_complete();
    case State::kMeta:
      return have_ < meta_.size() || meta_complete();
    case State::kPayload:
      break;
  }
  if (!sink_.on_payload(into.first(got), copied)) return false;
  return have_ < header_.payload_bytes || frame_complete();
}

bool FrameReceiver::header_complete() {
  const FrameFault fault = decode_frame_header(raw_header_, limits_, header_);
  if (fault != FrameFault::kNone) {
    sink_.on_fault(fault);
    return false;
  }
  if (!sink_.on_header(header_)) return false;
  have_ = 0;
  state_ = State::kMeta;
  meta_.resize(header_.meta_bytes);
  return header_.meta_bytes != 0 || meta_complete();
}

bool FrameReceiver::meta_complete() {
  const bool go_on = sink_.on_meta(header_, meta_);
  if (meta_.capacity() > kKeptMetaBytes) meta_ = {};
  if (!go_on) return false;
  have_ = 0;
  state_ = State::kPayload;
  return header_.payload_bytes != 0 || frame_complete();
}

bool FrameReceiver::frame_complete() {
  have_ = 0;
  state_ = State::kHeader;
  return sink_.on_frame_end(header_);
}

}  // namespace dfkv::server
