#include "net/node.h"

#include <sys/random.h>

#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

namespace dfkv {

namespace {

// Grows with every start of the same node, so that a restarted one can be told from what it was.
server::ServerOptions identified(server::ServerOptions options) {
  options.incarnation = static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                                       std::chrono::system_clock::now().time_since_epoch())
                                                       .count());
  if (::getrandom(options.boot_id.data(), options.boot_id.size(), 0) !=
      static_cast<ssize_t>(options.boot_id.size())) {
    throw std::system_error(errno, std::generic_category(), "no random bytes for the boot id");
  }
  return options;
}

}  // namespace

Node::Node(NodeOptions options)
    : store_(std::move(options.store)), server_(store_, identified(std::move(options.server))) {}

Node::~Node() {
  while (!stop(Clock::now() + std::chrono::seconds(1))) {
  }
}

bool Node::stop(Clock::time_point deadline) {
  if (!server_.stop(deadline)) return false;
  store_.close(deadline);  // its callbacks post to the server's loops, which are still there
  return true;
}

}  // namespace dfkv
