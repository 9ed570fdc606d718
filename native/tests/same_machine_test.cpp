// Which connections stay on one machine, and how those send.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "net/same_machine.h"

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <array>
#include <string>

#include "net/fd.h"
#include "net/socket.h"

using namespace dfkv;

namespace {

sockaddr_storage address(const std::string& text, std::uint16_t port = 0) {
  sockaddr_storage out{};
  auto* const v4 = reinterpret_cast<sockaddr_in*>(&out);
  auto* const v6 = reinterpret_cast<sockaddr_in6*>(&out);
  if (::inet_pton(AF_INET, text.c_str(), &v4->sin_addr) == 1) {
    out.ss_family = AF_INET;
    v4->sin_port = htons(port);
  } else {
    REQUIRE(::inet_pton(AF_INET6, text.c_str(), &v6->sin6_addr) == 1);
    out.ss_family = AF_INET6;
  }
  return out;
}

bool same(const std::string& one, const std::string& other) {
  const auto a = address(one);
  const auto b = address(other);
  return same_machine(reinterpret_cast<const sockaddr*>(&a), reinterpret_cast<const sockaddr*>(&b));
}

std::string congestion_control(int fd) {
  std::array<char, 32> name{};
  socklen_t size = name.size();
  REQUIRE(::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) == 0);
  return name.data();
}

bool choose(int fd, const std::string& name) {
  return ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

}  // namespace

TEST_CASE("loopback and one address for both ends are one machine, other addresses are not") {
  CHECK(same("127.0.0.1", "127.0.0.1"));
  CHECK(same("127.0.0.1", "127.0.0.2"));
  CHECK(same("10.1.2.3", "10.1.2.3"));
  CHECK(same("::1", "::1"));
  CHECK(same("::ffff:127.0.0.1", "::ffff:127.0.0.1"));
  CHECK(same("fd00::1", "fd00::1"));
  CHECK_FALSE(same("10.1.2.3", "10.1.2.4"));
  CHECK_FALSE(same("fd00::1", "fd00::2"));
  CHECK_FALSE(same("fd00::1", "10.1.2.3"));
  CHECK_FALSE(same("::ffff:10.0.0.1", "::ffff:10.0.0.2"));
}

TEST_CASE("a connection that a node accepts from its own machine is not paced") {
  const Listener listener = listen_tcp("127.0.0.1", 0, true);
  // What is accepted has the listener's to begin with.
  const bool other_known = choose(listener.fd.get(), "cubic") || choose(listener.fd.get(), "bbr");
  CAPTURE(other_known);
  const Fd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto to = address("127.0.0.1", listener.port);
  REQUIRE(::connect(client.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(sockaddr_in)) == 0);
  Fd accepted;
  REQUIRE(accept_tcp(listener.fd.get(), accepted) == AcceptResult::kAccepted);
  CHECK(congestion_control(accepted.get()) == "reno");
}
