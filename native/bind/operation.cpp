// dfkv_core._native.Operation and Ring. See dfkv_core/_native.pyi for the typed surface.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cmath>
#include <string>

#include "bind/buffer.h"
#include "bind/client_handles.h"
#include "wire/payloads.h"

namespace nb = nanobind;

namespace dfkv::client {

namespace {

using namespace std::chrono_literals;

// A wait on the main thread looks for signals this often, so that Ctrl-C works.
constexpr auto kSignalCheck = 500ms;

nb::bytes to_bytes(Bytes bytes) { return nb::bytes(bytes.data(), bytes.size()); }

nb::object decode_namespace_pages(const NodeAnswer& answer) {
  nb::list all;
  for (const auto& page : answer.payloads) {
    const auto namespaces = decode_namespaces(page);
    if (!namespaces) return nb::none();
    for (const auto& info : *namespaces) {
      nb::dict entry;
      entry["id"] = to_bytes(info.id.bytes);
      entry["descriptor"] = to_bytes(info.descriptor);
      entry["label"] = info.label;
      entry["objects"] = info.objects;
      entry["stored_bytes"] = info.stored_bytes;
      entry["created_s"] = info.created_s;
      entry["last_used_s"] = info.last_used_s;
      all.append(entry);
    }
  }
  return all;
}

nb::object decode_stat(const NodeAnswer& answer) {
  if (answer.payloads.empty()) return nb::none();
  const auto counters = decode_counters(answer.payloads.front());
  if (!counters) return nb::none();
  nb::dict all;
  for (const auto& [name, value] : *counters) all[name.c_str()] = value;
  return all;
}

nb::object decode_answer(Kind kind, const NodeAnswer& answer) {
  if (!is_done(answer.status)) return nb::none();
  if (kind == Kind::kList) return decode_namespace_pages(answer);
  if (kind == Kind::kStat) return decode_stat(answer);
  return nb::int_(answer.value);
}

}  // namespace

std::chrono::nanoseconds to_duration(double milliseconds, const char* what) {
  if (std::isnan(milliseconds)) throw nb::value_error((std::string(what) + " is not a number").c_str());
  constexpr double kYearMs = 365.0 * 24 * 3600 * 1000;
  const double bounded = std::fmin(std::fmax(milliseconds, 0.0), kYearMs);
  return std::chrono::nanoseconds(static_cast<std::int64_t>(bounded * 1e6));
}

WithoutGil::~WithoutGil() {
  // Not the main thread: it will never be needed again (see interpreter_ends()).
  while (interpreter_ends() && ::gettid() != ::getpid()) ::pause();
  PyEval_RestoreThread(state_);
  bump(counters_.gil_acquisitions);
  if (time_ != nullptr) time_->go_on();
}

OperationHandle::~OperationHandle() {
  if (!client_) return;
  if (!client_->in_own_process()) {
    // A forked child: see ~Client.
    [[maybe_unused]] auto* operation = new std::shared_ptr<Operation>(std::move(operation_));
    return;
  }
  const bool last_user = client_.use_count() == 1;
  if (operation_->done() && !last_user) return;
  const WithoutGil released(client_->counters());
  Operation::cancel(operation_);
  if (last_user) client_->close(std::chrono::seconds(10));
}

std::chrono::nanoseconds next_slice(Clock::time_point until) {
  const auto left = std::chrono::nanoseconds(until - Clock::now());
  return ::gettid() == ::getpid() ? std::min<std::chrono::nanoseconds>(left, kSignalCheck) : left;
}

bool OperationHandle::wait(double timeout_ms) const {
  client_->check_process();
  return wait_until(Clock::now() + to_duration(timeout_ms, "timeout_ms"));
}

bool OperationHandle::wait_until(Clock::time_point until) const {
  GilTime time(client_->counters());
  if (operation_->done()) return true;
  for (;;) {
    bool done = false;
    {
      const WithoutGil released(client_->counters(), &time);
      done = operation_->wait(next_slice(until));
    }
    if (done || Clock::now() >= until) return done;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

void OperationHandle::cancel() const {
  client_->check_process();
  if (operation_->done()) return;
  const WithoutGil released(client_->counters());
  Operation::cancel(operation_);
}

const Operation& OperationHandle::ended() const {
  if (!operation_->done()) throw std::runtime_error("the operation is still in flight; wait for it first");
  return *operation_;
}

nb::object OperationHandle::result() const {
  const auto& operation = ended();
  if (is_keyed(operation.kind())) return nb::none();
  nb::dict all;
  for (const auto& answer : operation.answers()) {
    all[answer.node_id.c_str()] = decode_answer(operation.kind(), answer);
  }
  return all;
}

void bind_operation(nb::module_& m) {
  nb::class_<OperationHandle>(m, "Operation", nb::is_final())
      .def_prop_ro("kind", [](const OperationHandle& self) { return kind_name(self.operation()->kind()); })
      .def("done", [](const OperationHandle& self) { return self.operation()->done(); })
      .def("wait", &OperationHandle::wait, nb::arg("timeout_ms"))
      .def("cancel", &OperationHandle::cancel)
      .def("statuses",
           [](const OperationHandle& self) {
             const GilTime time(self.counters());
             const auto& statuses = self.ended().statuses();
             return nb::bytes(statuses.data(), statuses.size() * sizeof(std::uint16_t));
           })
      .def_prop_ro("prefix", [](const OperationHandle& self) { return self.ended().prefix(); })
      .def("leases",
           [](const OperationHandle& self) {
             std::vector<std::pair<std::string, std::uint64_t>> leases;
             for (const auto& lease : self.ended().leases()) leases.emplace_back(lease.node_id, lease.id);
             return leases;
           })
      .def_prop_ro("view_revision", [](const OperationHandle& self) { return self.ended().view_revision(); })
      .def_prop_ro("payload_bytes", [](const OperationHandle& self) { return self.ended().payload_bytes(); })
      .def_prop_ro("elapsed_us", [](const OperationHandle& self) { return self.ended().elapsed_us(); })
      .def_prop_ro("round_trips", [](const OperationHandle& self) { return self.ended().round_trips(); })
      .def_prop_ro("result", &OperationHandle::result);
}

namespace {

Ring make_ring(const std::vector<std::string>& node_ids, const std::vector<std::uint32_t>& weights) {
  if (node_ids.size() != weights.size()) {
    throw std::invalid_argument(std::to_string(node_ids.size()) + " node ids and " +
                                std::to_string(weights.size()) + " weights");
  }
  std::vector<Ring::Member> members;
  for (std::size_t i = 0; i < node_ids.size(); ++i) members.push_back({node_ids[i], weights[i]});
  Ring ring(members);
  if (ring.empty()) throw std::invalid_argument("a ring needs a node with a weight above 0");
  return ring;
}

nb::bytes ring_owners(const Ring& ring, nb::handle routes) {
  const BufferView view(routes);
  const auto bytes = view.bytes();
  if (bytes.size() % sizeof(Route) != 0) throw std::invalid_argument("routes are 8 bytes each");
  std::vector<std::uint16_t> owners(bytes.size() / sizeof(Route));
  for (std::size_t i = 0; i < owners.size(); ++i) {
    owners[i] = static_cast<std::uint16_t>(ring.owner(load_le<Route>(bytes.data() + i * sizeof(Route))));
  }
  return nb::bytes(owners.data(), owners.size() * sizeof(std::uint16_t));
}

}  // namespace

void bind_ring(nb::module_& m) {
  nb::class_<Ring>(m, "Ring", nb::is_final())
      .def(
          "__init__",
          [](Ring* self, const std::vector<std::string>& node_ids,
             const std::vector<std::uint32_t>& weights) { new (self) Ring(make_ring(node_ids, weights)); },
          nb::arg("node_ids"), nb::arg("weights"))
      .def("owner", &Ring::owner, nb::arg("route"))
      .def("counts", &Ring::counts)
      .def("owners", &ring_owners, nb::arg("routes"));
}

}  // namespace dfkv::client
