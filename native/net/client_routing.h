// The client's routing: which view is in use, and its rings. Lives on the thread of the control lane, and is
// handed on to the other one.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "net/client_io.h"
#include "net/client_view.h"
#include "net/client_view_file.h"
#include "net/ring.h"

namespace dfkv::client {

// A view with its rings. Never changes once it is handed on.
struct Routing {
  View view;                      // with the kept nodes
  std::vector<std::string> kept;  // nodes that the view as told leaves out, see keep_answering()
  std::vector<std::byte> raw;
  Ring read;
  Ring write;
  std::string seed_host;
  bool confirmed = true;
};

// Follows the seeds' views and builds a routing for each that is taken. I/O thread only.
class RoutingSource {
 public:
  struct Hooks {
    std::function<bool(const std::string& node_id)> answers;  // a connection to it stands
    std::function<bool()> any_answers;
    std::function<void(std::shared_ptr<const Routing>)> take;
    std::function<void()> none;  // every seed has failed, and there is no last view
  };

  RoutingSource(Io& io, Resolver& resolver, Hooks hooks);
  ~RoutingSource();

  void start() { follower_.start(); }
  void shut() { follower_.shut(); }
  [[nodiscard]] const std::string& last_error() const { return follower_.last_error(); }

 private:
  void offer(View view, std::vector<std::byte> raw, const std::string& seed_host, bool confirmed);
  void build_next();
  static void build(Routing& routing, const Routing* before);
  void built();
  void watch_kept();
  void drop_silent();
  void seeds_failed();

  Io& io_;
  const Hooks hooks_;
  ViewFollower follower_;
  std::shared_ptr<ViewSaver> saver_;
  std::shared_ptr<const Routing> current_;
  std::shared_ptr<Routing> building_;
  std::shared_ptr<Routing> next_to_build_;
  std::thread builder_;
  EventLoop::TimerId kept_timer_ = 0;
  bool last_view_offered_ = false;
};

}  // namespace dfkv::client
