#include "net/socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>
#include <stdexcept>
#include <system_error>

#include "net/same_machine.h"

namespace dfkv {

namespace {

constexpr int kBacklog = 1024;
// A peer that vanished without a word is noticed after about a minute, also on an idle connection.
constexpr int kKeepAliveIdle_s = 30;
constexpr int kKeepAliveInterval_s = 10;
constexpr int kKeepAliveProbes = 3;

struct AddressListDeleter {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};

void set_option(int fd, int level, int name, int value) {
  ::setsockopt(fd, level, name, &value, sizeof value);
}

std::uint16_t bound_port(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw std::system_error(errno, std::generic_category(), "getsockname");
  }
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

}  // namespace

Listener listen_tcp(const std::string& host, std::uint16_t port, bool require_loopback) {
  const std::string name = host + ":" + std::to_string(port);
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error =
      ::getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    throw std::system_error(error == EAI_SYSTEM ? errno : EADDRNOTAVAIL, std::generic_category(),
                            "cannot resolve " + name + " (" + ::gai_strerror(error) + ")");
  }
  const std::unique_ptr<addrinfo, AddressListDeleter> addresses(found);
  const bool loopback = is_loopback(addresses->ai_addr);
  if (require_loopback && !loopback) {
    throw std::invalid_argument(
        "refusing to listen on " + name +
        " without a secret: whoever reaches it could read and write the cache. Give a "
        "secret, listen on 127.0.0.1, or say that this is meant (insecure)");
  }
  Listener listener;
  listener.loopback = loopback;
  listener.fd = Fd(::socket(addresses->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!listener.fd) throw std::system_error(errno, std::generic_category(), "socket");
  set_option(listener.fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (::bind(listener.fd.get(), addresses->ai_addr, addresses->ai_addrlen) != 0 ||
      ::listen(listener.fd.get(), kBacklog) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot listen on " + name);
  }
  listener.port = bound_port(listener.fd.get());
  return listener;
}

AcceptResult accept_tcp(int listener, Fd& out) {
  while (true) {
    out = Fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (out) break;
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
      return AcceptResult::kNoDescriptors;
    return AcceptResult::kNone;
  }
  set_option(out.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(out.get(), SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(out.get(), IPPROTO_TCP, TCP_KEEPIDLE, kKeepAliveIdle_s);
  set_option(out.get(), IPPROTO_TCP, TCP_KEEPINTVL, kKeepAliveInterval_s);
  set_option(out.get(), IPPROTO_TCP, TCP_KEEPCNT, kKeepAliveProbes);
  send_freely_within_machine(out.get());
  return AcceptResult::kAccepted;
}

}  // namespace dfkv
