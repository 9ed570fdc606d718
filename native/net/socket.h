// TCP sockets of the server: listening and accepting. Everything is non-blocking and close-on-exec.
#pragma once

#include <cstdint>
#include <string>

#include "net/fd.h"

namespace dfkv {

struct Listener {
  Fd fd;
  std::uint16_t port = 0;
  bool loopback = false;  // reachable from this machine only
};

// Binds and listens; port 0 takes a free one. Throws std::system_error with the address and the reason. With
// `require_loopback` an address that other machines can reach throws std::invalid_argument before anything is
// bound.
[[nodiscard]] Listener listen_tcp(const std::string& host, std::uint16_t port, bool require_loopback);

enum class AcceptResult : std::uint8_t { kAccepted, kNone, kNoDescriptors };
// Takes one waiting connection and prepares it: no delay, keep-alive. kNoDescriptors: this process has none
// left.
[[nodiscard]] AcceptResult accept_tcp(int listener, Fd& out);

}  // namespace dfkv
