#include "slab/eviction.h"

#include <cassert>
#include <vector>

namespace dfkv {

namespace {

class LruPolicy final : public EvictionPolicy {
 public:
  void insert(Handle chunk, const ChunkTraits&) override {
    if (chunk >= nodes_.size()) nodes_.resize(chunk + 1);
    assert(!nodes_[chunk].present);
    nodes_[chunk].present = true;
    ++size_;
    link_hottest(chunk);
  }

  void update(Handle, const ChunkTraits&) override {}

  void touch(std::span<const Handle> batch) override {
    for (std::size_t i = batch.size(); i-- > 0;) {
      unlink(batch[i]);
      link_hottest(batch[i]);
    }
  }

  std::optional<Handle> victim(std::size_t limit, const Judge& judge) override {
    // Chunks in use move to the hot end, so a round sees each of them at most once.
    std::size_t left = size_;
    std::size_t looked_at = 0;
    for (Handle chunk = coldest_; chunk != kNone && left > 0 && looked_at < limit; --left) {
      const Handle hotter = nodes_[chunk].hotter;
      switch (judge(chunk)) {
        case Verdict::kTake:
          return chunk;
        case Verdict::kSkip:
          ++looked_at;
          break;
        case Verdict::kInUse:
          unlink(chunk);
          link_hottest(chunk);
          break;
        case Verdict::kStop:
          return std::nullopt;
      }
      chunk = hotter;
    }
    return std::nullopt;
  }

  void remove(Handle chunk, Departure) override {
    assert(chunk < nodes_.size() && nodes_[chunk].present);
    unlink(chunk);
    nodes_[chunk].present = false;
    --size_;
  }

  std::size_t size() const override { return size_; }

  bool consistent() const override {
    std::size_t count = 0;
    Handle previous = kNone;
    for (Handle chunk = coldest_; chunk != kNone; chunk = nodes_[chunk].hotter) {
      if (!nodes_[chunk].present || nodes_[chunk].colder != previous || ++count > size_) return false;
      previous = chunk;
    }
    return count == size_ && hottest_ == previous;
  }

 private:
  static constexpr Handle kNone = ~Handle{0};
  struct Node {
    Handle colder = kNone;
    Handle hotter = kNone;
    bool present = false;
  };

  void unlink(Handle chunk) {
    const Node& node = nodes_[chunk];
    (node.colder == kNone ? coldest_ : nodes_[node.colder].hotter) = node.hotter;
    (node.hotter == kNone ? hottest_ : nodes_[node.hotter].colder) = node.colder;
  }

  void link_hottest(Handle chunk) {
    nodes_[chunk].colder = hottest_;
    nodes_[chunk].hotter = kNone;
    (hottest_ == kNone ? coldest_ : nodes_[hottest_].hotter) = chunk;
    hottest_ = chunk;
  }

  std::vector<Node> nodes_;
  Handle coldest_ = kNone;
  Handle hottest_ = kNone;
  std::size_t size_ = 0;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_lru_policy() { return std::make_unique<LruPolicy>(); }

}  // namespace dfkv
