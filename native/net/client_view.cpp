#include "net/client_view.h"

#include <algorithm>
#include <iterator>

#include "net/client_node.h"
#include "net/ring.h"

namespace dfkv::client {

namespace {
constexpr std::uint32_t kPlacementRule = 1;
// An answer that is early and says nothing new must not turn the long poll into a busy one.
constexpr std::chrono::milliseconds kLeastPollTime{50};
}  // namespace

ViewVerdict judge_view(const View* current, const ViewContext& context, const View& candidate) {
  if (candidate.placement_rule != kPlacementRule) return ViewVerdict::kUnknownRule;
  const bool readable = std::ranges::any_of(candidate.nodes, [](const ViewNode& node) {
    return (node.state == NodeState::kServing || node.state == NodeState::kDraining) && node.read_weight > 0;
  });
  if (!readable) return ViewVerdict::kEmpty;
  if (current == nullptr) return ViewVerdict::kTake;
  if (candidate.cluster_id == current->cluster_id) {
    if (candidate.revision > current->revision) return ViewVerdict::kTake;
    if (candidate.revision < current->revision) return ViewVerdict::kOlder;
    // Told by a seed at last: its nodes may be reached through that seed.
    return context.confirmed ? ViewVerdict::kSame : ViewVerdict::kTake;
  }
  if (!context.confirmed || !context.reachable) return ViewVerdict::kTake;
  return candidate.cluster_id > current->cluster_id ? ViewVerdict::kTake : ViewVerdict::kOlder;
}

std::vector<std::string> keep_answering(const View& current, View& candidate,
                                        const std::function<bool(const std::string& id)>& answers) {
  std::vector<std::string> kept;
  if (candidate.cluster_id != current.cluster_id) return kept;
  const auto by_id = [](const ViewNode& a, const ViewNode& b) { return a.id < b.id; };
  std::vector<ViewNode> missing;
  std::ranges::set_difference(current.nodes, candidate.nodes, std::back_inserter(missing), by_id);
  std::erase_if(missing, [&](const ViewNode& node) {
    const bool used = node.state == NodeState::kServing || node.state == NodeState::kDraining;
    return !used || !answers(node.id);
  });
  for (const auto& node : missing) kept.push_back(node.id);
  const auto told = static_cast<std::ptrdiff_t>(candidate.nodes.size());
  std::ranges::move(missing, std::back_inserter(candidate.nodes));
  std::ranges::inplace_merge(candidate.nodes, candidate.nodes.begin() + told, by_id);
  return kept;
}

ViewFollower::ViewFollower(Io& io, Resolver& resolver, OnView on_view, OnRoundFailed on_round_failed)
    : io_(io),
      resolver_(resolver),
      on_view_(std::move(on_view)),
      on_round_failed_(std::move(on_round_failed)) {}

ViewFollower::~ViewFollower() { shut(); }

void ViewFollower::start() {
  if (shut_) return;
  if (io_.options.seeds.empty()) return on_round_failed_();
  connect();
}

void ViewFollower::shut() {
  if (std::exchange(shut_, true)) return;
  *alive_ = false;
  if (timer_ != 0) io_.loop.cancel(std::exchange(timer_, 0));
  if (connection_) connection_->close();
}

void ViewFollower::later(std::uint32_t delay_ms, EventLoop::Task task) {
  if (timer_ != 0) io_.loop.cancel(timer_);
  timer_ = io_.loop.at(Clock::now() + std::chrono::milliseconds(delay_ms), [this, task = std::move(task)] {
    timer_ = 0;
    task();
  });
}

void ViewFollower::connect() {
  const auto& seed = io_.options.seeds[seed_ % io_.options.seeds.size()];
  resolver_.resolve(seed, [this, alive = alive_](const std::vector<SocketAddress>& addresses) {
    if (!*alive) return;
    if (addresses.empty()) return next_seed("the seed's name has no address");
    connection_ = std::make_shared<Connection>(io_, *this, Lane::kControl, "");
    connection_->start(addresses[failures_ / io_.options.seeds.size() % addresses.size()]);
  });
}

void ViewFollower::next_seed(const std::string& why) {
  const auto& seed = io_.options.seeds[seed_ % io_.options.seeds.size()];
  last_error_ = seed.host + ":" + std::to_string(seed.port) + ": " + why;
  if (connection_) {
    connection_->close();
    connection_.reset();
  }
  ++seed_;
  ++failures_;
  const auto seeds = io_.options.seeds.size();
  const auto rounds = static_cast<std::uint32_t>(failures_ / seeds);
  const bool round_over = failures_ % seeds == 0;
  // Within a round the next seed is tried at once (soon: never in a tight loop), then with growing pauses.
  later(round_over ? reconnect_delay_ms(rounds, io_.options.cooldown_ms) : 1, [this] { connect(); });
  if (round_over) on_round_failed_();
}

void ViewFollower::on_ready(Connection&) {
  known_revision_ = 0;  // the first answer of a seed is always its whole view
  poll();
}

void ViewFollower::on_room(Connection&) {}

void ViewFollower::on_failed(Connection&, Failure failure) {
  connection_.reset();
  if (failure.kind != FailureKind::kUnreachable && failure.was_useful) {
    // It may only have been restarted: the same seed first.
    last_error_ = failure.reason;
    later(1, [this] { connect(); });
    return;
  }
  next_seed(failure.reason);
}

void ViewFollower::poll() {
  auto request = std::make_shared<Request>();
  request->opcode = Opcode::kSubscribe;
  request->meta.known_revision = known_revision_;
  request->meta.wait_ms = io_.options.view_poll_ms;
  request->ended = [this](Request&, Status status, const ReplyMeta* reply, Bytes payload) {
    answered(status, reply, payload);
  };
  polled_at_ = Clock::now();
  later(io_.options.view_poll_ms + io_.options.connect_timeout_ms,
        [this] { next_seed("no answer to SUBSCRIBE in time"); });
  connection_->send(std::move(request));
}

void ViewFollower::answered(Status status, const ReplyMeta* reply, Bytes payload) {
  if (reply == nullptr || shut_) return;
  if (!is_done(status)) {
    const std::string why =
        "SUBSCRIBE was answered with " + std::string(status_name(status)) + " " + reply->reason;
    // Not from inside the connection's own frame.
    return later(0, [this, why] { next_seed(why); });
  }
  bool told = false;
  if (!payload.empty()) {
    auto view = decode_view(payload);
    if (!view) return later(0, [this] { next_seed("the view is malformed"); });
    known_revision_ = view->revision;
    failures_ = 0;
    told = true;
    const auto& host = io_.options.seeds[seed_ % io_.options.seeds.size()].host;
    on_view_(std::move(*view), {payload.begin(), payload.end()}, host);
  }
  const bool early = !told && Clock::now() - polled_at_ < kLeastPollTime;
  later(early ? static_cast<std::uint32_t>(kLeastPollTime.count()) : 0, [this] { poll(); });
}

}  // namespace dfkv::client
