// Leases: sets of objects that a reader wants kept until it loads them. Each ends when it is released, when
// its deadline passes, or with the connection that took it. Bookkeeping only: the caller pins and unpins. Not
// thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace dfkv {

class LeaseTable {
 public:
  using Clock = std::chrono::steady_clock;
  using ObjectId = std::uint64_t;  // whatever the owner of the table tells its objects by
  struct Lease {
    std::uint64_t owner = 0;
    Clock::time_point deadline;
    std::vector<ObjectId> objects;
  };

  // Ids start at a random number, so that an id of an earlier process is not taken for one of this one's.
  LeaseTable();

  std::uint64_t open(std::uint64_t owner, Clock::time_point deadline, std::vector<ObjectId> objects);
  // False: unknown, or over already.
  [[nodiscard]] bool renew(std::uint64_t id, Clock::time_point now, Clock::time_point deadline);
  [[nodiscard]] std::optional<Lease> close(std::uint64_t id);
  [[nodiscard]] std::vector<Lease> close_owner(std::uint64_t owner);
  [[nodiscard]] std::vector<Lease> close_expired(Clock::time_point now);
  [[nodiscard]] std::size_t size() const { return leases_.size(); }

 private:
  void forget(std::uint64_t owner, std::uint64_t id);

  std::uint64_t next_;
  std::unordered_map<std::uint64_t, Lease> leases_;
  std::unordered_map<std::uint64_t, std::vector<std::uint64_t>> by_owner_;
};

}  // namespace dfkv
