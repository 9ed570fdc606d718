#include "net/client_receive.h"

#include <algorithm>

namespace dfkv::client {

void SegmentCursor::start(const Input& input, std::uint32_t key) {
  segment_ = input.segments.data() + input.first_segment[key];
  end_ = input.segments.data() + input.first_segment[key + 1];
  offset_ = 0;
}

std::size_t SegmentCursor::gather(std::size_t limit, MutableBytes scratch, std::span<iovec> iov,
                                  std::size_t& bytes) const {
  std::size_t used = 0;
  std::uint64_t offset = offset_;
  bytes = 0;
  for (const Segment* at = segment_; at != end_ && used < iov.size() && bytes < limit; ++at, offset = 0) {
    const auto size = std::min<std::size_t>(at->length - offset, limit - bytes);
    if (size == 0) continue;
    void* base = at->address == 0 ? static_cast<void*>(scratch.data() + bytes)
                                  : reinterpret_cast<void*>(at->address + offset);
    iov[used++] = {base, size};
    bytes += size;
  }
  return used;
}

void SegmentCursor::advance(std::size_t bytes) {
  while (bytes > 0) {
    const auto step = std::min<std::uint64_t>(segment_->length - offset_, bytes);
    offset_ += step;
    bytes -= step;
    if (offset_ == segment_->length) {
      ++segment_;
      offset_ = 0;
    }
  }
}

GetReceiver::GetReceiver(std::shared_ptr<Operation> op, std::vector<std::uint32_t> keys,
                         ClientCounters& counters)
    : op_(std::move(op)), keys_(std::move(keys)), seen_(keys_.size()), counters_(counters) {}

bool GetReceiver::begin_fragment(const FrameHeader& header, Bytes meta) {
  last_ = header.last_of_item();
  if (!open_) {
    if (header.item >= keys_.size() || seen_[header.item]) return false;
    ReplyMeta first;
    if (decode_reply(meta, first) != MetaFault::kNone) return false;
    if (!is_done(first.status) || !first.checksum || first.length == 0) return false;
    item_ = header.item;
    seen_[item_] = true;
    open_ = true;
    length_ = first.length;
    received_ = 0;
    expected_checksum_ = *first.checksum;
    verdict_ = Status::kOk;
    if (op_) {
      const auto key = keys_[item_];
      if (length_ != op_->input.length(key)) {
        verdict_ = Status::kMissLength;
      } else {
        cursor_.start(op_->input, key);
        checksum_.reset();
      }
    }
  } else if (header.item != item_) {
    return false;
  }
  // Every fragment brings something, none more than is left, and the last one all of it.
  const std::uint64_t left = length_ - received_;
  if (header.payload_bytes == 0 || header.payload_bytes > left) return false;
  return last_ == (header.payload_bytes == left);
}

std::size_t GetReceiver::gather(std::size_t limit, MutableBytes scratch, std::span<iovec> iov,
                                std::size_t& bytes) const {
  if (wanted()) return cursor_.gather(limit, scratch, iov, bytes);
  bytes = std::min(limit, scratch.size());
  iov[0] = {scratch.data(), bytes};
  return 1;
}

void GetReceiver::advance(std::span<const iovec> iov, std::size_t bytes) {
  received_ += bytes;
  if (!wanted()) {
    bump(counters_.drained_bytes, bytes);
    return;
  }
  cursor_.advance(bytes);
  for (const auto& run : iov) {
    const auto size = std::min(run.iov_len, bytes);
    checksum_.update(as_bytes(run.iov_base, size));
    bytes -= size;
    if (bytes == 0) break;
  }
}

bool GetReceiver::end_fragment() {
  if (!last_) return true;
  if (received_ != length_) return false;
  open_ = false;
  if (!op_) return true;
  Status status = verdict_;
  if (status == Status::kOk && checksum_.digest() != expected_checksum_) status = Status::kMissCorrupt;
  if (status == Status::kMissCorrupt) bump(counters_.checksum_failures);
  if (status == Status::kMissLength) bump(counters_.length_mismatches);
  op_->end_key(keys_[item_], status);
  return true;
}

void GetReceiver::detach() { op_.reset(); }

}  // namespace dfkv::client
