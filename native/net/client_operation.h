// One batch: what was asked, what came of it, and who waits for it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "net/client_types.h"
#include "net/event_loop.h"
#include "net/fd.h"
#include "wire/status.h"

namespace dfkv::client {

class Core;
struct Request;

// Tokens of watched operations that have ended. Any thread.
class CompletionQueue {
 public:
  CompletionQueue();  // throws std::system_error when no eventfd can be made
  [[nodiscard]] int fd() const { return event_.get(); }
  void push(std::uint64_t token);
  void close();  // wakes every waiter
  // Waits until there is a token, the time is over or the queue is closed, and takes all there are.
  [[nodiscard]] std::vector<std::uint64_t> take(std::chrono::nanoseconds timeout);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::uint64_t> tokens_;
  Fd event_;
  bool closed_ = false;
};

// What a batch asks. Immutable once submitted.
struct Input {
  Kind kind = Kind::kPing;
  NamespaceId ns;
  std::uint32_t count = 0;                   // entries of the table
  std::vector<std::byte> table;              // packed as on the wire: chunks for EXISTS, items otherwise
  std::vector<Part> parts;                   // EXISTS
  std::vector<Segment> segments;             // GET, PUT: of all items, in order
  std::vector<std::uint32_t> first_segment;  // count + 1 positions in `segments`
  std::uint64_t payload_bytes = 0;
  std::uint32_t lease_ms = 0;
  Ack ack = Ack::kRam;  // PUT
  bool replace = false;
  std::uint64_t recompute_us = 0;

  [[nodiscard]] std::size_t entry_bytes() const {
    return kind == Kind::kExists ? kChunkRefBytes : kItemRefBytes;
  }
  [[nodiscard]] Bytes entry(std::uint32_t index) const {
    return Bytes(table).subspan(index * entry_bytes(), entry_bytes());
  }
  [[nodiscard]] Route route(std::uint32_t index) const {
    return load_le<Route>(entry(index).data() + (kind == Kind::kExists ? 16 : 24));
  }
  [[nodiscard]] std::uint32_t length(std::uint32_t index) const {
    return load_le<std::uint32_t>(entry(index).data() + 32);
  }
  // Throws std::invalid_argument when tables, counts, segments and lengths do not fit together. Fills
  // payload_bytes, and the lengths of GET items that leave it open.
  void validate();
};

// What one node answered to an operation that asks every node.
struct NodeAnswer {
  std::string node_id;
  Status status = Status::kMissNodeDown;
  std::uint64_t value = 0;                       // ERASE: objects; PING: microseconds there and back
  std::vector<std::vector<std::byte>> payloads;  // STAT: one; LIST: one per page
};

class Operation {
 public:
  Operation(Input input, Clock::time_point deadline, std::weak_ptr<Core> core);

  // ---- Any thread.
  [[nodiscard]] Kind kind() const { return input.kind; }
  [[nodiscard]] bool done() const { return done_.load(std::memory_order_acquire); }
  [[nodiscard]] bool wait(std::chrono::nanoseconds timeout) const;  // true when done
  // Ends the operation; returns once nothing touches the caller's memory any more. Not on the I/O thread.
  static void cancel(const std::shared_ptr<Operation>& operation);
  void watch(std::shared_ptr<CompletionQueue> queue, std::uint64_t token);

  // ---- Any thread, once done(): nothing below changes after that.
  [[nodiscard]] const std::vector<std::uint16_t>& statuses() const { return statuses_; }
  [[nodiscard]] std::uint32_t prefix() const;  // leading keys that ended well
  [[nodiscard]] const std::vector<Lease>& leases() const { return leases_; }
  [[nodiscard]] const std::vector<NodeAnswer>& answers() const { return answers_; }
  [[nodiscard]] std::uint64_t view_revision() const { return view_revision_; }
  [[nodiscard]] std::uint64_t payload_bytes() const { return payload_bytes_; }
  [[nodiscard]] std::uint64_t elapsed_us() const { return elapsed_us_; }
  [[nodiscard]] std::uint32_t round_trips() const { return round_trips_; }

  const Input input;
  const Clock::time_point deadline;

  // ---- I/O thread only, before done().
  void begin(std::uint32_t keys, std::uint64_t view_revision);
  // Some keys may be asked of more than one node (REMOVE while a node drains): they end with the last answer.
  void expect_another(std::uint32_t key);
  void end_key(std::uint32_t key, Status status);
  void end_all(Status status);  // of the keys that have not ended
  [[nodiscard]] bool key_ended(std::uint32_t key) const { return statuses_[key] != kPending; }
  void add_lease(Lease lease) { leases_.push_back(std::move(lease)); }
  void count_round_trip() { ++round_trips_; }
  std::vector<NodeAnswer>& mutable_answers() { return answers_; }
  void finish();  // the last thing that happens to an operation

  std::vector<std::shared_ptr<Request>> requests;
  std::uint32_t open_requests = 0;
  EventLoop::TimerId timer = 0;

 private:
  static constexpr std::uint16_t kPending = 0xFFFF;

  std::weak_ptr<Core> core_;
  const Clock::time_point started_;
  std::vector<std::uint16_t> statuses_;
  std::vector<std::uint8_t> more_answers_;  // per key; empty when every key has one
  std::vector<std::uint16_t> best_;         // with more_answers_
  std::vector<Lease> leases_;
  std::vector<NodeAnswer> answers_;
  std::uint64_t view_revision_ = 0;
  std::uint64_t payload_bytes_ = 0;
  std::uint64_t elapsed_us_ = 0;
  std::uint32_t round_trips_ = 0;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<std::pair<std::shared_ptr<CompletionQueue>, std::uint64_t>> watchers_;
  std::atomic<bool> done_{false};
};

}  // namespace dfkv::client
