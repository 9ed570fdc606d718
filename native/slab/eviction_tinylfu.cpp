#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <vector>

#include "slab/eviction.h"
#include "slab/eviction_list.h"

namespace dfkv {

namespace {

constexpr std::size_t kWindowShare = 100;      // the window holds one chunk in this many
constexpr std::size_t kProtectedPercent = 80;  // of the main part

// Counts how often fingerprints were seen, roughly, and halves all counts from time to time so that old fame
// fades.
class Sketch {
 public:
  void count(std::uint64_t fingerprint, std::size_t chunks) {
    if (chunks * kCountersPerChunk > counters_.size()) grow(chunks);
    const std::uint8_t before = estimate(fingerprint);
    if (before < kMost) {
      for (std::size_t row = 0; row < kRows; ++row) {
        std::uint8_t& counter = counters_[place(fingerprint, row)];
        if (counter == before) ++counter;
      }
    }
    if (++seen_ < kSeenPerChunk * chunks) return;
    seen_ /= 2;
    for (std::uint8_t& counter : counters_) counter /= 2;
  }

  [[nodiscard]] std::uint8_t estimate(std::uint64_t fingerprint) const {
    if (counters_.empty()) return 0;
    std::uint8_t least = kMost;
    for (std::size_t row = 0; row < kRows; ++row) least = std::min(least, counters_[place(fingerprint, row)]);
    return least;
  }

 private:
  static constexpr std::size_t kRows = 4;
  static constexpr std::size_t kCountersPerChunk = 8;
  static constexpr std::size_t kSeenPerChunk = 10;
  static constexpr std::size_t kFirstChunks = 1024;
  static constexpr std::uint8_t kMost = 15;

  [[nodiscard]] std::size_t place(std::uint64_t fingerprint, std::size_t row) const {
    constexpr std::array<std::uint64_t, kRows> kOdd = {0x9E3779B97F4A7C15U, 0xC2B2AE3D27D4EB4FU,
                                                       0x165667B19E3779F9U, 0xD6E8FEB86659FD93U};
    const std::uint64_t hash = (fingerprint ^ fingerprint >> 29) * kOdd[row];
    return (hash >> 24) & (counters_.size() - 1);
  }

  // Starts from nothing: a store grows once, while it fills.
  void grow(std::size_t chunks) {
    counters_.assign(std::bit_ceil(std::max(chunks, kFirstChunks) * 2 * kCountersPerChunk), 0);
    seen_ = 0;
  }

  std::vector<std::uint8_t> counters_;
  std::size_t seen_ = 0;
};

class WTinyLfuPolicy final : public EvictionPolicy {
 public:
  void insert(Handle chunk, const ChunkTraits& traits) override {
    if (chunk >= states_.size()) {
      states_.resize(chunk + 1);
      links_.resize(chunk + 1);
    }
    assert(states_[chunk].list == kAbsent);
    states_[chunk] = {traits.fingerprint, kWindow};
    lists_[kWindow].link_hottest(links_, chunk);
    sketch_.count(traits.fingerprint, size());
    // While there is room nothing has to be better than another.
    if (lists_[kWindow].size() > window_target()) move(lists_[kWindow].coldest(), kProbation);
  }

  void update(Handle, const ChunkTraits&) override {}

  void touch(std::span<const Handle> batch) override {
    for (std::size_t i = batch.size(); i-- > 0;) {
      sketch_.count(states_[batch[i]].fingerprint, size());
      move(batch[i], states_[batch[i]].list == kWindow ? kWindow : kProtected);
    }
    const std::size_t most = (size() - lists_[kWindow].size()) * kProtectedPercent / 100;
    while (lists_[kProtected].size() > most) move(lists_[kProtected].coldest(), kProbation);
  }

  void stored(std::span<const Handle> batch) override {
    for (std::size_t i = batch.size(); i-- > 0;) move(batch[i], states_[batch[i]].list);
  }

  std::optional<Handle> victim(std::size_t limit, const Judge& judge) override {
    admit();
    std::size_t looked_at = 0;
    for (const std::uint8_t list : {kProbation, kProtected, kWindow}) {
      std::size_t left = lists_[list].size();
      for (Handle chunk = lists_[list].coldest(); left > 0 && looked_at < limit; --left) {
        const Handle hotter = links_[chunk].hotter;
        switch (judge(chunk)) {
          case Verdict::kTake:
            return chunk;
          case Verdict::kSkip:
            ++looked_at;
            break;
          case Verdict::kInUse:
            move(chunk, list);
            break;
          case Verdict::kStop:
            return std::nullopt;
        }
        chunk = hotter;
      }
    }
    return std::nullopt;
  }

  void remove(Handle chunk, Departure) override {
    assert(states_[chunk].list != kAbsent);
    lists_[states_[chunk].list].unlink(links_, chunk);
    states_[chunk].list = kAbsent;
  }

  std::size_t size() const override {
    return lists_[kWindow].size() + lists_[kProbation].size() + lists_[kProtected].size();
  }

  bool consistent() const override {
    for (const std::uint8_t list : {kWindow, kProbation, kProtected}) {
      if (!lists_[list].consistent(links_,
                                   [this, list](Handle chunk) { return states_[chunk].list == list; })) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr std::uint8_t kWindow = 0;
  static constexpr std::uint8_t kProbation = 1;
  static constexpr std::uint8_t kProtected = 2;
  static constexpr std::uint8_t kAbsent = 3;

  struct State {
    std::uint64_t fingerprint = 0;
    std::uint8_t list = kAbsent;
  };

  [[nodiscard]] std::size_t window_target() const { return std::max<std::size_t>(1, size() / kWindowShare); }

  // The next chunk will push one out of the window. It stays only if it is asked for more often than the one
  // that would go for it: the better of the two ends up behind the other on probation.
  void admit() {
    if (lists_[kWindow].size() < window_target() || size() == lists_[kWindow].size()) return;
    const Handle candidate = lists_[kWindow].coldest();
    const std::uint8_t from = lists_[kProbation].empty() ? kProtected : kProbation;
    const Handle rival = lists_[from].coldest();
    move(candidate, kProbation);
    const bool better =
        sketch_.estimate(states_[candidate].fingerprint) > sketch_.estimate(states_[rival].fingerprint);
    if (better) {
      if (from == kProtected) make_coldest(rival);
    } else {
      make_coldest(candidate);
    }
  }

  void move(Handle chunk, std::uint8_t list) {
    lists_[states_[chunk].list].unlink(links_, chunk);
    states_[chunk].list = list;
    lists_[list].link_hottest(links_, chunk);
  }

  void make_coldest(Handle chunk) {
    lists_[states_[chunk].list].unlink(links_, chunk);
    states_[chunk].list = kProbation;
    lists_[kProbation].link_coldest(links_, chunk);
  }

  std::vector<State> states_;
  HandleList::Links links_;
  std::array<HandleList, 3> lists_;
  Sketch sketch_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_w_tinylfu_policy() { return std::make_unique<WTinyLfuPolicy>(); }

}  // namespace dfkv
