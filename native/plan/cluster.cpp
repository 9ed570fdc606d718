#include "plan/cluster.h"

#include <algorithm>
#include <memory>
#include <span>
#include <stdexcept>

#include "net/ring.h"
#include "plan/node_model.h"

namespace dfkv::plan {

namespace {

using client::Ring;
constexpr std::uint32_t kMaxNodes = 1024;

// Room for blocks that a node owns and, apart from it, for copies of others' blocks.
struct Node {
  std::unique_ptr<NodeModel> own;
  std::unique_ptr<NodeModel> copies;
  NodeLoad load;

  [[nodiscard]] bool holds(Block block) const {
    return own->holds(block) || (copies && copies->holds(block));
  }
};

class Cluster {
 public:
  Cluster(const Trace& trace, const ClusterOptions& options)
      : trace_(trace),
        options_(checked(options)),
        reads_(options.copy_after_reads == 0 ? 0 : trace.unique_blocks()) {
    for (std::uint32_t i = 0; i < options_.nodes; ++i) ids_.push_back("node-" + std::to_string(i));
    ring_ = ring_without(options_.nodes);
    for (std::uint32_t i = 0; i < options_.nodes && copying(); ++i) rings_without_.push_back(ring_without(i));
    make_nodes();
    find_routes();
  }

  ClusterReplay run() {
    ClusterReplay result;
    result.hits.reserve(trace_.requests());
    std::vector<bool> touched(options_.nodes);
    for (std::size_t i = 0; i < trace_.requests(); ++i) {
      if (options_.lost_node && i == options_.lost_at) lose(*options_.lost_node);
      const auto request = trace_.request(i);
      std::size_t hits = 0;
      while (hits < request.size() && nodes_[owner(request[hits])].holds(request[hits])) ++hits;
      read(request.first(hits));
      write(request.subspan(hits));
      copy(request.first(hits));
      touched.assign(options_.nodes, false);
      for (const Block block : request) touched[owner(block)] = true;
      result.touched += static_cast<std::uint64_t>(std::ranges::count(touched, true));
      result.hits.push_back(static_cast<std::uint32_t>(hits));
    }
    for (std::uint32_t i = 0; i < options_.nodes; ++i) {
      if (i != lost_) count(nodes_[i]);
      result.nodes.push_back(nodes_[i].load);
    }
    result.copied_blocks = copied_;
    return result;
  }

 private:
  static ClusterOptions checked(ClusterOptions options) {
    if (options.nodes == 0 || options.nodes > kMaxNodes) throw std::invalid_argument("give 1 to 1024 nodes");
    if (options.run_blocks == 0) throw std::invalid_argument("a run has 1 block or more");
    if (!(options.copy_share >= 0 && options.copy_share < 1)) {
      throw std::invalid_argument("the share of copies is at least 0 and below 1");
    }
    if (options.lost_node && (*options.lost_node >= options.nodes || options.nodes == 1)) {
      throw std::invalid_argument("the lost node is one of several");
    }
    if (options.capacity_blocks != 0 && options.capacity_blocks < options.nodes) {
      throw std::invalid_argument("the capacity is less than a block for each node");
    }
    return options;
  }

  [[nodiscard]] bool copying() const {
    return options_.copy_after_reads != 0 && options_.copy_share > 0 && options_.nodes > 1;
  }

  [[nodiscard]] Ring ring_without(std::uint32_t missing) const {
    std::vector<Ring::Member> members;
    for (std::uint32_t i = 0; i < options_.nodes; ++i) members.push_back({ids_[i], i == missing ? 0U : 1U});
    return Ring(members);
  }

  void make_nodes() {
    const std::uint64_t unique = std::max<std::uint64_t>(1, trace_.unique_blocks());
    const bool bounded = options_.capacity_blocks != 0;
    const std::uint64_t total = bounded ? options_.capacity_blocks / options_.nodes : unique;
    // Where there is room for everything, the share is of what a node would come to hold.
    const auto mean = static_cast<double>(bounded ? total : unique / options_.nodes);
    const auto copies = copying() ? static_cast<std::uint64_t>(mean * options_.copy_share) : 0;
    for (std::uint32_t i = 0; i < options_.nodes; ++i) {
      Node node;
      node.own = std::make_unique<NodeModel>(trace_, options_.policy, bounded ? total - copies : unique);
      if (copies != 0) node.copies = std::make_unique<NodeModel>(trace_, options_.policy, copies);
      nodes_.push_back(std::move(node));
    }
  }

  // The route of a block is the key of the first block of its run. A block's place in its prefix never
  // changes.
  void find_routes() {
    std::vector<std::uint32_t> place(trace_.unique_blocks());
    routes_.resize(trace_.unique_blocks());
    for (Block block = 0; block < routes_.size(); ++block) {
      const Block parent = trace_.parent(block);
      place[block] = parent == kNoBlock ? 0 : place[parent] + 1;
      const std::uint32_t spread = options_.spread_blocks;
      const bool starts_run = place[block] < spread || (place[block] - spread) % options_.run_blocks == 0;
      routes_[block] = starts_run ? trace_.key(block) : routes_[parent];
    }
  }

  [[nodiscard]] std::uint32_t owner(Block block) const { return ring_.owner(routes_[block]); }

  // Calls `each(node, its blocks)` for the owners of a batch, in the order of the nodes.
  template <typename Each>
  void by_owner(std::span<const Block> batch, Each&& each) {
    shares_.resize(options_.nodes);
    for (auto& share : shares_) share.clear();
    for (const Block block : batch) shares_[owner(block)].push_back(block);
    for (std::uint32_t i = 0; i < options_.nodes; ++i) {
      if (!shares_[i].empty()) each(nodes_[i], shares_[i]);
    }
  }

  void read(std::span<const Block> batch) {
    by_owner(batch, [this](Node& node, std::span<const Block> share) {
      node.load.read_blocks += share.size();
      for (const Block block : share) {
        if (!node.own->holds(block)) promoted_.push_back(block);
      }
      // A copy that is asked for because its owner has gone becomes the block itself.
      if (!promoted_.empty()) {
        for (const Block block : promoted_) node.copies->remove(block);
        node.own->write(promoted_);
        promoted_.clear();
      }
      held_.clear();
      std::ranges::copy_if(share, std::back_inserter(held_),
                           [&node](Block block) { return node.own->holds(block); });
      node.own->read(held_);
    });
  }

  void write(std::span<const Block> batch) {
    by_owner(batch, [](Node& node, std::span<const Block> share) { node.own->write(share); });
  }

  void copy(std::span<const Block> batch) {
    if (!copying()) return;
    shares_.resize(options_.nodes);
    for (auto& share : shares_) share.clear();
    for (const Block block : batch) {
      std::uint32_t& reads = reads_[block];
      if (reads < options_.copy_after_reads) ++reads;
      if (reads < options_.copy_after_reads) continue;
      const std::uint32_t second = rings_without_[owner(block)].owner(routes_[block]);
      if (second != lost_ && !nodes_[second].own->holds(block)) shares_[second].push_back(block);
    }
    for (std::uint32_t i = 0; i < options_.nodes; ++i) {
      if (shares_[i].empty() || !nodes_[i].copies) continue;
      NodeModel& copies = *nodes_[i].copies;
      const auto held = std::stable_partition(shares_[i].begin(), shares_[i].end(),
                                              [&copies](Block block) { return copies.holds(block); });
      const std::span<const Block> missing(held, shares_[i].end());
      copied_ += missing.size();
      copies.read(std::span(shares_[i].begin(), held));
      copies.write(missing);
    }
  }

  void lose(std::uint32_t node) {
    count(nodes_[node]);
    lost_ = node;
    ring_ = ring_without(node);
  }

  static void count(Node& node) {
    node.load.copy_blocks = node.copies ? node.copies->size() : 0;
    node.load.held_blocks = node.own->size() + node.load.copy_blocks;
    node.load.written_blocks = node.own->written() + (node.copies ? node.copies->written() : 0);
  }

  const Trace& trace_;
  const ClusterOptions options_;
  std::vector<std::string> ids_;
  Ring ring_;
  std::vector<Ring> rings_without_;  // per node
  std::vector<Node> nodes_;
  std::vector<std::uint64_t> routes_;  // per block
  std::vector<std::uint32_t> reads_;   // per block
  std::uint32_t lost_ = ~std::uint32_t{0};
  std::uint64_t copied_ = 0;
  std::vector<std::vector<Block>> shares_;
  std::vector<Block> promoted_;
  std::vector<Block> held_;
};

}  // namespace

ClusterReplay replay_cluster(const Trace& trace, const ClusterOptions& options) {
  return Cluster(trace, options).run();
}

}  // namespace dfkv::plan
