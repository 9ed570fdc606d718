#include "plan/replay.h"

#include <stdexcept>

#include "plan/node_model.h"

namespace dfkv::plan {

std::vector<std::string_view> replay_names() {
  const auto policies = eviction_policy_names();
  std::vector<std::string_view> names = {"lru-ref", "lru-tail"};
  names.insert(names.end(), policies.begin(), policies.end());
  names.insert(names.end(), {"belady", "unbounded"});
  return names;
}

Replay replay(const Trace& trace, std::string_view name, std::uint64_t capacity_blocks) {
  if (name == "unbounded") return replay_unbounded(trace);
  if (capacity_blocks == 0)
    throw std::invalid_argument("a capacity of 0 blocks holds nothing; give 1 or more");
  if (name == "lru-ref") return replay_lru_reference(trace, capacity_blocks, false);
  if (name == "lru-tail") return replay_lru_reference(trace, capacity_blocks, true);
  if (name == "belady") return replay_belady(trace, capacity_blocks);

  NodeModel node(trace, name, capacity_blocks);
  Replay result;
  result.hits.reserve(trace.requests());
  for (std::size_t i = 0; i < trace.requests(); ++i) {
    const auto request = trace.request(i);
    const std::size_t hits = node.prefix(request);
    node.read(request.first(hits));
    node.write(request.subspan(hits));
    result.hits.push_back(static_cast<std::uint32_t>(hits));
    result.hit_blocks += hits;
  }
  result.written_blocks = node.written();
  result.evicted_blocks = node.evicted();
  return result;
}

}  // namespace dfkv::plan
