// Two LRU lists: `again` has what was read since it was stored, or is stored a second time while its ghost is
// still known; `once` has the rest. The one that goes is the colder of the two lists' coldest, where `again`
// counts as used later than it was, by a lead. Without a lead this is LRU; with a long one, what nobody came
// back to goes first.
//
// The lead is learned from ghosts, which remember what was evicted from which list. A chunk of `once` that is
// wanted soon after it went says that the lead is too long, one of `again` that it is too short. What went
// lately says most, because it would still be here had the lead been a little different. Time is counted in
// inserted chunks, so that the same traffic is treated alike however fast it comes.
#include <algorithm>
#include <array>
#include <cassert>
#include <vector>

#include "slab/eviction.h"
#include "slab/eviction_ghosts.h"
#include "slab/eviction_list.h"

namespace dfkv {

namespace {

constexpr std::size_t kGhostsPerChunk = 3;
// Times are in turnovers: as many insertions as the store holds chunks.
constexpr double kNear = 0.25;       // what went within this time went lately
constexpr double kFarWeight = 0.25;  // of what went longer ago
constexpr double kMaxLead = 16;
// Below zero the lead has no effect. It may fall that far so that chance alone, where both lists are worth
// the same, does not keep it above.
constexpr double kMinLead = -1;
constexpr double kStep =
    2;  // insertions by which one ghost moves the lead, where both kinds are equally many

class AdaptiveLruPolicy final : public EvictionPolicy {
 public:
  void insert(Handle chunk, const ChunkTraits& traits) override {
    if (chunk >= states_.size()) {
      states_.resize(chunk + 1);
      links_.resize(chunk + 1);
    }
    assert(states_[chunk].list == kAbsent);
    ++now_;
    std::uint8_t list = kOnce;
    if (const auto ghost = ghosts_.take(traits.fingerprint)) {
      learn(*ghost);
      --ghost_counts_[ghost->kind];
      list = kAgain;
    }
    states_[chunk] = {traits.fingerprint, now_, list};
    lists_[list].link_hottest(links_, chunk);
  }

  void update(Handle, const ChunkTraits&) override {}

  void touch(std::span<const Handle> batch) override {
    for (std::size_t i = batch.size(); i-- > 0;) use(batch[i], kAgain);
  }

  void stored(std::span<const Handle> batch) override {
    for (std::size_t i = batch.size(); i-- > 0;) use(batch[i], states_[batch[i]].list);
  }

  std::optional<Handle> victim(std::size_t limit, const Judge& judge) override {
    // Chunks in use move to the hot end of their list, so a round sees each of them at most once.
    std::array<std::size_t, 2> left = {lists_[kOnce].size(), lists_[kAgain].size()};
    std::array<Handle, 2> at = {lists_[kOnce].coldest(), lists_[kAgain].coldest()};
    for (std::size_t looked_at = 0; looked_at < limit && left[kOnce] + left[kAgain] > 0;) {
      const std::uint8_t list = goes_first(left, at);
      const Handle chunk = at[list];
      at[list] = links_[chunk].hotter;
      --left[list];
      switch (judge(chunk)) {
        case Verdict::kTake:
          return chunk;
        case Verdict::kSkip:
          ++looked_at;
          break;
        case Verdict::kInUse:
          use(chunk, list);
          break;
        case Verdict::kStop:
          return std::nullopt;
      }
    }
    return std::nullopt;
  }

  void remove(Handle chunk, Departure departure) override {
    State& state = states_[chunk];
    assert(state.list != kAbsent);
    if (departure == Departure::kEvicted) {
      remember({state.fingerprint, now_, state.list}, kGhostsPerChunk * size());
    }
    lists_[state.list].unlink(links_, chunk);
    state.list = kAbsent;
  }

  std::size_t size() const override { return lists_[kOnce].size() + lists_[kAgain].size(); }

  bool consistent() const override {
    for (const std::uint8_t list : {kOnce, kAgain}) {
      if (!lists_[list].consistent(links_,
                                   [this, list](Handle chunk) { return states_[chunk].list == list; })) {
        return false;
      }
    }
    const auto counts = ghosts_.recount(ghost_counts_.size());
    return ghosts_.consistent() && std::ranges::equal(counts, ghost_counts_);
  }

 private:
  static constexpr std::uint8_t kOnce = 0;
  static constexpr std::uint8_t kAgain = 1;
  static constexpr std::uint8_t kAbsent = 2;

  struct State {
    std::uint64_t fingerprint = 0;
    std::uint64_t used_at = 0;
    std::uint8_t list = kAbsent;
  };

  void use(Handle chunk, std::uint8_t list) {
    State& state = states_[chunk];
    lists_[state.list].unlink(links_, chunk);
    state.list = list;
    state.used_at = now_;
    lists_[list].link_hottest(links_, chunk);
  }

  [[nodiscard]] std::uint8_t goes_first(const std::array<std::size_t, 2>& left,
                                        const std::array<Handle, 2>& at) const {
    if (left[kOnce] == 0) return kAgain;
    if (left[kAgain] == 0) return kOnce;
    const auto once = static_cast<double>(states_[at[kOnce]].used_at);
    const auto again = static_cast<double>(states_[at[kAgain]].used_at);
    return once <= again + std::max(lead_, 0.0) ? kOnce : kAgain;
  }

  // A list with few ghosts that are asked for is worth more than one with many: the step is weighed by their
  // numbers.
  void learn(const GhostQueue::Ghost& ghost) {
    const auto turnover = static_cast<double>(size() + 1);
    const bool near = static_cast<double>(now_ - ghost.evicted_at) <= kNear * turnover;
    const std::uint8_t other = ghost.kind == kOnce ? kAgain : kOnce;
    const double ratio =
        static_cast<double>(ghost_counts_[other]) / static_cast<double>(ghost_counts_[ghost.kind]);
    const double step = kStep * (near ? 1.0 : kFarWeight) * std::max(1.0, ratio);
    lead_ = std::clamp(ghost.kind == kOnce ? lead_ - step : lead_ + step, kMinLead * turnover,
                       kMaxLead * turnover);
  }

  void remember(const GhostQueue::Ghost& ghost, std::size_t most) {
    if (const auto known = ghosts_.take(ghost.fingerprint)) --ghost_counts_[known->kind];
    ghosts_.push(ghost);
    ++ghost_counts_[ghost.kind];
    while (ghosts_.size() > most) --ghost_counts_[ghosts_.take_oldest().kind];
  }

  std::vector<State> states_;
  HandleList::Links links_;
  std::array<HandleList, 2> lists_;
  GhostQueue ghosts_;
  std::array<std::size_t, 2> ghost_counts_{};
  std::uint64_t now_ = 0;  // insertions so far
  double lead_ = 0;        // in insertions
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_adaptive_lru_policy() { return std::make_unique<AdaptiveLruPolicy>(); }

}  // namespace dfkv
