#include <cassert>

#include "slab/eviction.h"
#include "slab/eviction_list.h"

namespace dfkv {

namespace {

class LruPolicy final : public EvictionPolicy {
 public:
  void insert(Handle chunk, const ChunkTraits&) override {
    if (chunk >= links_.size()) {
      links_.resize(chunk + 1);
      present_.resize(chunk + 1);
    }
    assert(!present_[chunk]);
    present_[chunk] = true;
    order_.link_hottest(links_, chunk);
  }

  void update(Handle, const ChunkTraits&) override {}

  void touch(std::span<const Handle> batch) override {
    for (std::size_t i = batch.size(); i-- > 0;) order_.heat(links_, batch[i]);
  }

  void stored(std::span<const Handle> batch) override { touch(batch); }

  std::optional<Handle> victim(std::size_t limit, const Judge& judge) override {
    // Chunks in use move to the hot end, so a round sees each of them at most once.
    std::size_t left = order_.size();
    std::size_t looked_at = 0;
    for (Handle chunk = order_.coldest(); left > 0 && looked_at < limit; --left) {
      const Handle hotter = links_[chunk].hotter;
      switch (judge(chunk)) {
        case Verdict::kTake:
          return chunk;
        case Verdict::kSkip:
          ++looked_at;
          break;
        case Verdict::kInUse:
          order_.heat(links_, chunk);
          break;
        case Verdict::kStop:
          return std::nullopt;
      }
      chunk = hotter;
    }
    return std::nullopt;
  }

  void remove(Handle chunk, Departure) override {
    assert(chunk < present_.size() && present_[chunk]);
    order_.unlink(links_, chunk);
    present_[chunk] = false;
  }

  std::size_t size() const override { return order_.size(); }

  bool consistent() const override {
    return order_.consistent(links_, [this](Handle chunk) { return present_[chunk]; });
  }

 private:
  HandleList::Links links_;
  std::vector<bool> present_;
  HandleList order_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_lru_policy() { return std::make_unique<LruPolicy>(); }

}  // namespace dfkv
