// Views: which are taken, their rings, and links to their nodes.
#include <algorithm>
#include <set>

#include "net/client_core.h"

namespace dfkv::client {

namespace {
constexpr std::chrono::milliseconds kRetireCheck{100};
constexpr std::chrono::milliseconds kKeptCheck{250};

std::vector<Endpoint> endpoints_of(const ViewNode& node, const std::string& seed_host) {
  std::vector<Endpoint> endpoints;
  for (const auto& text : node.tcp) {
    if (const auto endpoint = parse_endpoint(text))
      endpoints.push_back(reachable_endpoint(*endpoint, seed_host));
  }
  return endpoints;
}

bool same(const std::vector<Endpoint>& a, const std::vector<Endpoint>& b) {
  return std::ranges::equal(
      a, b, [](const Endpoint& x, const Endpoint& y) { return x.host == y.host && x.port == y.port; });
}
}  // namespace

void Core::offer_view(View view, std::vector<std::byte> raw, const std::string& seed_host, bool confirmed) {
  const Routing* newest = next_to_build_ ? next_to_build_.get()
                          : building_    ? building_.get()
                                         : routing_.get();
  ViewContext context;
  if (newest != nullptr) context.confirmed = newest->confirmed;
  context.reachable = std::ranges::any_of(links_, [](const auto& link) { return link.second->reachable(); });
  const auto verdict = judge_view(newest != nullptr ? &newest->view : nullptr, context, view);
  if (verdict != ViewVerdict::kTake) {
    if (verdict != ViewVerdict::kSame) bump(io_.counters.views_refused);
    return;
  }
  auto routing = std::make_shared<Routing>();
  if (routing_ && routing_->confirmed && confirmed) {
    routing->kept =
        keep_answering(routing_->view, view, [this](const std::string& id) { return answers(id); });
  }
  routing->view = std::move(view);
  routing->raw = std::move(raw);
  routing->seed_host = seed_host;
  routing->confirmed = confirmed;
  next_to_build_ = std::move(routing);
  build_next();
}

void Core::build_next() {
  if (building_ || !next_to_build_) return;
  building_ = std::move(next_to_build_);
  next_to_build_.reset();
  // Filling the rings of a large cluster takes longer than an operation's deadline may wait.
  if (ring_builder_.joinable()) ring_builder_.join();
  try {
    ring_builder_ = std::thread([this, routing = building_, before = routing_] {
      build(*routing, before.get());
      io_.loop.post([this] { take_routing(); });
    });
  } catch (const std::system_error&) {
    build(*building_, routing_.get());
    io_.loop.post([this] { take_routing(); });
  }
}

void Core::build(Routing& routing, const Routing* before) {
  const auto& nodes = routing.view.nodes;
  const bool alike = std::ranges::all_of(nodes, [](const ViewNode& node) {
    return node.state != NodeState::kDraining && node.read_weight == node.write_weight;
  });
  routing.read = read_ring(routing.view, before != nullptr ? before->read : Ring());
  routing.write = alike ? routing.read : write_ring(routing.view, before != nullptr ? before->write : Ring());
}

void Core::take_routing() {
  auto routing = std::move(building_);
  building_.reset();
  std::map<std::string, std::unique_ptr<NodeLink>> links;
  std::vector<NodeLink*> fresh;
  for (const auto& node : routing->view.nodes) {
    if (node.state == NodeState::kGone) {
      routing->links.push_back(nullptr);
      continue;
    }
    auto endpoints = endpoints_of(node, routing->seed_host);
    auto known = links_.find(node.id);
    if (known != links_.end() && same(known->second->endpoints(), endpoints)) {
      links[node.id] = std::move(known->second);
      links_.erase(known);
    } else {
      links[node.id] = std::make_unique<NodeLink>(io_, resolver_, node.id, std::move(endpoints));
      fresh.push_back(links[node.id].get());
    }
    routing->links.push_back(links[node.id].get());
  }
  // What is in flight to a node that has left is let finish.
  for (auto& [id, link] : links_) retired_.push_back(std::move(link));
  links_ = std::move(links);
  routing_ = std::move(routing);
  no_view_to_be_had_ = false;
  bump(io_.counters.views_taken);
  if (routing_->confirmed) saver_->save(routing_->raw);
  for (auto* link : fresh) link->start();
  {
    const std::lock_guard lock(mutex_);
    ready_ = true;
    raw_view_ = routing_->raw;
  }
  ready_changed_.notify_all();
  std::vector<std::shared_ptr<Operation>> waiting;
  waiting.swap(waiting_);
  for (const auto& op : waiting) plan(op);
  retire_links();
  watch_kept();
  build_next();
}

bool Core::answers(const std::string& node_id) const {
  const auto link = links_.find(node_id);
  return link != links_.end() && link->second->reachable();
}

void Core::watch_kept() {
  if (kept_timer_ != 0 || routing_->kept.empty()) return;
  kept_timer_ = io_.loop.at(Clock::now() + kKeptCheck, [this] {
    kept_timer_ = 0;
    drop_silent();
    watch_kept();
  });
}

// Nodes that were kept because they answered go once they no longer do.
void Core::drop_silent() {
  if (building_ || next_to_build_) return;
  std::set<std::string> silent;
  for (const auto& id : routing_->kept) {
    if (!answers(id)) silent.insert(id);
  }
  if (silent.empty()) return;
  auto routing = std::make_shared<Routing>();
  routing->view = routing_->view;
  routing->kept = routing_->kept;
  std::erase_if(routing->view.nodes, [&](const ViewNode& node) { return silent.contains(node.id); });
  std::erase_if(routing->kept, [&](const std::string& id) { return silent.contains(id); });
  routing->raw = routing_->raw;
  routing->seed_host = routing_->seed_host;
  routing->confirmed = routing_->confirmed;
  next_to_build_ = std::move(routing);
  build_next();
}

void Core::retire_links() {
  std::erase_if(retired_, [](const std::unique_ptr<NodeLink>& link) { return link->idle(); });
  if (retired_.empty() || retire_timer_ != 0) return;
  retire_timer_ = io_.loop.at(Clock::now() + kRetireCheck, [this] {
    retire_timer_ = 0;
    retire_links();
  });
}

void Core::seeds_failed() {
  if (routing_ || building_) return;
  if (auto last = decode_view(io_.options.last_view); last && !last_view_offered_) {
    last_view_offered_ = true;
    offer_view(std::move(*last), io_.options.last_view, "", false);
    if (building_) return;
  }
  // Nobody is there: until somebody is, keys are a miss at once. The seeds are still tried.
  no_view_to_be_had_ = true;
  std::vector<std::shared_ptr<Operation>> waiting;
  waiting.swap(waiting_);
  for (const auto& op : waiting) finish_early(op, Status::kMissNodeDown);
}

}  // namespace dfkv::client
