// From a routing to links with its nodes.
#include <algorithm>

#include "net/client_core.h"

namespace dfkv::client {

namespace {
constexpr std::chrono::milliseconds kRetireCheck{100};

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

void Core::take_routing(std::shared_ptr<const Routing> routing) {
  node_links_.clear();
  std::map<std::string, std::unique_ptr<NodeLink>> links;
  std::vector<NodeLink*> fresh;
  for (const auto& node : routing->view.nodes) {
    if (node.state == NodeState::kGone) {
      node_links_.push_back(nullptr);
      continue;
    }
    auto endpoints = endpoints_of(node, routing->seed_host);
    auto known = links_.find(node.id);
    if (known != links_.end() && same(known->second->endpoints(), endpoints)) {
      links[node.id] = std::move(known->second);
      links_.erase(known);
    } else {
      links[node.id] = std::make_unique<NodeLink>(io_, resolver_, lane_, node.id, std::move(endpoints));
      fresh.push_back(links[node.id].get());
    }
    node_links_.push_back(links[node.id].get());
  }
  // What is in flight to a node that has left is let finish.
  for (auto& [id, link] : links_) retired_.push_back(std::move(link));
  links_ = std::move(links);
  routing_ = std::move(routing);
  no_view_to_be_had_ = false;
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
}

bool Core::answers(const std::string& node_id) const {
  const auto link = links_.find(node_id);
  return link != links_.end() && link->second->reachable();
}

bool Core::any_answers() const {
  return std::ranges::any_of(links_, [](const auto& link) { return link.second->reachable(); });
}

void Core::retire_links() {
  std::erase_if(retired_, [](const std::unique_ptr<NodeLink>& link) { return link->idle(); });
  if (retired_.empty() || retire_timer_ != 0) return;
  retire_timer_ = io_.loop.at(Clock::now() + kRetireCheck, [this] {
    retire_timer_ = 0;
    retire_links();
  });
}

// Nobody is there: until somebody is, keys are a miss at once. The seeds are still tried.
void Core::no_routing() {
  no_view_to_be_had_ = true;
  std::vector<std::shared_ptr<Operation>> waiting;
  waiting.swap(waiting_);
  for (const auto& op : waiting) finish_early(op, Status::kMissNodeDown);
}

}  // namespace dfkv::client
