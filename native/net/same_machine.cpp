#include "net/same_machine.h"

#include <netinet/in.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <string_view>

namespace dfkv {

namespace {
constexpr std::string_view kPlain = "reno";
}  // namespace

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
  }
  if (address->sa_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address);
    return IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr) ||
           (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr) && v6->sin6_addr.s6_addr[12] == 127);
  }
  return false;
}

bool same_machine(const sockaddr* one, const sockaddr* other) {
  if (is_loopback(one) || is_loopback(other)) return true;
  if (one->sa_family != other->sa_family) return false;
  if (one->sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(one)->sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in*>(other)->sin_addr.s_addr;
  }
  if (one->sa_family == AF_INET6) {
    return std::ranges::equal(reinterpret_cast<const sockaddr_in6*>(one)->sin6_addr.s6_addr,
                              reinterpret_cast<const sockaddr_in6*>(other)->sin6_addr.s6_addr);
  }
  return false;
}

void send_freely_within_machine(int fd) {
  sockaddr_storage own{};
  sockaddr_storage peer{};
  socklen_t own_size = sizeof own;
  socklen_t peer_size = sizeof peer;
  auto* const own_address = reinterpret_cast<sockaddr*>(&own);
  auto* const peer_address = reinterpret_cast<sockaddr*>(&peer);
  if (::getsockname(fd, own_address, &own_size) != 0 || ::getpeername(fd, peer_address, &peer_size) != 0) {
    return;
  }
  if (!same_machine(own_address, peer_address)) return;
  ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kPlain.data(), static_cast<socklen_t>(kPlain.size()));
}

}  // namespace dfkv
