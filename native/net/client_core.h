// What runs on the client's I/O thread: operations in, requests to nodes out, completions back.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "net/client_io.h"
#include "net/client_node.h"
#include "net/client_view.h"
#include "net/client_view_file.h"
#include "net/ring.h"

namespace dfkv::client {

// A view with its rings, and the links to its nodes in the order of view.nodes.
struct Routing {
  View view;                      // with the kept nodes
  std::vector<std::string> kept;  // nodes that the view as told leaves out, see keep_answering()
  std::vector<std::byte> raw;
  Ring read;
  Ring write;
  std::string seed_host;
  bool confirmed = true;
  std::vector<NodeLink*> links;
};

struct NodeReport {
  std::string node_id;
  std::string address;
  bool control_down = false;
  bool bulk_down = false;
  std::uint32_t connections = 0;
  std::string last_error;
};

class Core : public std::enable_shared_from_this<Core> {
 public:
  explicit Core(Options options);
  ~Core();

  // ---- The thread that runs the loop.
  void run();

  // ---- Any thread.
  [[nodiscard]] std::shared_ptr<Operation> submit(Input input,
                                                  Clock::time_point deadline);  // throws when closed
  void cancel(const std::shared_ptr<Operation>& operation);
  void release(std::vector<Lease> leases);
  void add_namespace(std::shared_ptr<const NamespaceBook::Entry> entry);
  void end();                                                       // ends every operation, then the loop
  [[nodiscard]] bool wait_ended(std::chrono::nanoseconds timeout);  // run() is over
  [[nodiscard]] bool wait_ready(std::chrono::nanoseconds timeout);
  [[nodiscard]] std::vector<std::byte> encoded_view() const;
  [[nodiscard]] std::vector<NodeReport> report() const;
  [[nodiscard]] Io& io() { return io_; }
  [[nodiscard]] const std::shared_ptr<CompletionQueue>& completions() const { return completions_; }

 private:
  // client_core.cpp: life of operations.
  void begin(const std::shared_ptr<Operation>& op);
  void finish_early(const std::shared_ptr<Operation>& op, Status status);
  void complete(const std::shared_ptr<Operation>& op);
  void account(const Operation& op);
  void end_everything();

  // client_plan.cpp: from an operation to requests.
  void plan(const std::shared_ptr<Operation>& op);
  void plan_keys(const std::shared_ptr<Operation>& op, const Ring& ring, std::vector<std::uint32_t> keys);
  void plan_removal(const std::shared_ptr<Operation>& op);
  void plan_nodes(const std::shared_ptr<Operation>& op);
  void ask_node(const std::shared_ptr<Operation>& op, std::uint32_t index, std::uint64_t cursor);

  // client_routing.cpp: views.
  void offer_view(View view, std::vector<std::byte> raw, const std::string& seed_host, bool confirmed);
  void build_next();
  static void build(Routing& routing, const Routing* before);
  void take_routing();
  void watch_kept();
  void drop_silent();
  [[nodiscard]] bool answers(const std::string& node_id) const;
  void seeds_failed();
  void retire_links();

  Io io_;
  Resolver resolver_;
  std::shared_ptr<CompletionQueue> completions_ = std::make_shared<CompletionQueue>();

  // I/O thread.
  std::unique_ptr<ViewFollower> follower_;
  std::shared_ptr<Routing> routing_;
  std::map<std::string, std::unique_ptr<NodeLink>> links_;
  std::vector<std::unique_ptr<NodeLink>> retired_;
  std::unordered_set<std::shared_ptr<Operation>> active_;
  std::vector<std::shared_ptr<Operation>> waiting_;  // for the first view
  bool last_view_offered_ = false;
  bool no_view_to_be_had_ = false;  // every seed failed: without a view keys are a miss at once
  std::shared_ptr<ViewSaver> saver_;
  std::thread ring_builder_;
  std::shared_ptr<Routing> building_;
  std::shared_ptr<Routing> next_to_build_;
  EventLoop::TimerId retire_timer_ = 0;
  EventLoop::TimerId kept_timer_ = 0;

  // Shared.
  mutable std::mutex mutex_;
  std::condition_variable ready_changed_;
  bool ready_ = false;
  bool closed_ = false;
  bool ended_ = false;
  std::vector<std::byte> raw_view_;
};

}  // namespace dfkv::client
