// What Python holds of the native client, and how its calls give up the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <memory>

#include "net/client.h"

namespace dfkv::client {

// Set once the interpreter is about to end: from then on a thread other than the one that ends it must not
// ask for the GIL, because older Pythons end such a thread by unwinding it through C++ frames.
[[nodiscard]] bool interpreter_ends();

// Gives up the GIL for a scope and counts taking it back.
class WithoutGil {
 public:
  explicit WithoutGil(ClientCounters& counters) : counters_(counters), state_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  ClientCounters& counters_;
  PyThreadState* state_;
};

// Milliseconds of Python as a duration, from 0 to a year. Raises ValueError for what is no number.
[[nodiscard]] std::chrono::nanoseconds to_duration(double milliseconds, const char* what);

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
  [[nodiscard]] bool wait(double timeout_ms) const;
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
  void close(double timeout_ms) const;
  [[nodiscard]] nanobind::dict stats() const;

 private:
  std::shared_ptr<Client> client_;
};

void bind_operation(nanobind::module_& m);
void bind_ring(nanobind::module_& m);

}  // namespace dfkv::client
