// From "host:port" to something to connect to.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "net/client_types.h"

namespace dfkv::client {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  [[nodiscard]] int family() const { return storage.ss_family; }
};

// "host:port", "[v6]:port". nullopt: malformed.
[[nodiscard]] std::optional<Endpoint> parse_endpoint(std::string_view text);
// Numeric addresses and "localhost", without asking anybody.
[[nodiscard]] std::optional<SocketAddress> numeric_address(const Endpoint& endpoint);
// Any other name may block for as long as the resolver likes: not on the I/O thread. Empty: not found.
[[nodiscard]] std::vector<SocketAddress> resolve_blocking(const Endpoint& endpoint);

[[nodiscard]] bool is_wildcard_host(std::string_view host);
[[nodiscard]] bool is_loopback_host(std::string_view host);

// Where to reach a node that advertises `advertised`, when its view came from `seed_host`: a wildcard, or a
// loopback address told by another machine, means that machine itself.
[[nodiscard]] Endpoint reachable_endpoint(const Endpoint& advertised, const std::string& seed_host);

}  // namespace dfkv::client
