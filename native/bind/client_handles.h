// What Python holds of the native client, and how its calls give up the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <functional>
#include <memory>

#include "net/client.h"

namespace dfkv::client {

// Set once the interpreter is about to end: from then on a thread other than the one that ends it must not
// ask for the GIL, because older Pythons end such a thread by unwinding it through C++ frames.
[[nodiscard]] bool interpreter_ends();

// How long a call on a batch holds the GIL, from its first line to its last. Counted at the end of the scope.
class GilTime {
 public:
  explicit GilTime(ClientCounters& counters) : counters_(counters), since_(Clock::now()) {}
  ~GilTime() {
    bump(counters_.gil_held_ns, static_cast<std::uint64_t>((held_ + (Clock::now() - since_)).count()));
  }
  GilTime(const GilTime&) = delete;
  GilTime& operator=(const GilTime&) = delete;

  [[nodiscard]] ClientCounters& counters() { return counters_; }
  void pause() { held_ += Clock::now() - since_; }
  void go_on() { since_ = Clock::now(); }

 private:
  ClientCounters& counters_;
  std::chrono::nanoseconds held_{0};
  Clock::time_point since_;
};

// Gives up the GIL for a scope and counts taking it back.
class WithoutGil {
 public:
  explicit WithoutGil(ClientCounters& counters, GilTime* time = nullptr) : counters_(counters), time_(time) {
    if (time_ != nullptr) time_->pause();
    state_ = PyEval_SaveThread();
  }
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  ClientCounters& counters_;
  GilTime* const time_;
  PyThreadState* state_ = nullptr;
};

// Milliseconds of Python as a duration, from 0 to a year. Raises ValueError for what is no number.
[[nodiscard]] std::chrono::nanoseconds to_duration(double milliseconds, const char* what);

// How long a wait until then may go on before signals are looked at.
[[nodiscard]] std::chrono::nanoseconds next_slice(Clock::time_point until);

// Keeps the client alive: an operation that is held goes on although its client was dropped.
class OperationHandle {
 public:
  OperationHandle(std::shared_ptr<Client> client, std::shared_ptr<Operation> operation)
      : client_(std::move(client)), operation_(std::move(operation)) {}
  ~OperationHandle();
  OperationHandle(OperationHandle&&) = default;
  OperationHandle(const OperationHandle&) = delete;
  OperationHandle& operator=(const OperationHandle&) = delete;

  [[nodiscard]] const std::shared_ptr<Operation>& operation() const { return operation_; }
  [[nodiscard]] ClientCounters& counters() const { return client_->counters(); }
  [[nodiscard]] bool wait(double timeout_ms) const;
  [[nodiscard]] bool wait_until(Clock::time_point until) const;
  void cancel() const;
  [[nodiscard]] const Operation& ended() const;  // raises RuntimeError before done()
  [[nodiscard]] nanobind::object result() const;

 private:
  std::shared_ptr<Client> client_;
  std::shared_ptr<Operation> operation_;
};

class ClientHandle {
 public:
  explicit ClientHandle(Options options);
  ~ClientHandle();
  ClientHandle(const ClientHandle&) = delete;
  ClientHandle& operator=(const ClientHandle&) = delete;

  [[nodiscard]] Client& get() const { return *client_; }
  [[nodiscard]] OperationHandle submit(Input input, double deadline_ms) const;
  // Without the GIL from the copy of the tables to the end of the wait.
  [[nodiscard]] OperationHandle ask(const std::function<Input()>& fill, GilTime& time, double deadline_ms,
                                    double wait_ms) const;
  void close(double timeout_ms) const;
  [[nodiscard]] nanobind::dict stats() const;

 private:
  std::shared_ptr<Client> client_;
};

void bind_operation(nanobind::module_& m);
void bind_ring(nanobind::module_& m);

}  // namespace dfkv::client
