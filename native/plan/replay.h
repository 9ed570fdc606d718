// One node replays a trace.
//
// A request asks for its blocks: the leading ones that are held are hits and are read, all others are
// computed and written, also those behind the first miss that are held. Hits behind the first miss do not
// count: an engine cannot use them.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "plan/trace.h"

namespace dfkv::plan {

struct Replay {
  std::vector<std::uint32_t> hits;  // per request, in blocks
  std::uint64_t hit_blocks = 0;
  std::uint64_t written_blocks = 0;
  std::uint64_t evicted_blocks = 0;
};

// What can replay a trace: every policy of the store, and the four that are not online policies of a store:
//   lru-ref   LRU over blocks touched from the head on, each block looked up and inserted in one step
//   lru-tail  LRU over whole requests, touched and inserted from the tail on
//   belady    knows the future: no policy has more hits (it may also leave a block out)
//   unbounded has room for everything
[[nodiscard]] std::vector<std::string_view> replay_names();

// capacity_blocks > 0; unbounded ignores it. Throws std::invalid_argument.
[[nodiscard]] Replay replay(const Trace& trace, std::string_view name, std::uint64_t capacity_blocks);

// The four above, by file.
[[nodiscard]] Replay replay_lru_reference(const Trace& trace, std::uint64_t capacity_blocks, bool tail_first);
[[nodiscard]] Replay replay_belady(const Trace& trace, std::uint64_t capacity_blocks);
[[nodiscard]] Replay replay_unbounded(const Trace& trace);

}  // namespace dfkv::plan
