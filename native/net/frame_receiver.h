// Reads frames from a socket and hands them on piece by piece: header, meta, payload. Payload is received
// straight into the memory that the sink names.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "net/receive_mark.h"
#include "wire/frame.h"

namespace dfkv::server {

// Every method returns false to stop: nothing more is read then.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  // The header is well formed and within the limits.
  [[nodiscard]] virtual bool on_header(const FrameHeader& header) = 0;
  // All of the meta is there; it is valid during the call.
  [[nodiscard]] virtual bool on_meta(const FrameHeader& header, Bytes meta) = 0;
  // There is no place for the payload yet: nothing is read until run() is called after there is one.
  [[nodiscard]] virtual bool payload_waits() const = 0;
  // Where the next bytes of the payload go; not empty. At most `left` bytes are written.
  [[nodiscard]] virtual MutableBytes payload_space(std::size_t left) = 0;
  // So many bytes were written there. copied: they came through the read-ahead buffer.
  [[nodiscard]] virtual bool on_payload(MutableBytes written, bool copied) = 0;
  [[nodiscard]] virtual bool on_frame_end(const FrameHeader& header) = 0;
  // The header breaks the format.
  virtual void on_fault(FrameFault fault) = 0;
};

enum class ReceiveResult : std::uint8_t {
  kDrained,  // the socket has nothing more
  kWaiting,  // the payload that comes next has no place yet
  kBudget,   // there may be more
  kEnded,    // the peer closed, or the connection broke
  kStopped,  // the sink said so
};

class FrameReceiver {
 public:
  FrameReceiver(int fd, FrameSink& sink) : fd_(fd), sink_(sink) {}

  // Reads up to about `budget` bytes.
  [[nodiscard]] ReceiveResult run(std::size_t budget);

  void set_limits(const FrameLimits& limits) { limits_ = limits; }
  // Connections with small requests read several of them at once; where payload is large, headers are read
  // exactly, so that no payload has to be copied out of the buffer.
  void set_read_ahead(std::size_t bytes);
  [[nodiscard]] bool in_frame() const { return state_ != State::kHeader || have_ != 0; }
  // Bytes may have come that no event has told of.
  [[nodiscard]] bool may_have_more() const { return mark_.may_hide_bytes(); }
  [[nodiscard]] std::uint64_t bytes_received() const { return bytes_received_; }

 private:
  enum class State : std::uint8_t { kHeader, kMeta, kPayload };
  enum class Pull : std::uint8_t { kData, kBlocked, kEnded };

  [[nodiscard]] ReceiveResult read(std::size_t budget);
  [[nodiscard]] Pull pull(MutableBytes into, std::size_t& got, bool& copied);
  [[nodiscard]] Pull receive(MutableBytes into, std::size_t& got);
  [[nodiscard]] bool advance(std::size_t got, bool copied, MutableBytes into);
  [[nodiscard]] bool header_complete();
  [[nodiscard]] bool meta_complete();
  [[nodiscard]] bool frame_complete();

  const int fd_;
  ReceiveMark mark_;
  FrameSink& sink_;
  FrameLimits limits_;
  State state_ = State::kHeader;
  FrameHeader header_;
  std::array<std::byte, kFrameHeaderBytes> raw_header_{};
  std::vector<std::byte> meta_;
  std::size_t have_ = 0;  // bytes of the header, meta or payload so far
  std::vector<std::byte> ahead_;
  std::size_t ahead_begin_ = 0;
  std::size_t ahead_end_ = 0;
  std::uint64_t bytes_received_ = 0;
};

}  // namespace dfkv::server
