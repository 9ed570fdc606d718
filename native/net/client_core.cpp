#include "net/client_core.h"

#include <algorithm>
#include <future>
#include <stdexcept>

namespace dfkv::client {

std::shared_ptr<const NamespaceBook::Entry> NamespaceBook::find(const NamespaceId& id) const {
  const auto it = std::ranges::find_if(entries_, [&](const auto& entry) { return entry->id == id; });
  return it == entries_.end() ? nullptr : *it;
}

bool NamespaceBook::add(std::shared_ptr<const Entry> entry) {
  if (find(entry->id)) return false;
  entries_.push_back(std::move(entry));
  return true;
}

void NamespaceBook::set_difference(const NamespaceId& id, std::vector<std::uint16_t> tags) {
  const std::lock_guard lock(mutex_);
  auto& known = differences_[id];
  // A node that has no similar namespace does not outweigh one that has.
  if (known.empty()) known = std::move(tags);
}

std::optional<std::vector<std::uint16_t>> NamespaceBook::difference(const NamespaceId& id) const {
  const std::lock_guard lock(mutex_);
  const auto it = differences_.find(id);
  if (it == differences_.end()) return std::nullopt;
  return it->second;
}

Core::Core(std::shared_ptr<Common> common, Lane lane)
    : lane_(lane), io_(std::move(common)), resolver_(io_.loop) {
  io_.complete = [this](const std::shared_ptr<Operation>& op) { complete(op); };
}

Core::~Core() = default;

void Core::run() {
  if (lane_ == Lane::kControl) {
    source_ = std::make_unique<RoutingSource>(
        io_, resolver_,
        RoutingSource::Hooks{
            .answers = [this](const std::string& node_id) { return answers(node_id); },
            .any_answers = [this] { return any_answers(); },
            .take =
                [this](const std::shared_ptr<const Routing>& routing) {
                  if (other_)
                    other_->io_.loop.post([other = other_, routing] { other->take_routing(routing); });
                  take_routing(routing);
                },
            .none =
                [this] {
                  if (other_) other_->io_.loop.post([other = other_] { other->no_routing(); });
                  no_routing();
                },
        });
    io_.loop.post([this] { source_->start(); });
  }
  io_.loop.run();
  source_.reset();
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  ready_changed_.notify_all();
}

bool Core::wait_ended(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  return ready_changed_.wait_until(lock, until, [this] { return ended_; });
}

std::shared_ptr<Operation> Core::submit(Input input, Clock::time_point deadline) {
  auto op = admit(std::move(input), deadline);
  if (!op->done()) post(op);
  return op;
}

std::shared_ptr<Operation> Core::ask(Input input, Clock::time_point deadline, Clock::time_point until) {
  auto op = admit(std::move(input), deadline);
  if (op->done()) return op;
  bool closed = false;
  const auto work = [&] {
    {
      const std::lock_guard lock(mutex_);
      closed = closed_;
    }
    if (!closed) begin(op);  // end() has a task to come that ends it
  };
  const auto done = [&] { return closed || op->done(); };
  if (!io_.loop.try_join_in(work, done, until)) {
    post(op);
    (void)op->wait(until - Clock::now());
  }
  if (closed) refuse_closed(*op);
  return op;
}

// Done already: it is refused, or has no keys.
std::shared_ptr<Operation> Core::admit(Input input, Clock::time_point deadline) {
  auto op = std::make_shared<Operation>(std::move(input), deadline, weak_from_this());
  const auto bytes = op->input.payload_bytes;
  auto& counters = io_.counters;
  const auto others = counters.inflight_operations.fetch_add(1, std::memory_order_relaxed);
  const auto other_bytes = counters.inflight_bytes.fetch_add(bytes, std::memory_order_relaxed);
  const bool full = others >= io_.options.max_pending_operations ||
                    (other_bytes > 0 && other_bytes + bytes > io_.options.max_inflight_bytes);
  if (full || (is_keyed(op->kind()) && op->input.count == 0)) {
    if (full) bump(counters.refused_busy);
    op->end_all(Status::kAgainBusy);
    account(*op);
    op->finish();
  }
  return op;
}

void Core::post(const std::shared_ptr<Operation>& op) {
  {
    const std::lock_guard lock(mutex_);
    // Under the lock: what is posted before end() is ended by it.
    if (!closed_) return io_.loop.post([this, op] { begin(op); });
  }
  refuse_closed(*op);
}

void Core::refuse_closed(const Operation& op) {
  drop(io_.counters.inflight_operations, 1);
  drop(io_.counters.inflight_bytes, op.input.payload_bytes);
  throw std::runtime_error("the client is closed");
}

void Core::help(const Operation& op, Clock::time_point until) {
  io_.loop.join_in([&op] { return op.done(); }, until);
}

void Core::cancel(const std::shared_ptr<Operation>& operation) {
  io_.loop.post([this, operation] {
    if (!operation->done()) finish_early(operation, Status::kMissCancelled);
  });
}

void Core::release(std::vector<Lease> leases) {
  io_.loop.post([this, leases = std::move(leases)] {
    for (const auto& lease : leases) {
      const auto it = links_.find(lease.node_id);
      // A lease ends with its connection: without one there is nothing to give back.
      if (it == links_.end() || !it->second->reachable()) continue;
      auto request = std::make_shared<Request>();
      request->opcode = Opcode::kRelease;
      request->node_id = lease.node_id;
      request->meta.lease_id = lease.id;
      it->second->submit(std::move(request));
    }
  });
}

void Core::add_namespace(std::shared_ptr<const NamespaceBook::Entry> entry) {
  io_.loop.post([this, entry = std::move(entry)] {
    if (!io_.namespaces.add(entry)) return;
    for (const auto& [id, link] : links_) link->register_namespace(entry);
  });
}

void Core::end() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
  }
  ready_changed_.notify_all();
  io_.common->completions->close();
  io_.loop.post([this] { end_everything(); });
}

void Core::end_everything() {
  const auto active = active_;
  for (const auto& op : active) finish_early(op, Status::kMissCancelled);
  if (source_) source_->shut();
  for (const auto& [id, link] : links_) link->shut();
  for (const auto& link : retired_) link->shut();
  io_.loop.stop();
}

bool Core::wait_ready(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  ready_changed_.wait_until(lock, Clock::now() + timeout, [this] { return ready_ || closed_; });
  return ready_;
}

std::vector<std::byte> Core::encoded_view() const {
  const std::lock_guard lock(mutex_);
  return raw_view_;
}

void Core::begin(const std::shared_ptr<Operation>& op) {
  active_.insert(op);
  if (op->deadline <= Clock::now()) return finish_early(op, Status::kMissDeadline);
  op->timer = io_.loop.at(op->deadline, [this, op] {
    op->timer = 0;
    finish_early(op, Status::kMissDeadline);
  });
  if (routing_) return plan(op);
  if (no_view_to_be_had_) return finish_early(op, Status::kMissNodeDown);
  waiting_.push_back(op);
}

void Core::finish_early(const std::shared_ptr<Operation>& op, Status status) {
  if (!active_.contains(op)) return;
  // First every request lets go of the caller's memory; what happens on the connections after that is only
  // framing.
  std::vector<std::shared_ptr<Request>> in_flight;
  for (const auto& request : op->requests) {
    if (request->state == Request::State::kEnded) continue;
    if (request->state == Request::State::kInFlight) in_flight.push_back(request);
    if (request->state == Request::State::kQueued) request->state = Request::State::kEnded;
    detach(*request);
  }
  std::erase(waiting_, op);
  op->end_all(status);
  complete(op);
  for (const auto& request : in_flight) {
    if (const auto connection = request->connection.lock()) connection->abandon(request);
  }
}

void Core::complete(const std::shared_ptr<Operation>& op) {
  const auto keep = op;  // NOLINT(performance-unnecessary-copy-initialization): op may be the one erased here
  if (active_.erase(op) == 0) return;
  if (op->timer != 0) io_.loop.cancel(std::exchange(op->timer, 0));
  op->end_all(Status::kMissNodeDown);  // none is left, unless a request was lost without a word
  account(*op);
  op->finish();
  io_.loop.nudge_guest();
}

void Core::account(const Operation& op) {
  auto& counters = io_.counters;
  auto& kind = counters.kinds[static_cast<std::size_t>(op.kind())];
  bump(kind.operations);
  bump(kind.payload_bytes, op.payload_bytes());
  bool deadline = false;
  bool cancelled = false;
  // Neighbours mostly end alike: one step of a shared counter for each run of them.
  const auto& statuses = op.statuses();
  for (auto run = statuses.begin(); run != statuses.end();) {
    const auto end = std::find_if(run, statuses.end(), [run](auto value) { return value != *run; });
    const auto status = static_cast<Status>(*run);
    bump(kind.statuses[ClientCounters::status_slot(status)], static_cast<std::uint64_t>(end - run));
    deadline |= status == Status::kMissDeadline;
    cancelled |= status == Status::kMissCancelled;
    run = end;
  }
  if (deadline) bump(counters.deadline_hits);
  if (cancelled) bump(counters.cancelled);
  drop(counters.inflight_operations, 1);
  drop(counters.inflight_bytes, op.input.payload_bytes);
}

std::vector<LinkReport> Core::report() const {
  auto* self = const_cast<Core*>(this);
  const auto answer = std::make_shared<std::promise<std::vector<LinkReport>>>();
  auto future = answer->get_future();
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return {};
    self->io_.loop.post([self, answer] {
      std::vector<LinkReport> reports;
      for (const auto& [id, link] : self->links_) {
        const auto endpoints = link->endpoints();
        reports.push_back(
            {id, endpoints.empty() ? "" : endpoints[0].host + ":" + std::to_string(endpoints[0].port),
             link->down(), link->ready_connections(), link->last_error()});
      }
      if (self->links_.empty() && self->source_ && !self->source_->last_error().empty()) {
        reports.push_back({"", "", true, 0, self->source_->last_error()});
      }
      answer->set_value(std::move(reports));
    });
  }
  // What was posted before end() runs; the limit is for a machine that is out of breath.
  if (future.wait_for(std::chrono::seconds(1)) != std::future_status::ready) return {};
  return future.get();
}

}  // namespace dfkv::client
