#include <algorithm>
#include <array>
#include <cassert>
#include <vector>

#include "slab/eviction.h"
#include "slab/eviction_ghosts.h"
#include "slab/eviction_list.h"

namespace dfkv {

namespace {

constexpr std::size_t kSmallShare = 10;  // the small queue is kept to one chunk in this many
constexpr std::uint8_t kMaxReads = 3;

class S3FifoPolicy final : public EvictionPolicy {
 public:
  void insert(Handle chunk, const ChunkTraits& traits) override {
    if (chunk >= states_.size()) {
      states_.resize(chunk + 1);
      links_.resize(chunk + 1);
    }
    assert(states_[chunk].queue == kAbsent);
    const std::uint8_t queue = ghosts_.take(traits.fingerprint) ? kMain : kSmall;
    states_[chunk] = {traits.fingerprint, 0, queue};
    queues_[queue].link_hottest(links_, chunk);
  }

  void update(Handle, const ChunkTraits&) override {}

  void touch(std::span<const Handle> batch) override {
    for (const Handle chunk : batch) count(states_[chunk]);
  }

  void stored(std::span<const Handle>) override {}

  std::optional<Handle> victim(std::size_t limit, const Judge& judge) override {
    std::array<Handle, 2> at = {queues_[kSmall].coldest(), queues_[kMain].coldest()};
    std::size_t passed = 0;  // skipped in the small queue: they still fill it
    // Every chunk is met once for each read that it was counted for, and once more.
    std::size_t steps = (kMaxReads + 1) * size() + 1;
    for (std::size_t looked_at = 0; looked_at < limit && steps-- > 0;) {
      const bool small_is_full =
          queues_[kSmall].size() - passed >= std::max<std::size_t>(1, size() / kSmallShare);
      std::uint8_t queue = small_is_full ? kSmall : kMain;
      if (at[queue] == HandleList::kNone) queue = queue == kSmall ? kMain : kSmall;
      const Handle chunk = at[queue];
      if (chunk == HandleList::kNone) return std::nullopt;
      at[queue] = links_[chunk].hotter;
      State& state = states_[chunk];
      if (queue == kSmall && state.reads > 1) {
        state.reads = 0;
        move(chunk, kMain, at);
        continue;
      }
      if (queue == kMain && state.reads > 0) {
        --state.reads;
        move(chunk, kMain, at);
        continue;
      }
      switch (judge(chunk)) {
        case Verdict::kTake:
          return chunk;
        case Verdict::kSkip:
          ++looked_at;
          if (queue == kSmall) ++passed;
          break;
        case Verdict::kInUse:
          count(state);
          move(chunk, queue, at);
          break;
        case Verdict::kStop:
          return std::nullopt;
      }
    }
    return std::nullopt;
  }

  void remove(Handle chunk, Departure departure) override {
    State& state = states_[chunk];
    assert(state.queue != kAbsent);
    queues_[state.queue].unlink(links_, chunk);
    if (departure == Departure::kEvicted && state.queue == kSmall) {
      ghosts_.push({state.fingerprint, 0, 0});
      while (ghosts_.size() > size() - size() / kSmallShare) (void)ghosts_.take_oldest();
    }
    state.queue = kAbsent;
  }

  std::size_t size() const override { return queues_[kSmall].size() + queues_[kMain].size(); }

  bool consistent() const override {
    for (const std::uint8_t queue : {kSmall, kMain}) {
      if (!queues_[queue].consistent(links_,
                                     [this, queue](Handle chunk) { return states_[chunk].queue == queue; })) {
        return false;
      }
    }
    return ghosts_.consistent();
  }

 private:
  static constexpr std::uint8_t kSmall = 0;
  static constexpr std::uint8_t kMain = 1;
  static constexpr std::uint8_t kAbsent = 2;

  struct State {
    std::uint64_t fingerprint = 0;
    std::uint8_t reads = 0;
    std::uint8_t queue = kAbsent;
  };

  static void count(State& state) { state.reads = std::min<std::uint8_t>(kMaxReads, state.reads + 1); }

  // To the hot end. A cursor that had run off that queue goes on with it.
  void move(Handle chunk, std::uint8_t queue, std::array<Handle, 2>& at) {
    State& state = states_[chunk];
    queues_[state.queue].unlink(links_, chunk);
    state.queue = queue;
    queues_[queue].link_hottest(links_, chunk);
    if (at[queue] == HandleList::kNone) at[queue] = chunk;
  }

  std::vector<State> states_;
  HandleList::Links links_;
  std::array<HandleList, 2> queues_;
  GhostQueue ghosts_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_s3_fifo_policy() { return std::make_unique<S3FifoPolicy>(); }

}  // namespace dfkv
