#include "net/client_node.h"

#include <algorithm>

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

NodeLink::NodeLink(Io& io, Resolver& resolver, std::string node_id, std::vector<Endpoint> endpoints)
    : io_(io), resolver_(resolver), node_id_(std::move(node_id)), endpoints_(std::move(endpoints)) {
  lane_of(Lane::kControl).slots.resize(1);
  lane_of(Lane::kBulk).slots.resize(std::max(1U, io.options.connections_per_node));
}

NodeLink::~NodeLink() { shut(); }

void NodeLink::start() {
  for (const auto lane : {Lane::kControl, Lane::kBulk}) {
    for (std::size_t i = 0; i < lane_of(lane).slots.size(); ++i) connect(lane, i);
  }
}

void NodeLink::shut() {
  if (std::exchange(shut_, true)) return;
  *alive_ = false;
  std::vector<std::shared_ptr<Request>> left;
  for (auto& lane : lanes_) {
    for (auto& slot : lane.slots) {
      if (slot.retry_timer != 0) io_.loop.cancel(slot.retry_timer);
      if (slot.connection) {
        for (auto& request : slot.connection->take_requests()) left.push_back(std::move(request));
        slot.connection->close();
      }
    }
    left.insert(left.end(), lane.queue.begin(), lane.queue.end());
    lane.queue.clear();
  }
  for (const auto& request : left) end_request(io_, *request, Status::kMissNodeDown);
}

bool NodeLink::idle() const {
  return waiting() == 0 && std::ranges::all_of(lanes_, [](const LaneState& lane) {
           return std::ranges::all_of(lane.slots, [](const Slot& slot) {
             return !slot.connection || !slot.connection->ready() || slot.connection->idle();
           });
         });
}

std::uint32_t NodeLink::ready_connections(Lane lane) const {
  const auto& slots = lanes_[static_cast<std::size_t>(lane)].slots;
  return static_cast<std::uint32_t>(std::ranges::count_if(
      slots, [](const Slot& slot) { return slot.connection && slot.connection->ready(); }));
}

void NodeLink::connect(Lane lane, std::size_t slot) {
  if (endpoints_.empty())
    return attempt_failed(lane, slot, "the view gives no address for node '" + node_id_ + "'");
  const auto& endpoint = endpoints_[next_endpoint_ % endpoints_.size()];
  resolver_.resolve(endpoint,
                    [this, alive = alive_, lane, slot](const std::vector<SocketAddress>& addresses) {
                      if (*alive) connect_to(lane, slot, addresses);
                    });
}

void NodeLink::connect_to(Lane lane, std::size_t slot, const std::vector<SocketAddress>& addresses) {
  auto& state = lane_of(lane).slots[slot];
  if (addresses.empty())
    return attempt_failed(lane, slot, "the name of node '" + node_id_ + "' has no address");
  state.connection = std::make_shared<Connection>(io_, *this, lane, node_id_);
  // A name with several addresses: another one at each attempt.
  state.connection->start(addresses[state.failures % addresses.size()]);
}

void NodeLink::retry_later(Lane lane, std::size_t slot, std::uint32_t delay_ms) {
  auto& state = lane_of(lane).slots[slot];
  state.retry_timer = io_.loop.at(Clock::now() + std::chrono::milliseconds(delay_ms), [this, lane, slot] {
    lane_of(lane).slots[slot].retry_timer = 0;
    connect(lane, slot);
  });
}

void NodeLink::attempt_failed(Lane lane_id, std::size_t slot, const std::string& reason) {
  auto& lane = lane_of(lane_id);
  last_error_ = reason;
  ++lane.slots[slot].failures;
  ++next_endpoint_;
  retry_later(lane_id, slot, reconnect_delay_ms(lane.slots[slot].failures, io_.options.cooldown_ms));

  std::deque<std::shared_ptr<Request>> hopeless;
  if (ready_connections(lane_id) == 0) {
    if (!lane.down) bump(io_.counters.cooldowns);
    lane.down = true;
    hopeless.swap(lane.queue);
  } else {
    // Second tries wait for a fresh connection, and there is none to be had.
    std::deque<std::shared_ptr<Request>> kept;
    for (auto& request : lane.queue) (request->retried ? hopeless : kept).push_back(std::move(request));
    lane.queue.swap(kept);
  }
  for (const auto& request : hopeless) end_request(io_, *request, Status::kMissNodeDown);
}

void NodeLink::on_ready(Connection& connection) {
  auto& lane = lane_of(connection.lane());
  lane.down = false;
  for (const auto& entry : io_.namespaces.entries()) connection.register_namespace(entry);
  for (auto& slot : lane.slots) {
    if (slot.connection.get() != &connection) continue;
    if (std::exchange(slot.was_ready, true)) bump(io_.counters.reconnects);
  }
  dispatch(connection.lane());
}

void NodeLink::on_room(Connection& connection) {
  const auto lane = connection.lane();
  for (auto& slot : lane_of(lane).slots) {
    if (slot.connection.get() == &connection) slot.failures = 0;
  }
  dispatch(lane);
}

void NodeLink::on_failed(Connection& connection, Failure failure) {
  const auto lane_id = connection.lane();
  auto& lane = lane_of(lane_id);
  const auto it = std::ranges::find_if(
      lane.slots, [&](const Slot& slot) { return slot.connection.get() == &connection; });
  const auto slot = static_cast<std::size_t>(it - lane.slots.begin());
  it->connection.reset();
  // First what was in flight, so that it fails with the rest when the node turns out to be down.
  give_back(std::move(failure.lost), failure.kind);
  if (failure.kind == FailureKind::kUnreachable || failure.kind == FailureKind::kProtocol) {
    attempt_failed(lane_id, slot, failure.reason);
    return;
  }
  // An established connection has ended: the node may have been restarted, or has tidied up. That alone says
  // nothing against it; the attempt that follows at once does.
  last_error_ = failure.reason;
  if (failure.was_useful) {
    it->failures = 0;
    connect(lane_id, slot);
  } else {
    ++it->failures;
    retry_later(lane_id, slot, reconnect_delay_ms(it->failures, io_.options.cooldown_ms));
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
    lane_of(request->lane()).queue.push_back(std::move(request));
  }
}

void NodeLink::submit(std::shared_ptr<Request> request) {
  auto& lane = lane_of(request->lane());
  if (shut_ || lane.down) return end_request(io_, *request, Status::kMissNodeDown);
  const auto lane_id = request->lane();
  lane.queue.push_back(std::move(request));
  dispatch(lane_id);
}

std::shared_ptr<Connection> NodeLink::pick(LaneState& lane, const Request& request) const {
  std::shared_ptr<Connection> best;
  for (const auto& slot : lane.slots) {
    const auto& connection = slot.connection;
    if (!connection || !connection->has_room() || connection->serial() < request.min_serial) continue;
    if (!best || connection->outstanding_bytes() < best->outstanding_bytes()) best = connection;
  }
  return best;
}

bool NodeLink::split_to_fit(LaneState& lane, const Connection& connection,
                            const std::shared_ptr<Request>& request) {
  const auto limit = connection.limits().max_fragment_bytes;
  while (request->table_bytes() > limit) {
    if (request->keys.size() == 1) {
      end_request(io_, *request, Status::kRefusedLimit);
      return false;
    }
    lane.queue.push_front(split_request(*request, request->keys.size() / 2));
  }
  return true;
}

void NodeLink::dispatch(Lane lane_id) {
  auto& lane = lane_of(lane_id);
  // Requests that wait for a fresh connection do not hold up those behind them.
  std::deque<std::shared_ptr<Request>> waiting;
  while (!lane.queue.empty()) {
    auto request = std::move(lane.queue.front());
    lane.queue.pop_front();
    if (request->state == Request::State::kEnded) continue;
    const auto connection = pick(lane, *request);
    if (!connection) {
      waiting.push_back(std::move(request));
      if (waiting.back()->min_serial == 0) break;
      continue;
    }
    if (split_to_fit(lane, *connection, request)) connection->send(std::move(request));
  }
  lane.queue.insert(lane.queue.begin(), waiting.begin(), waiting.end());
}

void NodeLink::register_namespace(const std::shared_ptr<const NamespaceBook::Entry>& entry) {
  for (auto& lane : lanes_) {
    for (auto& slot : lane.slots) {
      if (slot.connection && slot.connection->ready()) slot.connection->register_namespace(entry);
    }
  }
}

}  // namespace dfkv::client
