// The view of the cluster as the client follows it: which views are taken, and where they come from.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "net/client_connection.h"
#include "net/client_resolve.h"
#include "wire/view.h"

namespace dfkv::client {

enum class ViewVerdict : std::uint8_t {
  kTake,
  kSame,         // the one there is
  kOlder,        // a lower (cluster id, revision)
  kEmpty,        // no node that could be read
  kUnknownRule,  // a placement rule this client does not know
};

struct ViewContext {
  bool confirmed = true;  // the current view came from a seed, not from the disk
  bool reachable = true;  // some node of the current view answers
};

// Whether `candidate` takes the place of `current` (null: none yet). Views of one cluster go by their
// revision. A view of another cluster is taken when its id is higher, and also when there is nothing to lose:
// the current one was only read from disk, or none of its nodes answers (they were replaced by others at the
// same addresses).
[[nodiscard]] ViewVerdict judge_view(const View* current, const ViewContext& context, const View& candidate);

// Puts back into `candidate` the nodes of `current` that it leaves out without a word although they answer
// this client: whoever made it may have lost sight of them. A node that left on purpose is listed as gone.
// Returns the ids of those put back.
std::vector<std::string> keep_answering(const View& current, View& candidate,
                                        const std::function<bool(const std::string& id)>& answers);

// Asks the seeds in turn until one answers, then stays with it and waits there for changes. I/O thread only.
class ViewFollower : public Connection::Owner {
 public:
  // `raw` is the encoded view. An answer without a view is not reported.
  using OnView = std::function<void(View view, std::vector<std::byte> raw, const std::string& seed_host)>;
  using OnRoundFailed = std::function<void()>;  // every seed has been tried in vain since the last answer

  ViewFollower(Io& io, Resolver& resolver, OnView on_view, OnRoundFailed on_round_failed);
  ~ViewFollower() override;

  void start();
  void shut();
  [[nodiscard]] const std::string& last_error() const { return last_error_; }

  void on_ready(Connection& connection) override;
  void on_room(Connection& connection) override;
  void on_failed(Connection& connection, Failure failure) override;

 private:
  void connect();
  void poll();
  void answered(Status status, const ReplyMeta* reply, Bytes payload);
  void next_seed(const std::string& why);
  void later(std::uint32_t delay_ms, EventLoop::Task task);

  Io& io_;
  Resolver& resolver_;
  OnView on_view_;
  OnRoundFailed on_round_failed_;
  std::shared_ptr<Connection> connection_;
  std::size_t seed_ = 0;
  std::uint32_t failures_ = 0;        // seeds tried in a row without an answer
  std::uint64_t known_revision_ = 0;  // of the view this seed told last
  Clock::time_point polled_at_{};
  EventLoop::TimerId timer_ = 0;
  std::string last_error_;
  bool shut_ = false;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace dfkv::client
