#include "net/client.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <stdexcept>

#include "net/client_view_file.h"

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
    : pid_(::getpid()), core_(std::make_shared<Core>(checked(std::move(options)))) {
  const BlockSignals block;
  thread_ = std::make_unique<std::thread>([core = core_] {
    ::pthread_setname_np(::pthread_self(), "dfkv-client");
    core->run();
  });
}

Client::~Client() {
  if (in_own_process()) {
    core_->end();
    if (thread_->joinable()) thread_->join();
    return;
  }
  // A forked child: the thread is not here and its locks may be held for ever. Nothing of it can be ended
  // properly, so it is left as it is.
  [[maybe_unused]] auto* thread = thread_.release();
  [[maybe_unused]] auto* core = new std::shared_ptr<Core>(std::move(core_));
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
  core_->end();
  const std::lock_guard lock(close_mutex_);
  if (!core_->wait_ended(timeout)) return false;
  if (thread_->joinable()) thread_->join();
  return true;
}

bool Client::wait_ready(std::chrono::nanoseconds timeout) {
  check_process();
  return core_->wait_ready(timeout);
}

NamespaceId Client::add_namespace(std::vector<std::byte> descriptor, std::string label) {
  check_process();
  if (!parse_descriptor(descriptor)) {
    throw std::invalid_argument(
        "the namespace descriptor is not canonical: fields in ascending tag order, each once, " +
        std::to_string(kMaxDescriptorBytes) + " bytes at most");
  }
  if (label.size() > 256) label.resize(256);
  auto entry = std::make_shared<NamespaceBook::Entry>();
  entry->id = namespace_id(descriptor);
  entry->descriptor = std::move(descriptor);
  entry->label = std::move(label);
  const auto id = entry->id;
  core_->add_namespace(std::move(entry));
  return id;
}

std::optional<std::vector<std::uint16_t>> Client::namespace_difference(const NamespaceId& id) {
  check_process();
  return core_->io().namespaces.difference(id);
}

std::shared_ptr<Operation> Client::submit(Input input, std::chrono::nanoseconds deadline) {
  check_process();
  input.validate();
  return core_->submit(std::move(input), Clock::now() + deadline);
}

void Client::release(std::vector<Lease> leases) {
  check_process();
  core_->release(std::move(leases));
}

std::vector<std::byte> Client::encoded_view() const { return core_->encoded_view(); }

std::vector<NodeReport> Client::report() const {
  check_process();
  return core_->report();
}

}  // namespace dfkv::client
