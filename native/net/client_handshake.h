// HELLO and AUTH from the client's side, without I/O: replies in, frames out.
#pragma once

#include <string>
#include <vector>

#include "net/client_types.h"
#include "wire/frame.h"
#include "wire/meta.h"

namespace dfkv::client {

class Handshake {
 public:
  enum class Step : std::uint8_t { kContinue, kDone, kRefused };

  // expected_node_id: empty for a seed, whose id is not known yet.
  Handshake(const Options& options, Lane lane, std::string expected_node_id);

  void start(std::vector<std::byte>& out);
  // `out` gets what is to be sent next. kRefused: error() says why; the connection is of no use.
  [[nodiscard]] Step take(const FrameHeader& header, Bytes meta, std::vector<std::byte>& out);

  [[nodiscard]] const FrameLimits& limits() const { return limits_; }  // once done
  [[nodiscard]] const HelloMeta& peer() const { return peer_; }
  [[nodiscard]] const std::string& error() const { return error_; }

 private:
  [[nodiscard]] Step refuse(std::string why);
  [[nodiscard]] Step take_hello(const FrameHeader& header, Bytes meta, std::vector<std::byte>& out);
  [[nodiscard]] Step take_auth(const FrameHeader& header, Bytes meta);

  const Options& options_;
  const std::string expected_node_id_;
  HelloMeta mine_;
  HelloMeta peer_;
  FrameLimits limits_;
  std::string error_;
  bool hello_done_ = false;
};

}  // namespace dfkv::client
