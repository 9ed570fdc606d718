// Several nodes replay a trace: where blocks go, what that costs each node, and what the loss of one costs in
// hits.
//
// A client asks the owner of each block; the hits of a request end at the first block that its owner does not
// hold. All behind that is computed and written to the owners.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/trace.h"

namespace dfkv::plan {

struct ClusterOptions {
  std::uint32_t nodes = 8;
  std::uint64_t capacity_blocks = 0;  // of all nodes together, evenly; 0: room for everything
  std::string_view policy;
  // Runs of so many neighbouring blocks share an owner (the owner of the run's first block). 1: every block
  // its own.
  std::uint32_t run_blocks = 1;
  // Leading blocks of a prefix that are in no run, so that prompts with one head do not pile up on its owner.
  std::uint32_t spread_blocks = 0;
  // A block that was read so often gets a second copy on the node that would own it if its owner were gone.
  // 0: never.
  std::uint32_t copy_after_reads = 0;
  // Share of a node's blocks that may be copies; they are evicted among themselves.
  double copy_share = 0;
  // A node goes, with all it holds, before the request of this number; the others take over its share.
  std::optional<std::uint32_t> lost_node;
  std::uint64_t lost_at = 0;
};

struct NodeLoad {
  std::uint64_t held_blocks = 0;  // at the end, copies included; of a lost node: when it went
  std::uint64_t copy_blocks = 0;  // of those, copies
  std::uint64_t read_blocks = 0;
  std::uint64_t written_blocks = 0;  // copies included
};

struct ClusterReplay {
  std::vector<std::uint32_t> hits;  // per request, in blocks
  std::uint64_t touched = 0;        // nodes asked, summed over the requests
  std::uint64_t copied_blocks = 0;  // written as second copies
  std::vector<NodeLoad> nodes;
};

// Throws std::invalid_argument for options out of range.
[[nodiscard]] ClusterReplay replay_cluster(const Trace& trace, const ClusterOptions& options);

}  // namespace dfkv::plan
