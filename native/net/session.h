// One connection of the server. Lives on one reactor's thread at a time; nothing here is locked. It begins
// where connections are accepted; one that moves payload goes on to another reactor when its handshake is
// over, so that small requests never wait for payload.
//
// Split by role: session.cpp (events, output, deadlines), session_handshake.cpp, session_frames.cpp (what a
// frame is and where its payload goes), session_get.cpp, session_put.cpp, session_ops.cpp (the small
// operations).
#pragma once

#include <array>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "net/counters.h"
#include "net/event_loop.h"
#include "net/fd.h"
#include "net/frame_receiver.h"
#include "net/output_queue.h"
#include "net/put_queue.h"
#include "net/request_memory.h"
#include "net/server_options.h"
#include "net/view_board.h"
#include "slab/recycled.h"
#include "slab/store.h"
#include "wire/checksum.h"
#include "wire/meta.h"

namespace dfkv::server {

// What a reactor gives to its sessions. Outlives them.
struct SessionContext {
  EventLoop& loop;
  Store& store;
  const ServerOptions& options;
  const ViewBoard& views;
  ServerCounters& counters;
  MutableBytes scratch;  // shared by the sessions of the reactor: for payload thrown away
  RequestBudget& budget;
  RequestBudget& reads_ahead;  // payload that is read from disks before its turn
  PutQueue& put_queue;
  std::function<Counters()> stats;
  std::function<void(std::uint64_t id)> introduced;  // the session is past its handshake
  std::function<void(std::uint64_t id)> forget;      // the session has closed
  // The session moves payload and belongs on another reactor: this one has let go of it. Empty: it stays.
  std::function<void(std::uint64_t id)> settle;
};

class Session final : public std::enable_shared_from_this<Session>, private FrameSink {
 public:
  // id: unique in the process; also the owner of this connection's leases.
  Session(SessionContext& context, Fd fd, std::uint64_t id);
  ~Session() override;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  void start();
  // Goes on with another reactor, on whose thread this is called, after `settle`.
  void move_to(SessionContext& context);
  // Drops everything, and with it every pin, filling slot and lease. Idempotent.
  void close();
  // Closes when a deadline has passed. Called every so often by the reactor.
  void check_deadlines(Clock::time_point now);
  void view_changed();
  // There may be memory for the item that waits for some. False: not yet. Called by the queue it waits in.
  [[nodiscard]] bool take_room(Clock::time_point now);

 private:
  enum class Stage : std::uint8_t {
    kHello,
    kAuth,
    kReady,
    kLingering,  // answered for the last time: what the peer still sends is thrown away
    kClosed,
  };

  // An item that the store was asked for.
  struct Asked {
    BudgetShare ahead_of_its_turn;
    bool answered = false;
    ReadResult result;
  };
  struct GetRequest {
    std::uint64_t serial = 0;  // tells it from a later one with the same id
    NamespaceId ns;
    std::vector<ItemRef> items;
    std::vector<std::uint16_t> statuses;
    Clock::time_point arrived;
    std::optional<Clock::time_point> deadline;
    std::size_t next = 0;          // the item being sent, or the next one
    std::shared_ptr<ReadPin> pin;  // of that item, once it is being sent
    std::size_t sent = 0;          // bytes of it that are queued
    bool begun = false;
    bool waiting = false;        // for the store to read the next item
    RecycledDeque<Asked> ahead;  // the items up to `asked`, from the first that was not taken on
    std::size_t asked = 0;       // how many items the store was asked for
  };
  struct PutRequest {
    NamespaceId ns;
    std::vector<ItemRef> items;
    std::vector<std::uint16_t> statuses;
    std::optional<Clock::time_point> deadline;
    PutOptions options;
    Status refused = Status::kOk;  // the whole request: the rest of it is drained
    std::string reason;
    bool cancelled = false;
    std::size_t next = 0;  // the item being received, or the first that may come
    bool item_open = false;
    Status item_status = Status::kOk;
    std::unique_ptr<WriteTicket> ticket;  // while the item's payload is wanted
    bool wants_room = false;              // the item has to wait for memory
    bool waited_in_vain = false;          // one has, and no other of this request does
    std::size_t received = 0;
    StreamingChecksum checksum;
    std::optional<std::uint64_t> announced;  // the sender's checksum, with the last fragment
    std::uint64_t serial = 0;                // tells it from a later one with the same id
    std::size_t committing = 0;              // items that the store has not confirmed yet
    bool ended = false;                      // all of it was received
  };
  // An operation that the store ends later: answered by a task that the store's callback posts.
  struct Waiting {
    std::uint64_t serial = 0;
    std::uint8_t opcode = 0;
  };
  struct Subscription {
    std::uint64_t known_revision = 0;
    EventLoop::TimerId timer = 0;
  };
  using Request = std::variant<GetRequest, PutRequest, Subscription, Waiting>;

  // What becomes of the payload of the frame being received.
  enum class Payload : std::uint8_t { kDrain, kTable, kSlot };

  // ---- FrameSink (session_frames.cpp)
  bool on_header(const FrameHeader& header) override;
  bool on_meta(const FrameHeader& header, Bytes meta) override;
  [[nodiscard]] bool payload_waits() const override { return room_until_.has_value(); }
  MutableBytes payload_space(std::size_t left) override;
  bool on_payload(MutableBytes written, bool copied) override;
  bool on_frame_end(const FrameHeader& header) override;
  void on_fault(FrameFault fault) override;
  bool dispatch(const FrameHeader& header);
  void dispatch_known(const FrameHeader& header);
  [[nodiscard]] bool check_request_frame(const FrameHeader& header);

  // ---- events (session.cpp)
  void on_event(std::uint32_t events);
  // Runs what a timer or a task has to do, then sends. No exception leaves: out of memory, in all likelihood,
  // and this connection pays for it while the others go on.
  template <typename Work>
  void guarded(Work&& work);
  void on_readable();
  void flush();
  void update_interest();
  void linger();
  void discard_input();
  void continue_later();
  void drop_table();
  bool protocol_fault();  // closes; returns false
  void reply(const FrameHeader& to, const ReplyMeta& meta, Bytes payload = {}, bool error = false);
  void reply(std::uint8_t opcode, std::uint64_t request_id, const ReplyMeta& meta, Bytes payload, bool error);
  void refuse(const FrameHeader& to, Status status, std::string_view reason);
  [[nodiscard]] std::optional<Clock::time_point> deadline_of(const RequestMeta& meta) const;
  [[nodiscard]] bool has_room() const;  // for another request in flight
  [[nodiscard]] std::size_t pause_reading_bytes() const;

  // ---- handshake (session_handshake.cpp)
  bool on_hello(const FrameHeader& header, Bytes meta);
  bool on_auth(const FrameHeader& header, Bytes meta);
  bool fail_handshake(const FrameHeader& header, Status status, std::string_view reason);
  void ready();
  void leave_when_answered();

  // ---- GET (session_get.cpp)
  void begin_get(const FrameHeader& header);
  void pump_gets();
  [[nodiscard]] bool step_get(std::uint64_t id, GetRequest& get);
  void ask_for_item(std::uint64_t id, GetRequest& get, BudgetShare ahead_of_its_turn);
  void ask_ahead(std::uint64_t id, GetRequest& get);
  void found_item(GetRequest& get, ReadResult result);
  void read_done(std::uint64_t id, std::uint64_t serial, std::size_t item, ReadResult result);
  void send_fragment(std::uint64_t id, GetRequest& get);
  void finish_get(std::uint64_t id, GetRequest& get);
  void cancel_get(std::uint64_t id, GetRequest& get);

  // ---- PUT (session_put.cpp)
  void begin_put(const FrameHeader& header);
  bool on_put_meta(const FrameHeader& header, Bytes meta);
  void open_item(PutRequest& put, std::size_t index, bool may_wait);
  [[nodiscard]] bool find_room(PutRequest& put, bool may_wait);
  void fail_item(PutRequest& put, Status status);
  void end_item(std::uint64_t id, PutRequest& put);
  void commit_item(std::uint64_t id, PutRequest& put, std::size_t item);
  void commit_done(std::uint64_t id, std::uint64_t serial, std::size_t item, Status status);
  void end_put(std::uint64_t id, PutRequest& put);
  void refuse_put(PutRequest& put, Status status, std::string_view reason);
  bool on_put_end(const FrameHeader& header);
  void finish_put(std::uint64_t id, PutRequest& put);

  // ---- the small operations (session_ops.cpp)
  void do_exists(const FrameHeader& header);
  void do_remove(const FrameHeader& header);
  void do_put_ns(const FrameHeader& header);
  void do_erase(const FrameHeader& header);
  void do_sync(const FrameHeader& header);
  // Has `start` called with a callback for the store, and `answer` with what that gets: at once when it comes
  // at once, else later, in a task of the loop.
  template <typename Result, typename Start, typename Answer>
  void answer_when_done(const FrameHeader& header, Start&& start, Answer answer);
  void do_list(const FrameHeader& header);
  void do_stat(const FrameHeader& header);
  void do_lease(const FrameHeader& header);
  void do_release(const FrameHeader& header);
  void do_subscribe(const FrameHeader& header);
  void end_subscription(std::uint64_t id, Status status, const ViewBoard::Encoded& view);
  void do_cancel();

  SessionContext* context_;  // of the reactor that it lives on
  ServerCounters* counters_;
  Fd fd_;
  const std::uint64_t id_;
  Stage stage_ = Stage::kHello;
  FrameReceiver receiver_;
  OutputQueue out_;
  FrameLimits limits_;
  Lane lane_ = Lane::kControl;
  std::array<std::byte, 16> client_nonce_{};
  std::array<std::byte, 16> server_nonce_{};

  // The frame being received.
  RequestMeta meta_;
  Status frame_refused_ = Status::kOk;  // its meta or flags are wrong
  std::string refusal_;
  Payload payload_ = Payload::kDrain;
  PutRequest* put_ = nullptr;  // of a PUT item's frame
  bool answered_ = false;      // with the meta already
  std::vector<std::byte> table_;
  std::size_t table_have_ = 0;
  std::size_t table_held_ = 0;  // of `held_`
  std::size_t meta_held_ = 0;   // of `held_`
  Clock::time_point arrived_;

  std::vector<std::byte> head_;  // of the payload frame being built

  std::unordered_map<std::uint64_t, Request> requests_;
  std::deque<std::uint64_t> gets_;  // in the order of sending, background after demand
  std::size_t demand_gets_ = 0;     // how many at the front of gets_ are demand
  std::size_t open_puts_ = 0;
  std::size_t table_bytes_ = 0;  // of all requests in flight
  HeldBytes held_;
  std::uint64_t next_serial_ = 1;

  std::uint32_t interest_ = 0;
  bool leaving_ = false;  // for another reactor, once the answer to the handshake is out; nothing is read
  bool reading_paused_ = false;
  std::optional<Clock::time_point>
      room_until_;               // the item of put_ waits for memory that long; nothing is read
  bool resume_reading_ = false;  // the read-ahead buffer may hold frames that no event announces
  bool continuing_ = false;
  bool write_blocked_ = false;
  Clock::time_point connected_;
  Clock::time_point last_received_;
  Clock::time_point last_sent_;
  std::uint64_t seen_received_ = 0;
  std::uint64_t seen_sent_ = 0;
  std::uint64_t seen_payload_sent_ = 0;
};

template <typename Work>
void Session::guarded(Work&& work) {
  if (stage_ == Stage::kClosed) return;
  try {
    work();
    flush();
  } catch (const std::exception&) {
    close();
  }
}

}  // namespace dfkv::server
