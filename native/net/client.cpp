#include "net/client.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <stdexcept>

#include "net/client_view_file.h"
#include "net/scheduling.h"

namespace dfkv::client {

namespace {

Options checked(Options options) {
  if (options.last_view.empty()) options.last_view = load_view(options.last_view_path);
  if (options.seeds.empty() && options.last_view.empty()) {
    throw std::invalid_argument("no address of a node to ask first, and no last view");
  }
  for (const auto& seed : options.seeds) {
    if (seed.host.empty() || seed.port == 0) {
      throw std::invalid_argument("'" + seed.host + ":" + std::to_string(seed.port) +
                                  "' is not a host and a port");
    }
  }
  if (options.connections_per_node == 0 || options.connections_per_node > 64) {
    throw std::invalid_argument("connections_per_node is " + std::to_string(options.connections_per_node) +
                                "; it must be 1 to 64");
  }
  if (options.connect_timeout_ms == 0) throw std::invalid_argument("connect_timeout_ms must be above 0");
  if (options.name.size() > 128) options.name.resize(128);
  return options;
}

// The engine's signals are not for this thread.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

Client::Client(Options options)
    : pid_(::getpid()),
      common_(std::make_shared<Common>(checked(std::move(options)))),
      workers_(std::make_unique<std::array<Worker, 2>>()) {
  for (const auto lane : {Lane::kControl, Lane::kBulk}) {
    (*workers_)[static_cast<std::size_t>(lane)].core = std::make_shared<Core>(common_, lane);
  }
  core_for(Lane::kControl).lead((*workers_)[static_cast<std::size_t>(Lane::kBulk)].core);
  const BlockSignals block;
  try {
    for (const auto lane : {Lane::kControl, Lane::kBulk}) {
      Worker& worker = (*workers_)[static_cast<std::size_t>(lane)];
      worker.thread = std::thread([core = worker.core, lane] {
        ::pthread_setname_np(::pthread_self(), lane == Lane::kControl ? "dfkv-lookups" : "dfkv-payload");
        if (lane == Lane::kControl) prefer_short_turns();
        core->run();
      });
    }
  } catch (...) {
    end();
    throw;
  }
}

Client::~Client() {
  if (in_own_process()) {
    end();
    return;
  }
  // A forked child: the threads are not here and their locks may be held for ever. Nothing of them can be
  // ended properly, so they are left as they are.
  [[maybe_unused]] auto* workers = workers_.release();
  [[maybe_unused]] auto* common = new std::shared_ptr<Common>(std::move(common_));
}

void Client::end() {
  for (const auto& worker : *workers_) worker.core->end();
  for (auto& worker : *workers_) {
    if (worker.thread.joinable()) worker.thread.join();
  }
}

bool Client::in_own_process() const { return ::getpid() == pid_; }

void Client::check_process() const {
  if (in_own_process()) return;
  throw std::runtime_error("this client was made by process " + std::to_string(pid_) +
                           " and does not work in its forked child " + std::to_string(::getpid()) +
                           "; make one after the fork");
}

bool Client::close(std::chrono::nanoseconds timeout) {
  check_process();
  const auto until = Clock::now() + timeout;
  for (const auto& worker : *workers_) worker.core->end();
  const std::lock_guard lock(close_mutex_);
  for (auto& worker : *workers_) {
    if (!worker.core->wait_ended(until)) return false;
    if (worker.thread.joinable()) worker.thread.join();
  }
  return true;
}

bool Client::wait_ready(std::chrono::nanoseconds timeout) {
  check_process();
  return core_for(Lane::kControl).wait_ready(timeout);
}

NamespaceId Client::add_namespace(std::vector<std::byte> descriptor, std::string label) {
  check_process();
  if (!parse_descriptor(descriptor)) {
    throw std::invalid_argument(
        "the namespace descriptor is not canonical: fields in ascending tag order, each once, " +
        std::to_string(kMaxDescriptorBytes) + " bytes at most");
  }
  if (label.size() > 256) label.resize(256);
  const auto entry = std::make_shared<NamespaceBook::Entry>();
  entry->id = namespace_id(descriptor);
  entry->descriptor = std::move(descriptor);
  entry->label = std::move(label);
  for (const auto& worker : *workers_) worker.core->add_namespace(entry);
  return entry->id;
}

std::optional<std::vector<std::uint16_t>> Client::namespace_difference(const NamespaceId& id) {
  check_process();
  for (const auto& worker : *workers_) {
    if (auto tags = worker.core->io().namespaces.difference(id)) return tags;
  }
  return std::nullopt;
}

std::shared_ptr<Operation> Client::submit(Input input, std::chrono::nanoseconds deadline) {
  check_process();
  input.validate();
  auto& core = core_for(lane_of(input.kind));
  return core.submit(std::move(input), Clock::now() + deadline);
}

std::shared_ptr<Operation> Client::ask(Input input, std::chrono::nanoseconds deadline,
                                       std::chrono::nanoseconds wait) {
  check_process();
  input.validate();
  const auto now = Clock::now();
  if (lane_of(input.kind) == Lane::kControl) {
    return core_for(Lane::kControl).ask(std::move(input), now + deadline, now + wait);
  }
  auto operation = core_for(Lane::kBulk).submit(std::move(input), now + deadline);
  (void)operation->wait(wait);
  return operation;
}

void Client::release(std::vector<Lease> leases) {
  check_process();
  core_for(Lane::kControl).release(std::move(leases));
}

std::vector<std::byte> Client::encoded_view() const { return core_for(Lane::kControl).encoded_view(); }

std::vector<NodeReport> Client::report() const {
  check_process();
  std::vector<NodeReport> nodes;
  for (auto& link : core_for(Lane::kControl).report()) {
    nodes.push_back({std::move(link.node_id), std::move(link.address), link.down, link.down, link.connections,
                     std::move(link.last_error)});
  }
  for (auto& link : core_for(Lane::kBulk).report()) {
    const auto node = std::ranges::find(nodes, link.node_id, &NodeReport::node_id);
    if (node == nodes.end()) continue;
    node->bulk_down = link.down;
    node->connections += link.connections;
    if (node->last_error.empty()) node->last_error = std::move(link.last_error);
  }
  return nodes;
}

}  // namespace dfkv::client
