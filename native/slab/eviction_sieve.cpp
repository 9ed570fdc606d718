#include <cassert>
#include <vector>

#include "slab/eviction.h"
#include "slab/eviction_list.h"

namespace dfkv {

namespace {

class SievePolicy final : public EvictionPolicy {
 public:
  void insert(Handle chunk, const ChunkTraits&) override {
    if (chunk >= states_.size()) {
      states_.resize(chunk + 1);
      links_.resize(chunk + 1);
    }
    assert(!states_[chunk].present);
    states_[chunk] = {true, false, 0};
    order_.link_hottest(links_, chunk);
  }

  void update(Handle, const ChunkTraits&) override {}

  void touch(std::span<const Handle> batch) override {
    for (const Handle chunk : batch) states_[chunk].read = true;
  }

  void stored(std::span<const Handle>) override {}

  std::optional<Handle> victim(std::size_t limit, const Judge& judge) override {
    // The first round takes marks away; the second offers the chunks that lost theirs in the first.
    ++search_;
    Handle at = hand_ == HandleList::kNone ? order_.coldest() : hand_;
    std::size_t looked_at = 0;
    for (const bool first : {true, false}) {
      for (std::size_t left = order_.size(); left > 0 && looked_at < limit; --left) {
        const Handle chunk = at;
        at = links_[chunk].hotter == HandleList::kNone ? order_.coldest() : links_[chunk].hotter;
        State& state = states_[chunk];
        if (first && state.read) {
          state.read = false;
          state.passed_in = search_;
          continue;
        }
        if (!first && (state.read || state.passed_in != search_)) continue;
        switch (judge(chunk)) {
          case Verdict::kTake:
            hand_ = chunk;
            return chunk;
          case Verdict::kSkip:
            ++looked_at;
            break;
          case Verdict::kInUse:
            state.read = true;
            break;
          case Verdict::kStop:
            return std::nullopt;
        }
      }
    }
    return std::nullopt;
  }

  void remove(Handle chunk, Departure) override {
    assert(chunk < states_.size() && states_[chunk].present);
    if (hand_ == chunk) hand_ = links_[chunk].hotter;  // at the hot end: starts again
    order_.unlink(links_, chunk);
    states_[chunk].present = false;
  }

  std::size_t size() const override { return order_.size(); }

  bool consistent() const override {
    const auto present = [this](Handle chunk) { return states_[chunk].present; };
    return order_.consistent(links_, present) && (hand_ == HandleList::kNone || present(hand_));
  }

 private:
  struct State {
    bool present = false;
    bool read = false;
    std::uint32_t passed_in = 0;  // the search that took its mark away
  };

  std::vector<State> states_;
  HandleList::Links links_;
  HandleList order_;  // oldest first
  Handle hand_ = HandleList::kNone;
  std::uint32_t search_ = 0;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_sieve_policy() { return std::make_unique<SievePolicy>(); }

}  // namespace dfkv
