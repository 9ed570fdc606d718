// The receive path of one GET request: payload goes straight into the caller's segments and is verified as it
// comes. I/O thread only.
#pragma once

#include <sys/uio.h>

#include <memory>
#include <span>
#include <vector>

#include "net/client_counters.h"
#include "net/client_operation.h"
#include "wire/checksum.h"
#include "wire/frame.h"
#include "wire/meta.h"

namespace dfkv::client {

// A position in an item's segments.
class SegmentCursor {
 public:
  void start(const Input& input, std::uint32_t key);
  // The next runs, at most `limit` bytes and `iov.size()` of them. Segments at address 0 go to `scratch`,
  // which must hold `limit` bytes (PUT has none). Returns the number of runs; `bytes` gets their sum.
  std::size_t gather(std::size_t limit, MutableBytes scratch, std::span<iovec> iov, std::size_t& bytes) const;
  void advance(std::size_t bytes);

 private:
  const Segment* segment_ = nullptr;
  const Segment* end_ = nullptr;
  std::uint64_t offset_ = 0;
};

class GetReceiver {
 public:
  GetReceiver(std::shared_ptr<Operation> op, std::vector<std::uint32_t> keys, ClientCounters& counters);

  // False: the frame cannot follow what came before; the connection is beyond repair.
  [[nodiscard]] bool begin_fragment(const FrameHeader& header, Bytes meta);
  // Where the next bytes of the fragment go.
  std::size_t gather(std::size_t limit, MutableBytes scratch, std::span<iovec> iov, std::size_t& bytes) const;
  // The bytes at `iov` have been received, `bytes` of them.
  void advance(std::span<const iovec> iov, std::size_t bytes);
  [[nodiscard]] bool end_fragment();  // false: as above

  // Forgets the caller's memory; the rest is framing only.
  void detach();

 private:
  [[nodiscard]] bool wanted() const { return op_ != nullptr && verdict_ == Status::kOk; }

  std::shared_ptr<Operation> op_;
  std::vector<std::uint32_t> keys_;
  std::vector<bool> seen_;
  ClientCounters& counters_;

  bool open_ = false;  // an item has begun and not ended
  bool last_ = false;  // the current fragment is its last
  std::uint32_t item_ = 0;
  Status verdict_ = Status::kOk;  // kMissLength: its payload is thrown away
  std::uint64_t length_ = 0;
  std::uint64_t received_ = 0;
  std::uint64_t expected_checksum_ = 0;
  StreamingChecksum checksum_;
  SegmentCursor cursor_;
};

}  // namespace dfkv::client
