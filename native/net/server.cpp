#include "net/server.h"

#include <sys/epoll.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace dfkv::server {

namespace {

constexpr std::chrono::milliseconds kTick(100);         // leases expire to within this
constexpr std::chrono::milliseconds kAcceptPause(100);  // while the process has no descriptors left
constexpr std::uint32_t kAcceptBatch = 64;
constexpr std::uint32_t kMayShed = 1024;  // connections being closed to make room, over the limit meanwhile
constexpr std::size_t kMaxNodeIdBytes = 128;
constexpr std::uint32_t kMaxThreads = 256;

void append_disk_counters(const DiskStats& disk, Counters& out) {
  const Counters counters{
      {"disk_directories", disk.directories},
      {"disk_directories_failing", disk.directories_failing},
      {"disk_capacity_bytes", disk.capacity_bytes},
      {"disk_used_bytes", disk.used_bytes},
      {"disk_bound_bytes", disk.bound_bytes},
      {"disk_quarantined_bytes", disk.quarantined_bytes},
      {"disk_objects", disk.objects},
      {"disk_quarantined", disk.quarantined},
      {"disk_pins", disk.pins},
      {"disk_leased_bytes", disk.leased_bytes},
      {"disk_reads", disk.reads},
      {"disk_writes", disk.writes},
      {"disk_read_bytes", disk.read_bytes},
      {"disk_written_bytes", disk.written_bytes},
      {"disk_read_errors", disk.read_errors},
      {"disk_write_errors", disk.write_errors},
      {"disk_corrupt", disk.corrupt},
      {"disk_evicted_objects", disk.evicted_objects},
      {"disk_evicted_bytes", disk.evicted_bytes},
      {"disk_lost_writes", disk.lost_writes},
      {"disk_joined_reads", disk.joined_reads},
      {"disk_promoted", disk.promoted},
      {"dirty_objects", disk.dirty_objects},
      {"dirty_bytes", disk.dirty_bytes},
  };
  out.insert(out.end(), counters.begin(), counters.end());
}

void expect(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

ServerOptions checked(ServerOptions options) {
  expect(!options.node_id.empty() && options.node_id.size() <= kMaxNodeIdBytes,
         "node_id has " + std::to_string(options.node_id.size()) + " bytes; give it 1 to 128");
  expect(options.threads >= 1 && options.threads <= kMaxThreads,
         "threads is " + std::to_string(options.threads) + "; choose 1 to " + std::to_string(kMaxThreads));
  expect(options.max_connections >= 1, "max_connections is 0; choose at least 1");
  expect(options.handshake_timeout_ms >= 1 && options.stall_timeout_ms >= 1,
         "a timeout of 0 ms ends every connection");
  expect(!options.secret || !options.secret->empty(),
         "the secret is empty; give it some bytes, or none at all");
  expect(options.limits.max_meta_bytes >= kMinMetaBytes &&
             options.limits.max_fragment_bytes >= kMinFragmentBytes,
         "the frame limits are below " + std::to_string(kMinMetaBytes) + " and " +
             std::to_string(kMinFragmentBytes));
  return options;
}

}  // namespace

Server::Server(Store& store, ServerOptions options)
    : store_(store),
      options_(checked(std::move(options))),
      listener_(listen_tcp(options_.host, options_.port, !options_.secret && !options_.insecure)),
      budget_(options_.max_request_bytes),
      reads_ahead_(store_.stats().capacity_bytes / kReadAheadShare) {
  // The first one is the lobby.
  for (std::uint32_t i = 0; i <= options_.threads; ++i) {
    Reactor::Settle settle;
    if (i == 0) {
      settle = [this](std::shared_ptr<Session> session, std::uint64_t id) {
        reactors_[next_reactor_]->take(std::move(session), id);
        next_reactor_ = next_reactor_ % options_.threads + 1;
      };
    }
    reactors_.push_back(std::make_unique<Reactor>(
        store_, options_, views_, budget_, reads_ahead_, [this] { return stats(); },
        [this] { open_.fetch_sub(1, std::memory_order_relaxed); }, std::move(settle)));
  }
}

Server::~Server() {
  while (!stop(Clock::now() + std::chrono::seconds(1))) {
  }
}

void Server::start() {
  const std::lock_guard lock(mutex_);
  if (stage_ != Stage::kNew) throw std::logic_error("a server starts once; make a new one");
  stage_ = Stage::kRunning;
  EventLoop& loop = reactors_.front()->loop();
  loop.add(listener_.fd.get(), EPOLLIN, [this](std::uint32_t) { on_listener(); });
  loop.at(Clock::now() + kTick, [this] { tick(); });
  for (std::uint32_t i = 0; i < reactors_.size(); ++i) {
    reactors_[i]->start(i == 0 ? "dfkv-lobby" : "dfkv-net-" + std::to_string(i));
  }
}

bool Server::stop(Clock::time_point deadline) {
  const std::lock_guard lock(mutex_);
  if (stage_ == Stage::kStopped) return true;
  if (stage_ == Stage::kNew) {
    listener_.fd.reset();
    stage_ = Stage::kStopped;
    return true;
  }
  if (stage_ == Stage::kRunning) {
    stage_ = Stage::kStopping;
    // First the listener and the sessions beside it, on their thread, so that no reactor is given a
    // connection after it has closed what it had.
    reactors_.front()->loop().post([this] {
      reactors_.front()->loop().remove(listener_.fd.get());
      listener_.fd.reset();
      reactors_.front()->close_all();
      for (const auto& reactor : reactors_) reactor->stop();
    });
  }
  bool all = true;
  for (const auto& reactor : reactors_) all = reactor->join(deadline) && all;
  if (all) stage_ = Stage::kStopped;
  return all;
}

void Server::on_listener() {
  EventLoop& loop = reactors_.front()->loop();
  ServerCounters& counters = reactors_.front()->own_counters();
  // A bounded number at a time: established connections get their turn in between.
  for (std::uint32_t i = 0; i < kAcceptBatch; ++i) {
    Fd fd;
    switch (accept_tcp(listener_.fd.get(), fd)) {
      case AcceptResult::kNone:
        return;
      case AcceptResult::kNoDescriptors:
        // The waiting connection would be announced again at once, for ever.
        counters.connections_refused.add();
        (void)make_room(kAcceptBatch);
        loop.modify(listener_.fd.get(), 0);
        loop.at(Clock::now() + kAcceptPause, [this] { resume_listener(); });
        return;
      case AcceptResult::kAccepted:
        break;
    }
    const std::uint32_t open = open_.load(std::memory_order_relaxed);
    // Closing one takes a moment: for its time there may be a few too many.
    const bool room =
        open < options_.max_connections || (open < options_.max_connections + kMayShed && make_room(1));
    if (!room) {
      counters.connections_refused.add();
      continue;
    }
    open_.fetch_add(1, std::memory_order_relaxed);
    reactors_.front()->adopt(std::move(fd), next_id_++);
  }
}

// Connections that say nothing make way for newer ones, so that they cannot keep others out. False: there are
// none.
bool Server::make_room(std::size_t connections) {
  if (reactors_.front()->half_open() == 0) return false;
  reactors_.front()->shed_half_open(connections);
  return true;
}

void Server::resume_listener() {
  if (listener_.fd) reactors_.front()->loop().modify(listener_.fd.get(), EPOLLIN);
}

void Server::tick() {
  store_.tick();
  reactors_.front()->loop().at(Clock::now() + kTick, [this] { tick(); });
}

void Server::publish_view(Bytes view) {
  views_.publish(view);
  for (const auto& reactor : reactors_) reactor->view_changed();
}

Counters Server::stats() const {
  const StoreStats store = store_.stats();
  Counters out{
      {"capacity_bytes", store.capacity_bytes},
      {"used_bytes", store.used_bytes},
      {"stored_bytes", store.stored_bytes},
      {"objects", store.objects},
      {"chunks", store.chunks},
      {"namespaces", store.namespaces},
      {"pins", store.pins},
      {"leases", store.leases},
      {"leased_bytes", store.leased_bytes},
      {"filling", store.filling},
      {"condemned", store.condemned},
      {"evicted_objects", store.evicted_objects},
      {"evicted_bytes", store.evicted_bytes},
      {"put_already", store.put_already},
      {"put_refused", store.put_refused},
      {"connections_open", open_.load(std::memory_order_relaxed)},
      {"request_bytes", budget_.used_bytes()},
  };
  if (store.disk) append_disk_counters(*store.disk, out);
  std::vector<const ServerCounters*> sets;
  for (const auto& reactor : reactors_) sets.push_back(&reactor->counters());
  append_counters(sets, out);
  return out;
}

}  // namespace dfkv::server
