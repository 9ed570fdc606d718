// Connections between two processes of one machine.
#pragma once

#include <sys/socket.h>

namespace dfkv {

[[nodiscard]] bool is_loopback(const sockaddr* address);
// Whether the ends of a connection are on one machine: loopback, or one address for both.
[[nodiscard]] bool same_machine(const sockaddr* one, const sockaddr* other);

// A connected socket. Between processes of one machine there is no network to be careful with, and congestion
// control that paces what it sends (BBR, which some systems choose for all connections) only makes both ends
// wait for timers. It takes the plain one there, which every kernel has and allows.
void send_freely_within_machine(int fd);

}  // namespace dfkv
