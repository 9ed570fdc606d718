// The namespaces a node knows, with their descriptors. Thread-safe; descriptors never change once registered.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "wire/identity.h"
#include "wire/payloads.h"
#include "wire/status.h"

namespace dfkv {

class NamespaceRegistry {
 public:
  using Index = std::uint32_t;
  struct Limits {
    std::uint32_t max_namespaces = 4096;
    std::uint64_t max_descriptor_bytes = 64 * 1024 * 1024;  // of all of them together
  };

  // tenant: the only one that descriptors may name; nullopt: any.
  NamespaceRegistry(Limits limits, std::optional<std::vector<std::byte>> tenant);

  // Registering one that is known renews its label and its time of use. kRefusedNamespace: the descriptor is
  // not canonical, is not what `id` digests, or is another tenant's. kRefusedOverQuota: too many.
  Status put(const NamespaceId& id, Bytes descriptor, std::string_view label,
             std::vector<std::uint16_t>& nearest_differs_in);
  [[nodiscard]] std::optional<Index> find(const NamespaceId& id);  // counts as a use
  [[nodiscard]] NamespaceInfo info(
      const NamespaceId& id) const;  // objects and bytes are 0; precondition: known
  [[nodiscard]] std::uint32_t size() const;
  // In the order of registration, which is the order of their indexes; objects and bytes are 0.
  [[nodiscard]] std::vector<NamespaceInfo> list() const;

 private:
  struct Entry {
    NamespaceId id;
    std::shared_ptr<const std::vector<std::byte>> descriptor;
    std::string label;
    std::uint64_t created_s = 0;
    std::uint64_t last_used_s = 0;
  };
  [[nodiscard]] std::vector<std::uint16_t> nearest(const NamespaceId& id, Bytes descriptor) const;

  const Limits limits_;
  const std::optional<std::vector<std::byte>> tenant_;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  std::unordered_map<NamespaceId, Index, Id16Hash> by_id_;
  std::uint64_t descriptor_bytes_ = 0;
};

}  // namespace dfkv
