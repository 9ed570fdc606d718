// What policies are compared with.
#include <algorithm>
#include <vector>

#include "plan/replay.h"
#include "slab/eviction_list.h"

namespace dfkv::plan {

namespace {

class ReferenceLru {
 public:
  ReferenceLru(std::size_t blocks, std::uint64_t capacity)
      : capacity_(capacity), links_(blocks), held_(blocks) {}

  [[nodiscard]] bool holds(Block block) const { return held_[block]; }
  void use(Block block, Replay& result) {
    if (held_[block]) {
      order_.heat(links_, block);
      return;
    }
    if (order_.size() == capacity_) {
      const Block coldest = order_.coldest();
      order_.unlink(links_, coldest);
      held_[coldest] = false;
      ++result.evicted_blocks;
    }
    order_.link_hottest(links_, block);
    held_[block] = true;
    ++result.written_blocks;
  }

 private:
  std::uint64_t capacity_;
  HandleList::Links links_;
  std::vector<bool> held_;
  HandleList order_;
};

}  // namespace

Replay replay_lru_reference(const Trace& trace, std::uint64_t capacity_blocks, bool tail_first) {
  ReferenceLru cache(trace.unique_blocks(), capacity_blocks);
  Replay result;
  result.hits.reserve(trace.requests());
  for (std::size_t i = 0; i < trace.requests(); ++i) {
    const auto request = trace.request(i);
    std::uint32_t hits = 0;
    if (tail_first) {
      while (hits < request.size() && cache.holds(request[hits])) ++hits;
      for (std::size_t at = request.size(); at-- > 0;) cache.use(request[at], result);
    } else {
      bool in_prefix = true;
      for (const Block block : request) {
        in_prefix = in_prefix && cache.holds(block);
        if (in_prefix) ++hits;
        cache.use(block, result);
      }
    }
    result.hits.push_back(hits);
    result.hit_blocks += hits;
  }
  return result;
}

Replay replay_unbounded(const Trace& trace) {
  std::vector<bool> seen(trace.unique_blocks());
  Replay result;
  result.hits.reserve(trace.requests());
  for (std::size_t i = 0; i < trace.requests(); ++i) {
    const auto request = trace.request(i);
    std::uint32_t hits = 0;
    while (hits < request.size() && seen[request[hits]]) ++hits;
    for (const Block block : request) seen[block] = true;
    result.hits.push_back(hits);
    result.hit_blocks += hits;
  }
  result.written_blocks = trace.unique_blocks();
  return result;
}

}  // namespace dfkv::plan
