// Which chunk goes next. One interface for every policy, free of store types, so that the simulator replays
// traces through the very same code.
//
// The unit is the chunk with all its parts, named by a small dense handle that the owner of the policy gives
// out and reuses after remove(). Policies do no I/O and read no clock. Not thread-safe: the owner locks.
// Every operation is O(1) for each chunk named; a search for a victim is O(1) for each chunk looked at,
// amortised.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

namespace dfkv {

struct ChunkTraits {
  std::uint64_t fingerprint = 0;   // of the chunk's key: lets a policy remember chunks that have gone
  std::uint64_t bytes = 0;         // of all its slots
  std::uint64_t recompute_us = 0;  // what recomputing it costs; 0: unknown
};

enum class Verdict : std::uint8_t {
  kTake,
  kSkip,   // not this time; keep its place
  kInUse,  // pinned: counts as a use, so that it is not looked at again and again
  kStop,   // neither this one nor any after it
};

enum class Departure : std::uint8_t { kEvicted, kRemoved };

class EvictionPolicy {
 public:
  using Handle = std::uint32_t;
  using Judge = std::function<Verdict(Handle)>;

  virtual ~EvictionPolicy() = default;
  // The chunk counts as used now. Precondition: the handle is not in the policy.
  virtual void insert(Handle chunk, const ChunkTraits& traits) = 0;
  // Its parts changed.
  virtual void update(Handle chunk, const ChunkTraits& traits) = 0;
  // One batch was read, in the order of the prefix. It is touched from its tail to its head, so that the head
  // outlives the tail.
  virtual void touch(std::span<const Handle> batch) = 0;
  // One batch was written, in the order of the prefix: as recent as if it had been read, but no sign that
  // anybody wants it again.
  virtual void stored(std::span<const Handle> batch) = 0;
  // The first chunk in the order of eviction that `judge` takes, after at most `limit` taken or skipped. The
  // chunk stays in until remove(). `judge` must not call the policy.
  [[nodiscard]] virtual std::optional<Handle> victim(std::size_t limit, const Judge& judge) = 0;
  virtual void remove(Handle chunk, Departure departure) = 0;
  [[nodiscard]] virtual std::size_t size() const = 0;
  // Recounts. False: the policy's lists are inconsistent.
  [[nodiscard]] virtual bool consistent() const = 0;
};

// Least recently used first.
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_lru_policy();
// Least recently used first, but chunks that were read again count as younger than they are, by a lead that
// is learned from what is asked for after it was evicted.
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_adaptive_lru_policy();
// S3-FIFO: a small queue for new chunks, a main one for those that were read in it, and ghosts.
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_s3_fifo_policy();
// SIEVE: one queue and a hand that passes over what was read since it last came by.
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_sieve_policy();
// W-TinyLFU: a small LRU window, and a segmented LRU behind it that admits by estimated frequency.
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_w_tinylfu_policy();

// What stores use, chosen by replaying traces (docs/decisions/011-eviction-policy.md).
inline constexpr std::string_view kDefaultEvictionPolicy = "adaptive-lru";

// The names make_eviction_policy() knows.
[[nodiscard]] std::span<const std::string_view> eviction_policy_names();
// Null: there is no policy of this name.
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name);

}  // namespace dfkv
