#include "slab/eviction.h"

#include <algorithm>
#include <array>
#include <utility>

namespace dfkv {

namespace {

using Maker = std::unique_ptr<EvictionPolicy> (*)();
constexpr std::array<std::pair<std::string_view, Maker>, 5> kPolicies = {{
    {"lru", make_lru_policy},
    {"s3-fifo", make_s3_fifo_policy},
    {"sieve", make_sieve_policy},
    {"w-tinylfu", make_w_tinylfu_policy},
    {kDefaultEvictionPolicy, make_adaptive_lru_policy},
}};

constexpr auto kNames = [] {
  std::array<std::string_view, kPolicies.size()> names;
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = kPolicies[i].first;
  return names;
}();

}  // namespace

std::span<const std::string_view> eviction_policy_names() { return kNames; }

std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name) {
  const auto found = std::ranges::find(kPolicies, name, &std::pair<std::string_view, Maker>::first);
  return found == kPolicies.end() ? nullptr : found->second();
}

}  // namespace dfkv
