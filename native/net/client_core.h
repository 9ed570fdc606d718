// What runs on one of the client's I/O threads: operations in, requests to nodes out, completions back. Each
// lane has a thread: a lookup must not wait until megabytes have been received and checked.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "net/client_io.h"
#include "net/client_node.h"
#include "net/client_routing.h"

namespace dfkv::client {

struct LinkReport {
  std::string node_id;
  std::string address;
  bool down = false;
  std::uint32_t connections = 0;
  std::string last_error;
};

class Core : public std::enable_shared_from_this<Core> {
 public:
  Core(std::shared_ptr<Common> common, Lane lane);
  ~Core();

  // Before run(), on the core of the control lane, which follows the view: gives `other` what it learns.
  void lead(std::shared_ptr<Core> other) { other_ = std::move(other); }

  // ---- The thread that runs the loop.
  void run();

  // ---- Any thread.
  // Throw std::runtime_error when closed.
  [[nodiscard]] std::shared_ptr<Operation> submit(Input input, Clock::time_point deadline);
  // submit() and Operation::wait() in one: the calling thread begins the operation itself where it can.
  [[nodiscard]] std::shared_ptr<Operation> ask(Input input, Clock::time_point deadline,
                                               Clock::time_point until);
  // Does the I/O thread's work for requests without payload until the operation is done or `until`, or
  // returns at once because somebody else does: one wake-up less on the way of the answer. Not on the I/O
  // thread.
  void help(const Operation& op, Clock::time_point until);
  void cancel(const std::shared_ptr<Operation>& operation);
  void release(std::vector<Lease> leases);
  void add_namespace(std::shared_ptr<const NamespaceBook::Entry> entry);
  void end();                                              // ends every operation, then the loop
  [[nodiscard]] bool wait_ended(Clock::time_point until);  // run() is over
  [[nodiscard]] bool wait_ready(std::chrono::nanoseconds timeout);
  [[nodiscard]] std::vector<std::byte> encoded_view() const;
  [[nodiscard]] std::vector<LinkReport> report() const;
  [[nodiscard]] Io& io() { return io_; }

 private:
  // client_core.cpp: life of operations.
  [[nodiscard]] std::shared_ptr<Operation> admit(Input input, Clock::time_point deadline);  // any thread
  void post(const std::shared_ptr<Operation>& op);                                          // any thread
  [[noreturn]] void refuse_closed(const Operation& op);                                     // any thread
  void begin(const std::shared_ptr<Operation>& op);
  void finish_early(const std::shared_ptr<Operation>& op, Status status);
  void complete(const std::shared_ptr<Operation>& op);
  void account(const Operation& op);
  void end_everything();

  // client_plan.cpp: from an operation to requests.
  void plan(const std::shared_ptr<Operation>& op);
  void plan_keys(const std::shared_ptr<Operation>& op, const Ring& ring, std::vector<std::uint32_t> keys);
  void plan_removal(const std::shared_ptr<Operation>& op);
  [[nodiscard]] std::uint32_t connections_for(Kind kind) const;
  void plan_nodes(const std::shared_ptr<Operation>& op);
  void ask_node(const std::shared_ptr<Operation>& op, std::uint32_t index, std::uint64_t cursor);

  // client_links.cpp: nodes.
  void take_routing(std::shared_ptr<const Routing> routing);
  void no_routing();
  [[nodiscard]] bool answers(const std::string& node_id) const;
  [[nodiscard]] bool any_answers() const;
  void retire_links();

  const Lane lane_;
  Io io_;
  Resolver resolver_;
  std::shared_ptr<Core> other_;

  // I/O thread.
  std::unique_ptr<RoutingSource> source_;  // control lane, while the loop runs
  std::shared_ptr<const Routing> routing_;
  std::vector<NodeLink*> node_links_;  // in the order of the view's nodes; null: it is gone
  std::map<std::string, std::unique_ptr<NodeLink>> links_;
  std::vector<std::unique_ptr<NodeLink>> retired_;
  std::unordered_set<std::shared_ptr<Operation>> active_;
  std::vector<std::shared_ptr<Operation>> waiting_;  // for the first view
  bool no_view_to_be_had_ = false;  // every seed failed: without a view keys are a miss at once
  EventLoop::TimerId retire_timer_ = 0;

  // Shared.
  mutable std::mutex mutex_;
  std::condition_variable ready_changed_;
  bool ready_ = false;
  bool closed_ = false;
  bool ended_ = false;
  std::vector<std::byte> raw_view_;
};

}  // namespace dfkv::client
