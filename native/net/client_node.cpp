#include "net/client_node.h"

#include <algorithm>
#include <array>
#include <iterator>

namespace dfkv::client {

namespace {
constexpr std::uint32_t kFirstDelayMs = 50;
// Attempts never come less often, so that a node that was restarted is soon in use again.
constexpr std::uint32_t kLongestDelayMs = 500;
}  // namespace

std::uint32_t reconnect_delay_ms(std::uint32_t failures, std::uint32_t cooldown_ms) {
  if (failures == 0) return 0;
  const std::uint32_t grown = kFirstDelayMs << std::min(failures - 1, 8U);
  return std::clamp(std::min(grown, cooldown_ms), 10U, kLongestDelayMs);
}

NodeLink::NodeLink(Io& io, Resolver& resolver, Lane lane, std::string node_id,
                   std::vector<Endpoint> endpoints)
    : io_(io),
      resolver_(resolver),
      lane_(lane),
      node_id_(std::move(node_id)),
      endpoints_(std::move(endpoints)),
      slots_(lane == Lane::kBulk ? std::max(1U, io.options.connections_per_node) : 1U) {}

NodeLink::~NodeLink() { shut(); }

void NodeLink::start() {
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) connect(slot);
}

void NodeLink::shut() {
  if (std::exchange(shut_, true)) return;
  *alive_ = false;
  std::vector<std::shared_ptr<Request>> left;
  for (auto& slot : slots_) {
    if (slot.retry_timer != 0) io_.loop.cancel(slot.retry_timer);
    if (slot.connection) {
      for (auto& request : slot.connection->take_requests()) left.push_back(std::move(request));
      slot.connection->close();
    }
  }
  left.insert(left.end(), queue_.begin(), queue_.end());
  queue_.clear();
  for (const auto& request : left) end_request(io_, *request, Status::kMissNodeDown);
}

bool NodeLink::idle() const {
  return queue_.empty() && std::ranges::all_of(slots_, [](const Slot& slot) {
           return !slot.connection || !slot.connection->ready() || slot.connection->idle();
         });
}

std::uint32_t NodeLink::ready_connections() const {
  return static_cast<std::uint32_t>(std::ranges::count_if(
      slots_, [](const Slot& slot) { return slot.connection && slot.connection->ready(); }));
}

void NodeLink::connect(std::size_t slot) {
  if (endpoints_.empty())
    return attempt_failed(slot, "the view gives no address for node '" + node_id_ + "'");
  const auto& endpoint = endpoints_[next_endpoint_ % endpoints_.size()];
  resolver_.resolve(endpoint, [this, alive = alive_, slot](const std::vector<SocketAddress>& addresses) {
    if (*alive) connect_to(slot, addresses);
  });
}

void NodeLink::connect_to(std::size_t slot, const std::vector<SocketAddress>& addresses) {
  auto& state = slots_[slot];
  if (addresses.empty()) return attempt_failed(slot, "the name of node '" + node_id_ + "' has no address");
  state.connection = std::make_shared<Connection>(io_, *this, lane_, node_id_);
  // A name with several addresses: another one at each attempt.
  state.connection->start(addresses[state.failures % addresses.size()]);
}

void NodeLink::retry_later(std::size_t slot, std::uint32_t delay_ms) {
  auto& state = slots_[slot];
  state.retry_timer = io_.loop.at(Clock::now() + std::chrono::milliseconds(delay_ms), [this, slot] {
    slots_[slot].retry_timer = 0;
    connect(slot);
  });
}

void NodeLink::attempt_failed(std::size_t slot, const std::string& reason) {
  last_error_ = reason;
  ++slots_[slot].failures;
  ++next_endpoint_;
  retry_later(slot, reconnect_delay_ms(slots_[slot].failures, io_.options.cooldown_ms));

  std::deque<std::shared_ptr<Request>> hopeless;
  if (ready_connections() == 0) {
    if (!down_) bump(io_.counters.cooldowns);
    down_ = true;
    hopeless.swap(queue_);
  } else {
    // Second tries wait for a fresh connection, and there is none to be had.
    std::deque<std::shared_ptr<Request>> kept;
    for (auto& request : queue_) (request->retried ? hopeless : kept).push_back(std::move(request));
    queue_.swap(kept);
  }
  for (const auto& request : hopeless) end_request(io_, *request, Status::kMissNodeDown);
}

void NodeLink::on_ready(Connection& connection) {
  down_ = false;
  for (const auto& entry : io_.namespaces.entries()) connection.register_namespace(entry);
  for (auto& slot : slots_) {
    if (slot.connection.get() != &connection) continue;
    if (std::exchange(slot.was_ready, true)) bump(io_.counters.reconnects);
  }
  dispatch();
}

void NodeLink::on_room(Connection& connection) {
  for (auto& slot : slots_) {
    if (slot.connection.get() == &connection) slot.failures = 0;
  }
  dispatch();
}

void NodeLink::on_failed(Connection& connection, Failure failure) {
  const auto it =
      std::ranges::find_if(slots_, [&](const Slot& slot) { return slot.connection.get() == &connection; });
  const auto slot = static_cast<std::size_t>(it - slots_.begin());
  it->connection.reset();
  // First what was in flight, so that it fails with the rest when the node turns out to be down.
  give_back(std::move(failure.lost), failure.kind);
  if (failure.kind == FailureKind::kUnreachable || failure.kind == FailureKind::kProtocol) {
    attempt_failed(slot, failure.reason);
    return;
  }
  // An established connection has ended: the node may have been restarted, or has tidied up. That alone says
  // nothing against it; the attempt that follows at once does.
  last_error_ = failure.reason;
  if (failure.was_useful) {
    it->failures = 0;
    connect(slot);
  } else {
    ++it->failures;
    retry_later(slot, reconnect_delay_ms(it->failures, io_.options.cooldown_ms));
  }
}

void NodeLink::give_back(std::vector<std::shared_ptr<Request>> lost, FailureKind kind) {
  for (auto& request : lost) {
    if (request->state == Request::State::kEnded) continue;
    const bool again = !request->detached && !request->retried && request->idempotent() &&
                       kind != FailureKind::kProtocol && request->op != nullptr;
    const bool keyed = !request->keys.empty();
    if (again && keyed) std::erase_if(request->keys, [&](auto key) { return request->op->key_ended(key); });
    if (!again || (keyed && request->keys.empty())) {
      end_request(io_, *request,
                  kind == FailureKind::kProtocol ? Status::kMissCorrupt : Status::kMissNodeDown);
      continue;
    }
    bump(io_.counters.retries);
    request->retried = true;
    request->state = Request::State::kQueued;
    request->min_serial = io_.next_serial;  // no other old connection is to be trusted now
    queue_.push_back(std::move(request));
  }
}

void NodeLink::submit(std::shared_ptr<Request> request) {
  if (shut_ || down_) return end_request(io_, *request, Status::kMissNodeDown);
  queue_.push_back(std::move(request));
  dispatch();
}

// The first connection is left to loads, as long as another one stands: a PUT waits on its connection while
// the node has no memory for it.
std::shared_ptr<Connection> NodeLink::pick(const Request& request) const {
  std::shared_ptr<Connection> best;
  bool others_stand = false;
  for (auto slot = slots_.rbegin(); slot != slots_.rend(); ++slot) {
    const auto& connection = slot->connection;
    if (request.opcode == Opcode::kPut && others_stand && std::next(slot) == slots_.rend()) break;
    if (!connection || connection->serial() < request.min_serial) continue;
    others_stand = others_stand || connection->ready();
    if (!connection->has_room()) continue;
    if (!best || connection->outstanding_bytes() < best->outstanding_bytes()) best = connection;
  }
  return best;
}

bool NodeLink::split_to_fit(const Connection& connection, const std::shared_ptr<Request>& request) {
  const auto limit = connection.limits().max_fragment_bytes;
  while (request->table_bytes() > limit) {
    if (request->keys.size() == 1) {
      end_request(io_, *request, Status::kRefusedLimit);
      return false;
    }
    queue_.push_front(split_request(*request, request->keys.size() / 2));
  }
  return true;
}

void NodeLink::dispatch() {
  // Those that wait, for a fresh connection or because theirs is full, hold up none of the other kind.
  std::deque<std::shared_ptr<Request>> waiting;
  std::array<bool, 2> full{};  // for loads, for saves
  while (!queue_.empty() && !(full[0] && full[1])) {
    auto request = std::move(queue_.front());
    queue_.pop_front();
    if (request->state == Request::State::kEnded) continue;
    bool& no_room = full[request->opcode == Opcode::kPut ? 1 : 0];
    const auto connection = no_room ? nullptr : pick(*request);
    if (!connection) {
      no_room = no_room || request->min_serial == 0;
      waiting.push_back(std::move(request));
      continue;
    }
    if (split_to_fit(*connection, request)) connection->send(std::move(request));
  }
  queue_.insert(queue_.begin(), waiting.begin(), waiting.end());
}

void NodeLink::register_namespace(const std::shared_ptr<const NamespaceBook::Entry>& entry) {
  for (auto& slot : slots_) {
    if (slot.connection && slot.connection->ready()) slot.connection->register_namespace(entry);
  }
}

}  // namespace dfkv::client
