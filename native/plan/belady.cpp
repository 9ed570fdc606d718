// The bound: of all blocks, those asked for latest go first, the deepest of a request before those above it.
// Since a block is never asked for without its prefix, what is held then stays whole prefixes, and every held
// block is a hit.
//
// It decides after each request, and may keep a block of that request out: no policy that has to
// decide block by block, or must let in what it writes, can have more hits.
#include <algorithm>
#include <limits>
#include <vector>

#include "plan/replay.h"

namespace dfkv::plan {

namespace {

constexpr std::uint32_t kNever = std::numeric_limits<std::uint32_t>::max();

struct Entry {
  std::uint32_t next;   // request that asks for it next
  std::uint32_t depth;  // in the request that asked for it last
  Block block;
  // The top of the heap goes first.
  bool operator<(const Entry& other) const {
    if (next != other.next) return next < other.next;
    if (depth != other.depth) return depth < other.depth;
    return block < other.block;
  }
};

// Per place in the trace, the next request that has the block.
std::vector<std::uint32_t> next_uses(const Trace& trace) {
  std::vector<std::uint32_t> next(trace.blocks());
  std::vector<std::uint32_t> later(trace.unique_blocks(), kNever);
  std::size_t place = next.size();
  for (std::size_t i = trace.requests(); i-- > 0;) {
    const auto request = trace.request(i);
    place -= request.size();
    for (std::size_t at = 0; at < request.size(); ++at) next[place + at] = later[request[at]];
    for (const Block block : request) later[block] = static_cast<std::uint32_t>(i);
  }
  return next;
}

class Cache {
 public:
  Cache(std::size_t blocks, std::uint64_t capacity) : capacity_(capacity), next_(blocks), held_(blocks) {}

  [[nodiscard]] bool holds(Block block) const { return held_[block]; }
  void use(Block block, std::uint32_t depth, std::uint32_t next) {
    if (!held_[block]) ++size_;
    held_[block] = true;
    next_[block] = next;
    heap_.push_back({next, depth, block});
    std::push_heap(heap_.begin(), heap_.end());
  }
  std::uint64_t shrink() {
    std::uint64_t evicted = 0;
    while (size_ > capacity_) {
      const Entry last = heap_.front();
      std::pop_heap(heap_.begin(), heap_.end());
      heap_.pop_back();
      if (stale(last)) continue;
      held_[last.block] = false;
      --size_;
      ++evicted;
    }
    // What was asked for again has left entries behind.
    if (heap_.size() > 4 * size_ + 1024) {
      std::erase_if(heap_, [this](const Entry& entry) { return stale(entry); });
      std::make_heap(heap_.begin(), heap_.end());
    }
    return evicted;
  }

 private:
  [[nodiscard]] bool stale(const Entry& entry) const {
    return !held_[entry.block] || next_[entry.block] != entry.next;
  }

  std::uint64_t capacity_;
  std::uint64_t size_ = 0;
  std::vector<std::uint32_t> next_;
  std::vector<bool> held_;
  std::vector<Entry> heap_;
};

}  // namespace

Replay replay_belady(const Trace& trace, std::uint64_t capacity_blocks) {
  const auto next = next_uses(trace);
  Cache cache(trace.unique_blocks(), capacity_blocks);
  Replay result;
  result.hits.reserve(trace.requests());
  std::size_t place = 0;
  for (std::size_t i = 0; i < trace.requests(); ++i) {
    const auto request = trace.request(i);
    std::uint32_t hits = 0;
    while (hits < request.size() && cache.holds(request[hits])) ++hits;
    for (std::size_t at = 0; at < request.size(); ++at) {
      if (!cache.holds(request[at])) ++result.written_blocks;
      cache.use(request[at], static_cast<std::uint32_t>(at), next[place + at]);
    }
    result.evicted_blocks += cache.shrink();
    place += request.size();
    result.hits.push_back(hits);
    result.hit_blocks += hits;
  }
  return result;
}

}  // namespace dfkv::plan
