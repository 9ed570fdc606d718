// PUT: payload comes straight into the slot, is hashed piece by piece while in cache, and becomes visible
// only when all of it is there and matches its checksum.
#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "net/session.h"

namespace dfkv::server {

namespace {
constexpr std::uint16_t raw(Status status) { return static_cast<std::uint16_t>(status); }
// Refused PUTs stay known until their last frame has come, so that the frames can be told from nonsense.
constexpr std::size_t kMaxRequestsKnown = 2 * kMaxRequestsInFlight;
// How long an item waits for memory. What else its connection carries waits with it.
constexpr std::chrono::milliseconds kRoomWait(2000);
}  // namespace

void Session::begin_put(const FrameHeader& header) {
  if (requests_.size() >= kMaxRequestsKnown) {
    protocol_fault();
    return;
  }
  const bool room = has_room();
  PutRequest& put = std::get<PutRequest>(requests_.emplace(header.request_id, PutRequest{}).first->second);
  ++open_puts_;
  put.serial = next_serial_++;
  put.deadline = deadline_of(meta_);
  put.options = {meta_.ack, meta_.replace, meta_.recompute_us};
  if (frame_refused_ != Status::kOk) {
    refuse_put(put, frame_refused_, refusal_);
  } else if (header.item != kWholeRequest || !meta_.ns) {
    refuse_put(put, Status::kRefusedBadRequest, "PUT names its namespace");
  } else if (!room) {
    counters_->requests_busy.add();
    refuse_put(put, Status::kAgainBusy, "too many requests in flight on this connection");
  } else if (!decode_item_table(table_, put.items)) {
    put.items.clear();
    refuse_put(put, Status::kRefusedBadRequest, "the table of items is malformed, empty or over its limit");
  } else if (header.end_of_request()) {
    refuse_put(put, Status::kRefusedBadRequest, "the items of a PUT follow in frames of their own");
  } else {
    put.ns = *meta_.ns;
  }
  if (!held_.take(put.items.size() * sizeof(ItemRef))) {
    put.items = {};
    counters_->requests_busy.add();
    refuse_put(put, Status::kAgainBusy, "this node holds too many requests: store less at a time");
  }
  put.statuses.assign(put.items.size(), raw(Status::kRefusedAborted));
  table_bytes_ += put.items.size() * sizeof(ItemRef);
  if (header.end_of_request()) end_put(header.request_id, put);
}

void Session::refuse_put(PutRequest& put, Status status, std::string_view reason) {
  if (put.refused != Status::kOk) return;
  put.refused = status;
  put.reason = reason;
  put.ticket.reset();
  if (put.item_open) fail_item(put, status);
}

bool Session::on_put_meta(const FrameHeader& header, Bytes meta) {
  const auto it = requests_.find(header.request_id);
  put_ = it == requests_.end() ? nullptr : std::get_if<PutRequest>(&it->second);
  if (put_ == nullptr || put_->ended) return protocol_fault();
  PutRequest& put = *put_;
  if (put.refused != Status::kOk) return true;
  RequestMeta fragment;
  if (!meta.empty() && decode_request(meta, fragment) != MetaFault::kNone) {
    counters_->meta_faults.add();
    refuse_put(put, Status::kRefusedBadRequest, "the meta of an item cannot be read");
    return true;
  }
  if (put.item_open ? header.item != put.next : header.item < put.next || header.item >= put.items.size()) {
    refuse_put(put, Status::kRefusedBadRequest, "items come in ascending order, each to its end");
    return true;
  }
  if (!put.item_open) open_item(put, header.item, header.payload_bytes != 0);
  if (fragment.aborted) fail_item(put, put.cancelled ? Status::kMissCancelled : Status::kRefusedAborted);
  if (put.received + header.payload_bytes > put.items[put.next].length)
    fail_item(put, Status::kRefusedBadRequest);
  put.announced = fragment.checksum;
  if (put.wants_room) {
    const auto give_up = arrived_ + kRoomWait;
    room_until_ = put.deadline ? std::min(*put.deadline, give_up) : give_up;
    counters_->put_waits.add();
    context_->put_queue.wait(weak_from_this());
  }
  if (put.ticket) payload_ = Payload::kSlot;
  return true;
}

void Session::open_item(PutRequest& put, std::size_t index, bool may_wait) {
  put.next = index;
  put.item_open = true;
  put.item_status = Status::kOk;
  put.received = 0;
  put.checksum.reset();
  put.announced.reset();
  if (put.cancelled) {
    fail_item(put, Status::kMissCancelled);
  } else if (put.deadline && Clock::now() >= *put.deadline) {
    fail_item(put, Status::kMissDeadline);
  } else {
    may_wait = may_wait && !put.waited_in_vain;
    put.wants_room = may_wait && (context_->put_queue.busy() || !find_room(put, true));
    if (!may_wait) (void)find_room(put, false);
  }
}

// False: there is no memory now, and the item waits for some.
bool Session::find_room(PutRequest& put, bool may_wait) {
  const ItemRef& item = put.items[put.next];
  PutOptions options = put.options;
  options.asks_again = may_wait;
  auto start = context_->store.begin_put({put.ns, item.block, item.part}, item.route, item.length, options);
  if (may_wait && start.status == Status::kAgainNoMemory) return false;
  put.ticket = std::move(start.ticket);
  put.item_status = start.status;
  return true;
}

bool Session::take_room(Clock::time_point now) {
  if (!room_until_) return true;  // closed
  bool found = false;
  guarded([this, now, &found] {
    PutRequest& put = *put_;
    if (put.deadline && now >= *put.deadline) {
      fail_item(put, Status::kMissDeadline);
      found = true;
    } else {
      const bool in_vain = now >= *room_until_;
      found = find_room(put, !in_vain);
      if (!found) return;
      put.waited_in_vain = in_vain && !put.ticket;
    }
    put.wants_room = false;
    room_until_.reset();
    if (put.ticket) payload_ = Payload::kSlot;
    last_received_ = now;
    resume_reading_ = true;
    continue_later();
  });
  return found || stage_ == Stage::kClosed;
}

// The first reason stands.
void Session::fail_item(PutRequest& put, Status status) {
  put.ticket.reset();
  put.wants_room = false;
  if (put.item_status == Status::kOk) put.item_status = status;
}

bool Session::on_put_end(const FrameHeader& header) {
  PutRequest& put = *put_;
  if (put.item_open && header.last_of_item()) end_item(header.request_id, put);
  if (header.end_of_request()) end_put(header.request_id, put);
  return true;
}

void Session::end_item(std::uint64_t id, PutRequest& put) {
  const std::size_t item = put.next++;
  put.item_open = false;
  if (put.ticket) {
    if (put.received != put.items[item].length || !put.announced) {
      fail_item(put, Status::kRefusedBadRequest);
    } else if (*put.announced != put.checksum.digest()) {
      fail_item(put, Status::kRefusedChecksum);
    } else {
      commit_item(id, put, item);
      return;
    }
  }
  put.statuses[item] = raw(put.item_status);
}

void Session::commit_item(std::uint64_t id, PutRequest& put, std::size_t item) {
  struct Handoff {
    std::atomic<bool> other_is_past{false};
    Status status = Status::kOk;
  };
  const auto handoff = recycled_shared<Handoff>();
  put.ticket->commit(*put.announced, [handoff, weak = weak_from_this(), loop = &context_->loop, id,
                                      serial = put.serial, item](Status status) {
    handoff->status = status;
    if (!handoff->other_is_past.exchange(true)) return;
    loop->post([weak, id, serial, item, status] {
      if (const auto self = weak.lock()) self->commit_done(id, serial, item, status);
    });
  });
  put.ticket.reset();
  if (handoff->other_is_past.exchange(true)) {
    put.statuses[item] = raw(handoff->status);
  } else {
    ++put.committing;
  }
}

void Session::commit_done(std::uint64_t id, std::uint64_t serial, std::size_t item, Status status) {
  const auto it = requests_.find(id);
  if (it == requests_.end()) return;
  auto* put = std::get_if<PutRequest>(&it->second);
  if (put == nullptr || put->serial != serial) return;
  guarded([this, id, put, item, status] {
    put->statuses[item] = raw(status);
    --put->committing;
    if (put->ended && put->committing == 0) finish_put(id, *put);
  });
}

// Everything was received. What the store has not confirmed is waited for.
void Session::end_put(std::uint64_t id, PutRequest& put) {
  put.ticket.reset();  // an item cut short
  put.ended = true;
  --open_puts_;
  if (put.committing == 0) finish_put(id, put);
}

void Session::finish_put(std::uint64_t id, PutRequest& put) {
  std::vector<BlockId> used;
  for (std::size_t i = 0; i < put.items.size(); ++i) {
    const auto status = static_cast<Status>(put.statuses[i]);
    counters_->count_item(ItemOp::kPut, status);
    if (is_done(status) && (used.empty() || used.back() != put.items[i].block))
      used.push_back(put.items[i].block);
  }
  if (!used.empty()) context_->store.stored(put.ns, used);
  ReplyMeta meta;
  meta.status = put.refused;
  meta.reason = put.reason;
  if (range_of(put.refused) == StatusRange::kAgain) meta.retry_after_ms = kRetryAfter_ms;
  reply(static_cast<std::uint8_t>(Opcode::kPut), id, meta,
        as_bytes(put.statuses.data(), put.statuses.size() * 2), put.refused != Status::kOk);
  table_bytes_ -= put.items.size() * sizeof(ItemRef);
  held_.give_back(put.items.size() * sizeof(ItemRef));
  if (put_ == &put) put_ = nullptr;
  requests_.erase(id);
}

}  // namespace dfkv::server
