#include "net/client_routing.h"

#include <algorithm>
#include <set>
#include <system_error>

namespace dfkv::client {

namespace {
constexpr std::chrono::milliseconds kKeptCheck{250};
}  // namespace

RoutingSource::RoutingSource(Io& io, Resolver& resolver, Hooks hooks)
    : io_(io),
      hooks_(std::move(hooks)),
      follower_(
          io, resolver,
          [this](View view, std::vector<std::byte> raw, const std::string& seed_host) {
            offer(std::move(view), std::move(raw), seed_host, true);
          },
          [this] { seeds_failed(); }),
      saver_(std::make_shared<ViewSaver>(io.options.last_view_path)) {}

RoutingSource::~RoutingSource() {
  if (builder_.joinable()) builder_.join();
}

void RoutingSource::offer(View view, std::vector<std::byte> raw, const std::string& seed_host,
                          bool confirmed) {
  const Routing* newest = next_to_build_ ? next_to_build_.get()
                          : building_    ? building_.get()
                                         : current_.get();
  ViewContext context;
  if (newest != nullptr) context.confirmed = newest->confirmed;
  context.reachable = hooks_.any_answers();
  const auto verdict = judge_view(newest != nullptr ? &newest->view : nullptr, context, view);
  if (verdict != ViewVerdict::kTake) {
    if (verdict != ViewVerdict::kSame) bump(io_.counters.views_refused);
    return;
  }
  auto routing = std::make_shared<Routing>();
  if (current_ && current_->confirmed && confirmed) {
    routing->kept = keep_answering(current_->view, view, hooks_.answers);
  }
  routing->view = std::move(view);
  routing->raw = std::move(raw);
  routing->seed_host = seed_host;
  routing->confirmed = confirmed;
  next_to_build_ = std::move(routing);
  build_next();
}

void RoutingSource::build_next() {
  if (building_ || !next_to_build_) return;
  building_ = std::move(next_to_build_);
  next_to_build_.reset();
  // Filling the rings of a large cluster takes longer than an operation's deadline may wait.
  if (builder_.joinable()) builder_.join();
  try {
    builder_ = std::thread([this, routing = building_, before = current_] {
      build(*routing, before.get());
      io_.loop.post([this] { built(); });
    });
  } catch (const std::system_error&) {
    build(*building_, current_.get());
    io_.loop.post([this] { built(); });
  }
}

void RoutingSource::build(Routing& routing, const Routing* before) {
  const auto& nodes = routing.view.nodes;
  const bool alike = std::ranges::all_of(nodes, [](const ViewNode& node) {
    return node.state != NodeState::kDraining && node.read_weight == node.write_weight;
  });
  routing.read = read_ring(routing.view, before != nullptr ? before->read : Ring());
  routing.write = alike ? routing.read : write_ring(routing.view, before != nullptr ? before->write : Ring());
}

void RoutingSource::built() {
  std::shared_ptr<const Routing> routing = std::move(building_);
  building_.reset();
  current_ = routing;
  bump(io_.counters.views_taken);
  if (routing->confirmed) saver_->save(routing->raw);
  hooks_.take(std::move(routing));
  watch_kept();
  build_next();
}

void RoutingSource::watch_kept() {
  if (kept_timer_ != 0 || current_->kept.empty()) return;
  kept_timer_ = io_.loop.at(Clock::now() + kKeptCheck, [this] {
    kept_timer_ = 0;
    drop_silent();
    watch_kept();
  });
}

// Nodes that were kept because they answered go once they no longer do.
void RoutingSource::drop_silent() {
  if (building_ || next_to_build_) return;
  std::set<std::string> silent;
  for (const auto& id : current_->kept) {
    if (!hooks_.answers(id)) silent.insert(id);
  }
  if (silent.empty()) return;
  auto routing = std::make_shared<Routing>();
  routing->view = current_->view;
  routing->kept = current_->kept;
  std::erase_if(routing->view.nodes, [&](const ViewNode& node) { return silent.contains(node.id); });
  std::erase_if(routing->kept, [&](const std::string& id) { return silent.contains(id); });
  routing->raw = current_->raw;
  routing->seed_host = current_->seed_host;
  routing->confirmed = current_->confirmed;
  next_to_build_ = std::move(routing);
  build_next();
}

void RoutingSource::seeds_failed() {
  if (current_ || building_) return;
  if (auto last = decode_view(io_.options.last_view); last && !last_view_offered_) {
    last_view_offered_ = true;
    offer(std::move(*last), io_.options.last_view, "", false);
    if (building_) return;
  }
  hooks_.none();
}

}  // namespace dfkv::client
