// From an operation to requests: who owns which keys, and over how many connections they go.
#include <algorithm>

#include "net/client_core.h"

namespace dfkv::client {

namespace {

// A second connection is worth its wake-ups from about this much payload on.
constexpr std::uint64_t kSplitBytes = 1024 * 1024;
constexpr std::uint32_t kNamespacesPerPage = 512;

// Nodes look up at most this many objects for one request.
constexpr std::size_t kMaxLookupsPerRequest = 1 << 20;

std::size_t most_keys(const Input& input) {
  if (input.kind != Kind::kExists) return kMaxItemsPerRequest;
  return std::min<std::size_t>(kMaxChunksPerRequest, kMaxLookupsPerRequest / input.parts.size());
}

// Cuts `keys` into runs of about equal bytes, as many as are worth a connection, none over the wire's limit.
std::vector<std::vector<std::uint32_t>> cut(const Input& input, std::vector<std::uint32_t> keys,
                                            std::uint32_t connections) {
  const bool payload = input.kind == Kind::kGet || input.kind == Kind::kPut;
  std::uint64_t total = 0;
  if (payload) {
    for (const auto key : keys) total += input.length(key);
  }
  const std::uint64_t runs = std::clamp<std::uint64_t>(total / kSplitBytes, 1, connections);
  const std::uint64_t bytes_per_run = total / runs;
  const auto limit = most_keys(input);
  std::vector<std::vector<std::uint32_t>> result;
  if (runs == 1 && keys.size() <= limit) {
    result.push_back(std::move(keys));
    return result;
  }
  std::uint64_t bytes = 0;
  for (const auto key : keys) {
    const bool full = !result.empty() && (result.back().size() == limit ||
                                          (runs > 1 && result.size() < runs && bytes >= bytes_per_run));
    if (result.empty() || full) {
      result.emplace_back();
      bytes = 0;
    }
    result.back().push_back(key);
    if (payload) bytes += input.length(key);
  }
  return result;
}

std::vector<std::uint32_t> all_keys(const Input& input) {
  std::vector<std::uint32_t> keys(input.count);
  for (std::uint32_t i = 0; i < input.count; ++i) keys[i] = i;
  return keys;
}

}  // namespace

void Core::plan(const std::shared_ptr<Operation>& op) {
  const auto kind = op->kind();
  const auto nodes = static_cast<std::uint32_t>(
      std::ranges::count_if(node_links_, [](const NodeLink* link) { return link != nullptr; }));
  op->begin(is_keyed(kind) ? op->input.count : nodes, routing_->view.revision);
  // The operation ends when its last request does: one is held here until all have been handed on.
  op->open_requests = 1;
  switch (kind) {
    case Kind::kExists:
    case Kind::kGet:
      plan_keys(op, routing_->read, all_keys(op->input));
      break;
    case Kind::kPut:
      plan_keys(op, routing_->write, all_keys(op->input));
      break;
    case Kind::kRemove:
      plan_removal(op);
      break;
    default:
      plan_nodes(op);
  }
  if (--op->open_requests == 0) complete(op);
}

void Core::plan_removal(const std::shared_ptr<Operation>& op) {
  // While a node drains, a key may be with the node that is read and with the one that is written.
  std::vector<std::uint32_t> elsewhere;
  if (!routing_->read.empty() && !routing_->write.empty()) {
    for (std::uint32_t key = 0; key < op->input.count; ++key) {
      const auto route = op->input.route(key);
      if (routing_->read.owner(route) == routing_->write.owner(route)) continue;
      elsewhere.push_back(key);
      op->expect_another(key);
    }
  }
  plan_keys(op, routing_->write.empty() ? routing_->read : routing_->write, all_keys(op->input));
  if (!elsewhere.empty() && !op->done()) plan_keys(op, routing_->read, std::move(elsewhere));
}

void Core::plan_keys(const std::shared_ptr<Operation>& op, const Ring& ring,
                     std::vector<std::uint32_t> keys) {
  const Input& input = op->input;
  if (ring.empty()) {
    // Every node is draining or joining: nothing can be written now.
    for (const auto key : keys) op->end_key(key, Status::kAgainDraining);
    return;
  }
  std::vector<std::vector<std::uint32_t>> owned(node_links_.size());
  if (owned.size() == 1) {
    owned[0] = std::move(keys);
  } else {
    for (const auto key : keys) owned[ring.owner(input.route(key))].push_back(key);
  }
  std::vector<std::pair<NodeLink*, std::shared_ptr<Request>>> made;
  for (std::size_t node = 0; node < owned.size(); ++node) {
    if (owned[node].empty()) continue;
    auto* link = node_links_[node];
    if (link == nullptr) {
      for (const auto key : owned[node]) op->end_key(key, Status::kMissNodeDown);
      continue;
    }
    for (auto& run : cut(input, std::move(owned[node]), connections_for(op->kind()))) {
      auto request = std::make_shared<Request>();
      request->opcode = opcode_of(op->kind());
      request->meta.ns = input.ns;
      request->meta.lease_ms = input.lease_ms;
      request->meta.ack = input.ack;
      request->meta.replace = input.replace;
      request->meta.recompute_us = input.recompute_us;
      request->deadline = op->deadline;
      request->op = op;
      request->node_id = link->node_id();
      request->keys = std::move(run);
      if (op->kind() == Kind::kGet || op->kind() == Kind::kPut) {
        for (const auto key : request->keys) request->payload_bytes += input.length(key);
      }
      op->requests.push_back(request);
      ++op->open_requests;
      made.emplace_back(link, std::move(request));
    }
  }
  for (auto& [link, request] : made) link->submit(std::move(request));
}

// One connection is left to loads: a PUT waits on its connection while the node has no memory for it.
std::uint32_t Core::connections_for(Kind kind) const {
  const std::uint32_t all = io_.options.connections_per_node;
  return kind == Kind::kPut && all > 1 ? all - 1 : all;
}

void Core::plan_nodes(const std::shared_ptr<Operation>& op) {
  auto& answers = op->mutable_answers();
  for (const auto* link : node_links_) {
    if (link != nullptr) answers.push_back({link->node_id(), Status::kMissNodeDown, 0, {}});
  }
  for (std::uint32_t i = 0; i < answers.size(); ++i) ask_node(op, i, 0);
}

void Core::ask_node(const std::shared_ptr<Operation>& op, std::uint32_t index, std::uint64_t cursor) {
  auto request = std::make_shared<Request>();
  const auto kind = op->kind();
  request->opcode = opcode_of(kind);
  request->node_id = op->answers()[index].node_id;
  request->deadline = op->deadline;
  request->op = op;
  if (kind == Kind::kErase) request->meta.ns = op->input.ns;
  if (kind == Kind::kList) {
    request->meta.cursor = cursor;
    request->meta.limit = kNamespacesPerPage;
  }
  const auto asked_at = Clock::now();
  request->ended = [this, index, asked_at, cursor](Request& ended, Status status, const ReplyMeta* reply,
                                                   Bytes payload) {
    const auto op = ended.op;
    if (!op || ended.detached) return;
    auto& answer = op->mutable_answers()[index];
    answer.status = status;
    if (reply != nullptr) {
      op->count_round_trip();
      answer.value = reply->length;
      if (op->kind() == Kind::kPing) {
        const auto time = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - asked_at);
        answer.value = static_cast<std::uint64_t>(time.count());
      }
      if (!payload.empty()) answer.payloads.emplace_back(payload.begin(), payload.end());
      // Pages only go forward: a cursor that does not grow would never end.
      if (op->kind() == Kind::kList && is_done(status) && reply->cursor > cursor) {
        return ask_node(op, index, reply->cursor);
      }
    }
    op->end_key(index, status);
  };
  op->requests.push_back(request);
  ++op->open_requests;
  const auto it = links_.find(request->node_id);
  if (it == links_.end()) return end_request(io_, *request, Status::kMissNodeDown);
  it->second->submit(std::move(request));
}

}  // namespace dfkv::client
