// The operations that are answered at once, and SUBSCRIBE, which waits.
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "net/session.h"

namespace dfkv::server {

namespace {
constexpr std::string_view kNotOnDisk = "a disk of this node fails or is full: see its log and `dfkv stat`";
}  // namespace

void Session::do_exists(const FrameHeader& header) {
  if (!meta_.ns) return refuse(header, Status::kRefusedBadRequest, "EXISTS names its namespace");
  ExistsTable table;
  if (!decode_exists_table(table_, table)) {
    return refuse(header, Status::kRefusedBadRequest,
                  "the table of chunks is malformed, empty or over its limit");
  }
  if (table.chunks.size() * table.parts.size() > kMaxLookupsPerRequest) {
    return refuse(
        header, Status::kRefusedLimit,
        "chunks times parts is over " + std::to_string(kMaxLookupsPerRequest) + ": ask in smaller batches");
  }
  const auto result = context_->store.exists(*meta_.ns, table, meta_.lease_ms, id_);
  std::vector<std::byte> statuses(result.statuses.size() * 2);
  for (std::size_t i = 0; i < result.statuses.size(); ++i) {
    store_le(statuses.data() + 2 * i, static_cast<std::uint16_t>(result.statuses[i]));
    counters_->count_item(ItemOp::kExists, result.statuses[i]);
  }
  ReplyMeta meta;
  meta.prefix = result.prefix;
  meta.lease_id = result.lease_id;
  meta.lease_ms = result.lease_ms;
  reply(header, meta, statuses);
}

template <typename Result, typename Start, typename Answer>
void Session::answer_when_done(const FrameHeader& header, Start&& start, Answer answer) {
  if (!has_room()) {
    counters_->requests_busy.add();
    return refuse(header, Status::kAgainBusy, "too many requests in flight on this connection");
  }
  struct Handoff {
    std::atomic<bool> other_is_past{false};
    Result result;
  };
  const auto handoff = std::make_shared<Handoff>();
  const Waiting waiting{next_serial_++, header.opcode};
  start([handoff, answer, weak = weak_from_this(), loop = &context_->loop, id = header.request_id,
         waiting](Result result) {
    handoff->result = std::move(result);
    if (!handoff->other_is_past.exchange(true)) return;
    loop->post([handoff, answer, weak, id, waiting] {
      const auto self = weak.lock();
      if (!self) return;
      const auto it = self->requests_.find(id);
      if (it == self->requests_.end()) return;
      const auto* found = std::get_if<Waiting>(&it->second);
      if (found == nullptr || found->serial != waiting.serial) return;  // cancelled meanwhile
      self->guarded([&] {
        self->requests_.erase(it);
        FrameHeader to;
        to.opcode = waiting.opcode;
        to.request_id = id;
        answer(*self, to, std::move(handoff->result));
      });
    });
  });
  if (handoff->other_is_past.exchange(true)) {
    answer(*this, header, std::move(handoff->result));
  } else {
    requests_.emplace(header.request_id, waiting);
  }
}

void Session::do_remove(const FrameHeader& header) {
  if (!meta_.ns) return refuse(header, Status::kRefusedBadRequest, "REMOVE names its namespace");
  std::vector<ItemRef> items;
  if (!decode_item_table(table_, items)) {
    return refuse(header, Status::kRefusedBadRequest,
                  "the table of items is malformed, empty or over its limit");
  }
  std::vector<ObjectKey> keys;
  keys.reserve(items.size());
  for (const ItemRef& item : items) keys.push_back({*meta_.ns, item.block, item.part});
  answer_when_done<std::vector<Status>>(
      header, [&](RemoveDone done) { context_->store.remove(keys, std::move(done)); },
      [](Session& self, const FrameHeader& to, std::vector<Status> results) {
        std::vector<std::byte> statuses(results.size() * 2);
        for (std::size_t i = 0; i < results.size(); ++i) {
          store_le(statuses.data() + 2 * i, static_cast<std::uint16_t>(results[i]));
          self.counters_->count_item(ItemOp::kRemove, results[i]);
        }
        self.reply(to, {}, statuses);
      });
}

void Session::do_put_ns(const FrameHeader& header) {
  if (!meta_.ns) return refuse(header, Status::kRefusedBadRequest, "PUT_NS names the namespace");
  ReplyMeta meta;
  meta.status =
      context_->store.put_namespace(*meta_.ns, meta_.descriptor, meta_.label, meta.nearest_differs_in);
  if (meta.status == Status::kOk) return reply(header, meta);
  meta.reason = meta.status == Status::kRefusedNamespace
                    ? "the descriptor is not canonical, does not have this digest, or is another tenant's"
                    : "this node knows too many namespaces; restart it or raise its limit";
  reply(header, meta, {}, true);
}

void Session::do_erase(const FrameHeader& header) {
  if (!meta_.ns) return refuse(header, Status::kRefusedBadRequest, "ERASE names its namespace");
  using Result = std::pair<Status, std::uint64_t>;
  answer_when_done<Result>(
      header,
      [this](std::function<void(Result)> done) {
        context_->store.erase(*meta_.ns, [done = std::move(done)](Status status, std::uint64_t objects) {
          done({status, objects});
        });
      },
      [](Session& self, const FrameHeader& to, Result result) {
        if (result.first != Status::kOk) return self.refuse(to, result.first, kNotOnDisk);
        ReplyMeta meta;
        meta.length = result.second;
        self.reply(to, meta);
      });
}

void Session::do_sync(const FrameHeader& header) {
  answer_when_done<Status>(
      header, [this](StatusDone done) { context_->store.sync(std::move(done)); },
      [](Session& self, const FrameHeader& to, Status status) {
        if (status == Status::kOk) return self.reply(to, {});
        self.refuse(to, status,
                    status == Status::kAgainDisk ? kNotOnDisk : "this node keeps its objects in memory only");
      });
}

// Pages so that a page fits in one frame. The cursor is the place in the order of registration, which never
// changes.
void Session::do_list(const FrameHeader& header) {
  auto all = context_->store.list();
  const std::size_t begin = std::min<std::uint64_t>(meta_.cursor, all.size());
  const std::size_t most =
      meta_.limit == 0 ? kMaxNamespacesPerReply : std::min(meta_.limit, kMaxNamespacesPerReply);
  constexpr std::size_t kFixedBytes = 96;  // of an entry: more than its numbers, id and msgpack heads take
  std::size_t end = begin;
  std::size_t bytes = kFixedBytes;
  while (end < all.size() && end - begin < most) {
    bytes += kFixedBytes + all[end].descriptor.size() + all[end].label.size();
    if (bytes > limits_.max_fragment_bytes) break;
    ++end;
  }
  if (end == begin && begin < all.size()) {
    return refuse(header, Status::kRefusedLimit,
                  "a descriptor is larger than a frame: negotiate a larger fragment");
  }
  ReplyMeta meta;
  meta.cursor = end < all.size() ? end : 0;
  all.erase(all.begin() + static_cast<std::ptrdiff_t>(end), all.end());
  all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(begin));
  reply(header, meta, encode_namespaces(all));
}

void Session::do_stat(const FrameHeader& header) { reply(header, {}, encode_counters(context_->stats())); }

void Session::do_lease(const FrameHeader& header) {
  ReplyMeta meta;
  if (context_->store.renew(meta_.lease_id, meta_.lease_ms)) {
    meta.lease_id = meta_.lease_id;
  } else {
    meta.status = Status::kMissExpired;
  }
  reply(header, meta);
}

void Session::do_release(const FrameHeader& header) {
  ReplyMeta meta;
  if (!context_->store.release(meta_.lease_id)) meta.status = Status::kMissExpired;
  reply(header, meta);
}

void Session::do_subscribe(const FrameHeader& header) {
  const auto now = context_->views.now();
  if (now.view && now.revision != meta_.known_revision) {
    if (now.view->size() > limits_.max_fragment_bytes) {
      return refuse(header, Status::kRefusedLimit,
                    "the view is larger than a frame: negotiate a larger fragment");
    }
    return reply(header, {}, *now.view);
  }
  if (meta_.wait_ms == 0) return reply(header, {});
  if (!has_room()) {
    counters_->requests_busy.add();
    return refuse(header, Status::kAgainBusy, "too many requests in flight on this connection");
  }
  const std::uint64_t id = header.request_id;
  const auto until = Clock::now() + std::chrono::milliseconds(std::min(meta_.wait_ms, kMaxSubscribeWait_ms));
  Subscription subscription{meta_.known_revision, 0};
  subscription.timer = context_->loop.at(until, [weak = weak_from_this(), id] {
    const auto self = weak.lock();
    if (!self) return;
    self->guarded([&self, id] { self->end_subscription(id, Status::kOk, nullptr); });
  });
  requests_.emplace(id, subscription);
}

void Session::view_changed() {
  const auto now = context_->views.now();
  if (!now.view) return;
  guarded([this, &now] {
    std::vector<std::uint64_t> answered;
    for (const auto& [id, request] : requests_) {
      const auto* subscription = std::get_if<Subscription>(&request);
      if (subscription != nullptr && subscription->known_revision != now.revision) answered.push_back(id);
    }
    for (const std::uint64_t id : answered) end_subscription(id, Status::kOk, now.view);
  });
}

void Session::end_subscription(std::uint64_t id, Status status, const ViewBoard::Encoded& view) {
  const auto it = requests_.find(id);
  if (it == requests_.end()) return;
  const auto* subscription = std::get_if<Subscription>(&it->second);
  if (subscription == nullptr) return;
  context_->loop.cancel(subscription->timer);
  requests_.erase(it);
  ReplyMeta meta;
  meta.status = view && view->size() > limits_.max_fragment_bytes ? Status::kRefusedLimit : status;
  const bool error = meta.status == Status::kRefusedLimit;
  reply(static_cast<std::uint8_t>(Opcode::kSubscribe), id, meta, view && !error ? Bytes(*view) : Bytes{},
        error);
}

void Session::do_cancel() {
  const auto it = requests_.find(meta_.target_request);
  if (it == requests_.end()) return;  // done meanwhile
  counters_->cancelled.add();
  if (auto* get = std::get_if<GetRequest>(&it->second)) {
    cancel_get(it->first, *get);
  } else if (auto* put = std::get_if<PutRequest>(&it->second)) {
    put->cancelled = true;
    if (put->item_open) fail_item(*put, Status::kMissCancelled);
  } else if (std::holds_alternative<Waiting>(it->second)) {
    // What the store has begun it finishes; only the answer is not wanted any more.
    requests_.erase(it);
  } else {
    end_subscription(it->first, Status::kMissCancelled, nullptr);
  }
}

}  // namespace dfkv::server
