#include "ram/namespaces.h"

#include <algorithm>
#include <chrono>

#include "wire/msgpack.h"

namespace dfkv {

namespace {

constexpr std::uint16_t kTenantTag = 1;
constexpr std::size_t kMaxLabelBytes = 256;

std::uint64_t now_s() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(now).count());
}

}  // namespace

NamespaceRegistry::NamespaceRegistry(Limits limits, std::optional<std::vector<std::byte>> tenant)
    : limits_(limits), tenant_(std::move(tenant)) {}

Status NamespaceRegistry::put(const NamespaceId& id, Bytes descriptor, std::string_view label,
                              std::vector<std::uint16_t>& nearest_differs_in) {
  const auto fields = parse_descriptor(descriptor);
  if (!fields || namespace_id(descriptor) != id) return Status::kRefusedNamespace;
  if (tenant_) {
    const auto field = std::ranges::find(*fields, kTenantTag, &DescriptorField::tag);
    const Bytes named = field == fields->end() ? Bytes{} : field->value;
    if (!std::ranges::equal(named, *tenant_)) return Status::kRefusedNamespace;
  }
  nearest_differs_in = nearest(id, descriptor);
  label = msgpack::utf8_prefix(label, kMaxLabelBytes);

  const std::lock_guard lock(mutex_);
  if (const auto it = by_id_.find(id); it != by_id_.end()) {
    Entry& entry = entries_[it->second];
    if (!label.empty()) entry.label = label;
    entry.last_used_s = now_s();
    return Status::kOk;
  }
  if (entries_.size() >= limits_.max_namespaces ||
      descriptor_bytes_ + descriptor.size() > limits_.max_descriptor_bytes) {
    return Status::kRefusedOverQuota;
  }
  by_id_.emplace(id, static_cast<Index>(entries_.size()));
  const std::uint64_t now = now_s();
  entries_.push_back({id,
                      std::make_shared<const std::vector<std::byte>>(descriptor.begin(), descriptor.end()),
                      std::string(label), now, now});
  descriptor_bytes_ += descriptor.size();
  return Status::kOk;
}

// Compared outside the lock: thousands of descriptors take milliseconds.
std::vector<std::uint16_t> NamespaceRegistry::nearest(const NamespaceId& id, Bytes descriptor) const {
  std::vector<std::shared_ptr<const std::vector<std::byte>>> others;
  {
    const std::lock_guard lock(mutex_);
    others.reserve(entries_.size());
    // The latest first: among equally near ones it is the likeliest to be meant.
    for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
      if (entry->id != id) others.push_back(entry->descriptor);
    }
  }
  std::optional<std::vector<std::uint16_t>> best;
  for (const auto& other : others) {
    auto difference = descriptor_difference(descriptor, *other);
    if (!best || difference.size() < best->size()) best = std::move(difference);
    if (best->size() == 1) break;
  }
  return best.value_or(std::vector<std::uint16_t>{});
}

std::optional<NamespaceRegistry::Index> NamespaceRegistry::find(const NamespaceId& id) {
  const std::lock_guard lock(mutex_);
  const auto it = by_id_.find(id);
  if (it == by_id_.end()) return std::nullopt;
  entries_[it->second].last_used_s = now_s();
  return it->second;
}

NamespaceInfo NamespaceRegistry::info(const NamespaceId& id) const {
  const std::lock_guard lock(mutex_);
  const Entry& entry = entries_[by_id_.at(id)];
  return {entry.id, *entry.descriptor, entry.label, 0, 0, entry.created_s, entry.last_used_s};
}

std::uint32_t NamespaceRegistry::size() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::uint32_t>(entries_.size());
}

std::vector<NamespaceInfo> NamespaceRegistry::list() const {
  const std::lock_guard lock(mutex_);
  std::vector<NamespaceInfo> infos;
  infos.reserve(entries_.size());
  for (const Entry& entry : entries_) {
    infos.push_back({entry.id, *entry.descriptor, entry.label, 0, 0, entry.created_s, entry.last_used_s});
  }
  return infos;
}

}  // namespace dfkv
