#include "net/client_send.h"

#include <algorithm>
#include <array>

#include "net/client_request.h"

namespace dfkv::client {

namespace {

constexpr std::size_t kFillerBytes = 64 * 1024;
constexpr std::size_t kWithdrawalsPerFrame = 256;

const std::array<std::byte, kFillerBytes>& filler() {
  static const std::array<std::byte, kFillerBytes> zeros{};
  return zeros;
}

}  // namespace

PutSender::PutSender(std::shared_ptr<Operation> op, std::vector<std::uint32_t> keys, std::uint64_t request_id,
                     std::vector<std::byte> first_frame, std::uint32_t max_fragment_bytes)
    : op_(std::move(op)),
      keys_(std::move(keys)),
      request_id_(request_id),
      max_fragment_bytes_(max_fragment_bytes),
      head_(std::move(first_frame)) {}

void PutSender::hash_fragment(std::size_t bytes) {
  SegmentCursor cursor = cursor_;
  std::array<iovec, 64> iov;
  while (bytes > 0) {
    std::size_t found = 0;
    const auto runs = cursor.gather(bytes, {}, iov, found);
    for (std::size_t i = 0; i < runs; ++i) checksum_.update(as_bytes(iov[i].iov_base, iov[i].iov_len));
    cursor.advance(found);
    bytes -= found;
  }
}

void PutSender::next_fragment() {
  const std::uint64_t length = op_->input.length(keys_[item_]);
  if (item_sent_ == 0) {
    cursor_.start(op_->input, keys_[item_]);
    checksum_.reset();
  }
  const auto size =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(length - item_sent_, max_fragment_bytes_));
  hash_fragment(size);
  item_sent_ += size;

  FrameHeader header;
  header.opcode = static_cast<std::uint8_t>(Opcode::kPut);
  header.request_id = request_id_;
  header.item = item_;
  header.payload_bytes = size;
  std::vector<std::byte> meta;
  if (item_sent_ == length) {
    header.flags = kFlagLastOfItem;
    if (item_ + 1 == keys_.size()) header.flags |= kFlagEndOfRequest;
    RequestMeta last;
    last.checksum = checksum_.digest();
    encode_request(last, meta);
    ++item_;
    item_sent_ = 0;
  }
  header.meta_bytes = static_cast<std::uint32_t>(meta.size());
  head_.resize(kFrameHeaderBytes);
  encode_frame_header(header, std::span<std::byte, kFrameHeaderBytes>(head_.data(), kFrameHeaderBytes));
  head_.insert(head_.end(), meta.begin(), meta.end());
  payload_left_ = size;
}

void PutSender::next_withdrawals() {
  RequestMeta aborted;
  aborted.aborted = true;
  std::vector<std::byte> meta;
  encode_request(aborted, meta);
  head_.clear();
  for (std::size_t n = 0; n < kWithdrawalsPerFrame && item_ < keys_.size(); ++n, ++item_) {
    FrameHeader header;
    header.opcode = static_cast<std::uint8_t>(Opcode::kPut);
    header.request_id = request_id_;
    header.item = item_;
    header.flags = kFlagLastOfItem;
    if (item_ + 1 == keys_.size()) header.flags |= kFlagEndOfRequest;
    header.meta_bytes = static_cast<std::uint32_t>(meta.size());
    append_frame(header, meta, {}, head_);
  }
}

void PutSender::next_frame() {
  head_sent_ = 0;
  if (op_) {
    next_fragment();
  } else {
    next_withdrawals();
  }
}

std::size_t PutSender::gather(std::span<iovec> iov) {
  if (frame_sent()) {
    if (finished()) return 0;
    next_frame();
  }
  started_ = true;
  std::size_t used = 0;
  if (head_sent_ < head_.size()) iov[used++] = {head_.data() + head_sent_, head_.size() - head_sent_};
  if (payload_left_ == 0) return used;
  if (op_) {
    std::size_t bytes = 0;
    used += cursor_.gather(std::min<std::size_t>(payload_left_, kPieceBytes), {}, iov.subspan(used), bytes);
  } else {
    const auto size = std::min<std::size_t>(payload_left_, kFillerBytes);
    iov[used++] = {const_cast<std::byte*>(filler().data()), size};
  }
  return used;
}

void PutSender::advance(std::size_t bytes) {
  const auto head = std::min(bytes, head_.size() - head_sent_);
  head_sent_ += head;
  bytes -= head;
  payload_left_ -= static_cast<std::uint32_t>(bytes);
  if (op_) cursor_.advance(bytes);
}

void PutSender::withdraw() { op_.reset(); }

}  // namespace dfkv::client
