#include "ram/leases.h"

#include <algorithm>
#include <random>
#include <utility>

namespace dfkv {

LeaseTable::LeaseTable() {
  std::random_device random;
  next_ = (std::uint64_t{random()} << 24 | random()) + 1;
}

std::uint64_t LeaseTable::open(std::uint64_t owner, Clock::time_point deadline,
                               std::vector<ObjectId> objects) {
  const std::uint64_t id = next_++;
  leases_.emplace(id, Lease{owner, deadline, std::move(objects)});
  by_owner_[owner].push_back(id);
  return id;
}

bool LeaseTable::renew(std::uint64_t id, Clock::time_point now, Clock::time_point deadline) {
  const auto it = leases_.find(id);
  if (it == leases_.end() || it->second.deadline <= now) return false;
  it->second.deadline = deadline;
  return true;
}

std::optional<LeaseTable::Lease> LeaseTable::close(std::uint64_t id) {
  const auto it = leases_.find(id);
  if (it == leases_.end()) return std::nullopt;
  Lease lease = std::move(it->second);
  leases_.erase(it);
  forget(lease.owner, id);
  return lease;
}

std::vector<LeaseTable::Lease> LeaseTable::close_owner(std::uint64_t owner) {
  std::vector<Lease> closed;
  const auto held = by_owner_.find(owner);
  if (held == by_owner_.end()) return closed;
  for (const std::uint64_t id : held->second) {
    const auto it = leases_.find(id);
    closed.push_back(std::move(it->second));
    leases_.erase(it);
  }
  by_owner_.erase(held);
  return closed;
}

std::vector<LeaseTable::Lease> LeaseTable::close_expired(Clock::time_point now) {
  std::vector<Lease> closed;
  for (auto it = leases_.begin(); it != leases_.end();) {
    if (it->second.deadline > now) {
      ++it;
      continue;
    }
    forget(it->second.owner, it->first);
    closed.push_back(std::move(it->second));
    it = leases_.erase(it);
  }
  return closed;
}

void LeaseTable::forget(std::uint64_t owner, std::uint64_t id) {
  const auto it = by_owner_.find(owner);
  std::erase(it->second, id);
  if (it->second.empty()) by_owner_.erase(it);
}

}  // namespace dfkv
