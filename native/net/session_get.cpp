// GET: payload goes from pinned slots to the socket. A slot is pinned when its item's turn comes and unpinned
// when the kernel has its last byte, so a connection never pins more than its window; while an item is read
// from a disk, some of those behind it are asked for too, so that the disk has more than one read at a time.
#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "net/session.h"

namespace dfkv::server {

namespace {

constexpr std::uint16_t raw(Status status) { return static_cast<std::uint16_t>(status); }

std::uint64_t microseconds(Clock::duration time) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time).count());
}

constexpr std::size_t kLengthUnknownBytes = 1 << 20;  // what an item without a length counts for

// A read that the store may finish at once or later, on a thread of its own. Whoever comes second acts.
struct Handoff {
  std::atomic<bool> other_is_past{false};
  ReadResult result;
};

}  // namespace

void Session::begin_get(const FrameHeader& header) {
  if (!meta_.ns) return refuse(header, Status::kRefusedBadRequest, "GET names its namespace");
  if (!has_room()) {
    counters_->requests_busy.add();
    return refuse(header, Status::kAgainBusy, "too many requests in flight on this connection");
  }
  GetRequest get;
  if (!decode_item_table(table_, get.items)) {
    return refuse(header, Status::kRefusedBadRequest,
                  "the table of items is malformed, empty or over its limit");
  }
  if (!held_.take(get.items.size() * sizeof(ItemRef))) {
    counters_->requests_busy.add();
    return refuse(header, Status::kAgainBusy, "this node holds too many requests: ask for less at a time");
  }
  get.serial = next_serial_++;
  get.ns = *meta_.ns;
  get.statuses.assign(get.items.size(), raw(Status::kMissCancelled));
  get.arrived = arrived_;
  get.deadline = deadline_of(meta_);
  table_bytes_ += get.items.size() * sizeof(ItemRef);
  requests_.emplace(header.request_id, std::move(get));
  if (meta_.priority == Priority::kDemand) {
    gets_.insert(gets_.begin() + static_cast<std::ptrdiff_t>(demand_gets_++), header.request_id);
  } else {
    gets_.push_back(header.request_id);
  }
}

// Fills the send window, request by request; one that waits for the store lets the next one through.
void Session::pump_gets() {
  std::size_t steps = 0;
  for (std::size_t at = 0; at < gets_.size();) {
    if (out_.bytes() >= kSendWindowBytes || out_.frames() >= kSendWindowFrames) return;
    if (++steps > kStepsPerPump) return continue_later();
    const std::uint64_t id = gets_[at];
    GetRequest& get = std::get<GetRequest>(requests_.at(id));
    if (get.waiting) {
      ++at;
    } else if (!step_get(id, get)) {
      finish_get(id, get);
    }
  }
}

// One item looked up or one fragment queued. False: nothing is left to do.
bool Session::step_get(std::uint64_t id, GetRequest& get) {
  if (get.pin) {
    send_fragment(id, get);
    return true;
  }
  if (get.next == get.items.size()) return false;
  if (!get.begun) {
    get.begun = true;
    counters_->queue_us.add(microseconds(Clock::now() - get.arrived));
    counters_->queue_waits.add();
  }
  if (get.deadline && Clock::now() >= *get.deadline) {
    std::fill(get.statuses.begin() + static_cast<std::ptrdiff_t>(get.next), get.statuses.end(),
              raw(Status::kMissDeadline));
    get.next = get.items.size();
    get.ahead.clear();
    return false;
  }
  if (get.ahead.empty()) ask_for_item(id, get, {});
  if (get.ahead.front().answered) {
    ReadResult result = std::move(get.ahead.front().result);
    get.ahead.pop_front();
    found_item(get, std::move(result));
  } else {
    get.waiting = true;
    ask_ahead(id, get);
  }
  return true;
}

// As far as memory allows: what is read ahead waits in slots that others may need.
void Session::ask_ahead(std::uint64_t id, GetRequest& get) {
  while (get.asked < get.items.size() && get.ahead.size() < kReadsAhead) {
    const std::uint32_t length = get.items[get.asked].length;
    BudgetShare share(context_->reads_ahead, length == 0 ? kLengthUnknownBytes : length);
    if (share.empty()) return;
    ask_for_item(id, get, std::move(share));
  }
}

void Session::ask_for_item(std::uint64_t id, GetRequest& get, BudgetShare ahead_of_its_turn) {
  const std::size_t index = get.asked++;
  const ItemRef& item = get.items[index];
  get.ahead.push_back({std::move(ahead_of_its_turn), false, {}});
  const auto handoff = recycled_shared<Handoff>();
  context_->store.acquire({get.ns, item.block, item.part},
                          [handoff, weak = weak_from_this(), loop = &context_->loop, id, serial = get.serial,
                           index](ReadResult result) {
                            handoff->result = std::move(result);
                            if (!handoff->other_is_past.exchange(true)) return;
                            loop->post([handoff, weak, id, serial, index] {
                              if (const auto self = weak.lock())
                                self->read_done(id, serial, index, std::move(handoff->result));
                            });
                          });
  if (!handoff->other_is_past.exchange(true)) return;
  get.ahead.back().answered = true;
  get.ahead.back().result = std::move(handoff->result);
}

void Session::read_done(std::uint64_t id, std::uint64_t serial, std::size_t item, ReadResult result) {
  const auto it = requests_.find(id);
  if (it == requests_.end()) return;
  auto* get = std::get_if<GetRequest>(&it->second);
  if (get == nullptr || get->serial != serial) return;
  const std::size_t first = get->asked - get->ahead.size();
  if (item < first) return;  // the deadline has passed meanwhile
  get->ahead[item - first].answered = true;
  get->ahead[item - first].result = std::move(result);
  if (item != first) return;
  guarded([get] { get->waiting = false; });
}

void Session::found_item(GetRequest& get, ReadResult result) {
  Status status = result.status;
  if (result.pin) {
    const std::uint32_t expected = get.items[get.next].length;
    if (expected == 0 || expected == result.pin->bytes().size()) {
      get.pin = recycled_shared(std::move(result.pin));
      get.sent = 0;
      return;
    }
    status = Status::kMissLength;
  }
  get.statuses[get.next++] = raw(status);
}

void Session::send_fragment(std::uint64_t id, GetRequest& get) {
  const Bytes bytes = get.pin->bytes();
  const Bytes fragment =
      bytes.subspan(get.sent, std::min<std::size_t>(bytes.size() - get.sent, limits_.max_fragment_bytes));
  head_.resize(kFrameHeaderBytes);
  if (get.sent == 0) {
    ReplyMeta meta;
    meta.length = bytes.size();
    meta.checksum = get.pin->checksum();
    encode_reply(meta, head_);
  }
  const bool last = get.sent + fragment.size() == bytes.size();
  FrameHeader header;
  header.opcode = static_cast<std::uint8_t>(Opcode::kGet);
  header.flags = kFlagReply | (last ? kFlagLastOfItem : 0);
  header.request_id = id;
  header.item = static_cast<std::uint32_t>(get.next);
  header.meta_bytes = static_cast<std::uint32_t>(head_.size() - kFrameHeaderBytes);
  header.payload_bytes = static_cast<std::uint32_t>(fragment.size());
  encode_frame_header(header, std::span<std::byte, kFrameHeaderBytes>(head_.data(), kFrameHeaderBytes));
  out_.push_payload(head_, fragment, get.pin, id, header.item);
  get.sent += fragment.size();
  if (!last) return;
  get.statuses[get.next++] = raw(Status::kOk);
  get.pin.reset();
}

void Session::finish_get(std::uint64_t id, GetRequest& get) {
  std::vector<BlockId> used;
  for (std::size_t i = 0; i < get.items.size(); ++i) {
    const auto status = static_cast<Status>(get.statuses[i]);
    counters_->count_item(ItemOp::kGet, status);
    // The parts of a chunk usually come one after another.
    if (status == Status::kOk && (used.empty() || used.back() != get.items[i].block))
      used.push_back(get.items[i].block);
  }
  if (!used.empty()) context_->store.touch(get.ns, used);
  reply(static_cast<std::uint8_t>(Opcode::kGet), id, {},
        as_bytes(get.statuses.data(), get.statuses.size() * 2), false);
  table_bytes_ -= get.items.size() * sizeof(ItemRef);
  held_.give_back(get.items.size() * sizeof(ItemRef));
  const auto at = std::ranges::find(gets_, id);
  if (static_cast<std::size_t>(at - gets_.begin()) < demand_gets_) --demand_gets_;
  gets_.erase(at);
  requests_.erase(id);
}

// What was not begun is not sent any more; items cut short count as cancelled.
void Session::cancel_get(std::uint64_t id, GetRequest& get) {
  out_.drop_unsent(id, [&get](std::uint32_t item) { get.statuses[item] = raw(Status::kMissCancelled); });
  get.pin.reset();
  finish_get(id, get);
}

}  // namespace dfkv::server
