// Which chunk goes next. One interface for every policy, free of store types, so that a simulator replays traces through
// the very same code.
//
// The unit is the chunk with all its parts, named by a small dense handle that the owner of the policy gives out and reuses
// after remove(). Policies do no I/O and read no clock. Not thread-safe: the owner locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

namespace dfkv {

struct ChunkTraits {
  std::uint64_t fingerprint = 0;  // of the chunk's key: lets a policy remember chunks that have gone
  std::uint64_t bytes = 0;        // of all its slots
  std::uint64_t recompute_us = 0; // what recomputing it costs; 0: unknown
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
  // One batch in the order of the prefix. It is touched from its tail to its head, so that the head outlives the tail.
  virtual void touch(std::span<const Handle> batch) = 0;
  // The first chunk in the order of eviction that `judge` takes, after at most `limit` taken or skipped. The chunk
  // stays in until remove(). `judge` must not call the policy.
  [[nodiscard]] virtual std::optional<Handle> victim(std::size_t limit, const Judge& judge) = 0;
  virtual void remove(Handle chunk, Departure departure) = 0;
  [[nodiscard]] virtual std::size_t size() const = 0;
  // Recounts. False: the policy's lists are inconsistent.
  [[nodiscard]] virtual bool consistent() const = 0;
};

// Least recently used first.
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_lru_policy();

}  // namespace dfkv
