// dfkv_core._native.Client. See dfkv_core/_native.pyi for the typed surface.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <list>

#include "bind/buffer.h"
#include "bind/client_handles.h"
#include "bind/parts.h"

namespace nb = nanobind;

namespace dfkv::client {

namespace {

// Tables up to this size are copied with the GIL held: giving it up may cost a thread switch, which is far
// more.
constexpr std::size_t kCopyUnderGilBytes = 256 * 1024;

std::atomic<bool> g_interpreter_ends{false};

// Clients to end before the interpreter does.
struct Registry {
  std::mutex mutex;
  std::list<std::weak_ptr<Client>> clients;
};
Registry& registry() {
  static auto* const instance = new Registry;  // outlives static destructors
  return *instance;
}

void register_client(const std::shared_ptr<Client>& client) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  all.clients.remove_if([](const auto& other) { return other.expired(); });
  all.clients.push_back(client);
}

void end_clients() {
  g_interpreter_ends.store(true, std::memory_order_release);
  std::vector<std::shared_ptr<Client>> clients;
  {
    const std::lock_guard lock(registry().mutex);
    for (const auto& weak : registry().clients) {
      if (auto client = weak.lock(); client && client->in_own_process()) clients.push_back(std::move(client));
    }
    registry().clients.clear();
  }
  for (const auto& client : clients) {
    const WithoutGil released(client->counters());
    client->close(std::chrono::seconds(2));
  }
}

template <typename T>
void copy_table(Bytes from, std::vector<T>& to, const char* what) {
  if (from.size() % sizeof(T) != 0) {
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(from.size()) +
                                " bytes; its entries have " + std::to_string(sizeof(T)));
  }
  to.resize(from.size() / sizeof(T));
  if (!from.empty()) std::memcpy(to.data(), from.data(), from.size());
}

void take_entries(Input& input, Bytes table, const char* what) {
  if (table.size() % input.entry_bytes() != 0) {
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(table.size()) +
                                " bytes; an entry has " + std::to_string(input.entry_bytes()));
  }
  const auto count = table.size() / input.entry_bytes();
  if (count > UINT32_MAX) throw std::invalid_argument(std::string(what) + " has too many entries");
  input.count = static_cast<std::uint32_t>(count);
  input.table.assign(table.begin(), table.end());
}

void take_segments(Input& input, Bytes segments, Bytes counts) {
  copy_table(segments, input.segments, "segments");
  std::vector<std::uint32_t> each;
  copy_table(counts, each, "counts");
  input.first_segment.reserve(each.size() + 1);
  std::uint64_t total = 0;
  input.first_segment.push_back(0);
  for (const auto count : each) {
    total += count;
    if (total > input.segments.size())
      throw std::invalid_argument("counts name more segments than there are");
    input.first_segment.push_back(static_cast<std::uint32_t>(total));
  }
}

NamespaceId to_namespace(nb::bytes value) {
  NamespaceId id;
  if (value.size() != id.bytes.size()) {
    throw std::invalid_argument("a namespace id has 16 bytes, found " + std::to_string(value.size()));
  }
  std::memcpy(id.bytes.data(), value.c_str(), id.bytes.size());
  return id;
}

OperationHandle with_tables(const ClientHandle& self, GilTime& time, std::size_t bytes, double deadline_ms,
                            auto fill) {
  if (bytes <= kCopyUnderGilBytes) return self.submit(fill(), deadline_ms);
  Input input;
  {
    const WithoutGil released(self.get().counters(), &time);
    input = fill();
  }
  return self.submit(std::move(input), deadline_ms);
}

OperationHandle exists(const ClientHandle& self, nb::bytes ns, nb::object chunks, nb::object parts,
                       double deadline_ms, std::uint32_t lease_ms, double wait_ms) {
  GilTime time(self.get().counters());
  const BufferView chunk_view(chunks);
  const BufferView part_view(parts);
  const auto id = to_namespace(ns);
  const auto fill = [&] {
    Input input;
    input.kind = Kind::kExists;
    input.ns = id;
    input.lease_ms = lease_ms;
    take_entries(input, chunk_view.bytes(), "chunks");
    copy_table(part_view.bytes(), input.parts, "parts");
    return input;
  };
  if (wait_ms > 0) return self.ask(fill, time, deadline_ms, wait_ms);
  return with_tables(self, time, chunk_view.bytes().size(), deadline_ms, fill);
}

OperationHandle transfer(Kind kind, const ClientHandle& self, nb::bytes ns, nb::object items,
                         nb::object segments, nb::object counts, double deadline_ms, bool replace,
                         std::uint64_t recompute_us, Ack ack) {
  GilTime time(self.get().counters());
  const BufferView item_view(items);
  const BufferView segment_view(segments);
  const BufferView count_view(counts);
  const auto id = to_namespace(ns);
  const auto bytes = item_view.bytes().size() + segment_view.bytes().size() + count_view.bytes().size();
  return with_tables(self, time, bytes, deadline_ms, [&] {
    Input input;
    input.kind = kind;
    input.ns = id;
    input.ack = ack;
    input.replace = replace;
    input.recompute_us = recompute_us;
    take_entries(input, item_view.bytes(), "items");
    take_segments(input, segment_view.bytes(), count_view.bytes());
    return input;
  });
}

OperationHandle remove_items(const ClientHandle& self, nb::bytes ns, nb::object items, double deadline_ms) {
  GilTime time(self.get().counters());
  const BufferView view(items);
  const auto id = to_namespace(ns);
  return with_tables(self, time, view.bytes().size(), deadline_ms, [&] {
    Input input;
    input.kind = Kind::kRemove;
    input.ns = id;
    take_entries(input, view.bytes(), "items");
    return input;
  });
}

OperationHandle ask_nodes(const ClientHandle& self, Kind kind, const NamespaceId& id, double deadline_ms) {
  Input input;
  input.kind = kind;
  input.ns = id;
  return self.submit(std::move(input), deadline_ms);
}

Options make_options(const std::vector<std::pair<std::string, std::uint16_t>>& seeds, std::string name,
                     const std::optional<nb::bytes>& secret, std::uint32_t connections_per_node,
                     std::uint32_t connect_timeout_ms, std::uint32_t cooldown_ms, std::uint32_t view_poll_ms,
                     std::uint64_t max_inflight_bytes, std::uint32_t max_pending_operations,
                     const std::optional<nb::bytes>& last_view, std::string last_view_path,
                     std::string group) {
  const auto copy = [](const nb::bytes& from) {
    const auto bytes = as_bytes(from.c_str(), from.size());
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  };
  Options options;
  for (const auto& [host, port] : seeds) options.seeds.push_back({host, port});
  options.name = std::move(name);
  if (secret) options.secret = copy(*secret);
  options.connections_per_node = connections_per_node;
  options.connect_timeout_ms = connect_timeout_ms;
  options.cooldown_ms = cooldown_ms;
  options.view_poll_ms = view_poll_ms;
  options.max_inflight_bytes = max_inflight_bytes;
  options.max_pending_operations = max_pending_operations;
  if (last_view) options.last_view = copy(*last_view);
  options.last_view_path = std::move(last_view_path);
  options.group = std::move(group);
  return options;
}

std::vector<std::uint64_t> take_completed(const ClientHandle& self, double timeout_ms) {
  auto& client = self.get();
  client.check_process();
  const auto timeout = to_duration(timeout_ms, "timeout_ms");
  if (timeout.count() == 0) return client.completions()->take(timeout);
  const WithoutGil released(client.counters());
  return client.completions()->take(timeout);
}

nb::object encoded_view(const ClientHandle& self) {
  const auto view = self.get().encoded_view();
  if (view.empty()) return nb::none();
  return nb::bytes(view.data(), view.size());
}

}  // namespace

bool interpreter_ends() { return g_interpreter_ends.load(std::memory_order_acquire); }

ClientHandle::ClientHandle(Options options) : client_(std::make_shared<Client>(std::move(options))) {
  register_client(client_);
}

ClientHandle::~ClientHandle() {
  // Operations that are still held keep the client; whoever is last ends it, and not while holding the GIL.
  if (!client_->in_own_process() || client_.use_count() > 1) return;
  const WithoutGil released(client_->counters());
  client_->close(std::chrono::seconds(10));
}

OperationHandle ClientHandle::submit(Input input, double deadline_ms) const {
  return {client_, client_->submit(std::move(input), to_duration(deadline_ms, "deadline_ms"))};
}

OperationHandle ClientHandle::ask(const std::function<Input()>& fill, GilTime& time, double deadline_ms,
                                  double wait_ms) const {
  const auto deadline = to_duration(deadline_ms, "deadline_ms");
  const auto until = Clock::now() + to_duration(wait_ms, "wait_ms");
  std::shared_ptr<Operation> operation;
  {
    const WithoutGil released(client_->counters(), &time);
    operation = client_->ask(fill(), deadline, next_slice(until));
  }
  OperationHandle handle(client_, std::move(operation));
  if (!handle.operation()->done()) (void)handle.wait_until(until);
  return handle;
}

void ClientHandle::close(double timeout_ms) const {
  client_->check_process();
  const auto timeout = to_duration(timeout_ms, "timeout_ms");
  bool ended = false;
  {
    const WithoutGil released(client_->counters());
    ended = client_->close(timeout);
  }
  if (!ended)
    throw std::runtime_error("the client's thread did not end within " + std::to_string(timeout_ms) + " ms");
}

nb::dict ClientHandle::stats() const {
  client_->check_process();
  auto& counters = client_->counters();
  std::vector<NodeReport> reports;
  {
    const WithoutGil released(counters);
    reports = client_->report();
  }
  nb::dict all;
  const auto get = [](const ClientCounters::Counter& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  nb::dict operations;
  nb::dict payload;
  nb::dict keys;
  for (std::size_t i = 0; i < kKinds; ++i) {
    const auto& kind = counters.kinds[i];
    const char* name = kind_name(static_cast<Kind>(i));
    operations[name] = get(kind.operations);
    payload[name] = get(kind.payload_bytes);
    nb::dict by_status;
    for (std::size_t slot = 0; slot < kind.statuses.size(); ++slot) {
      const auto count = get(kind.statuses[slot]);
      if (count == 0) continue;
      const auto label = std::string(status_name(ClientCounters::status_of_slot(slot)));
      const auto before =
          by_status.contains(label.c_str()) ? nb::cast<std::uint64_t>(by_status[label.c_str()]) : 0;
      by_status[label.c_str()] = before + count;
    }
    keys[name] = by_status;
  }
  all["operations"] = operations;
  all["payload_bytes"] = payload;
  all["keys"] = keys;
  for (const auto& [name, counter] : counters.named()) all[name] = get(*counter);
  nb::list nodes;
  for (const auto& report : reports) {
    nb::dict node;
    node["id"] = report.node_id;
    node["address"] = report.address;
    node["connections"] = report.connections;
    node["control_down"] = report.control_down;
    node["bulk_down"] = report.bulk_down;
    node["last_error"] = report.last_error;
    nodes.append(node);
  }
  all["nodes"] = nodes;
  return all;
}

namespace {

void bind_client_class(nb::module_& m) {
  nb::class_<ClientHandle>(m, "Client", nb::is_final())
      .def(
          "__init__",
          [](ClientHandle* self, const std::vector<std::pair<std::string, std::uint16_t>>& seeds,
             std::string name, std::optional<nb::bytes> secret, std::uint32_t connections_per_node,
             std::uint32_t connect_timeout_ms, std::uint32_t cooldown_ms, std::uint32_t view_poll_ms,
             std::uint64_t max_inflight_bytes, std::uint32_t max_pending_operations,
             std::optional<nb::bytes> last_view, std::string last_view_path, std::string group) {
            new (self) ClientHandle(make_options(seeds, std::move(name), secret, connections_per_node,
                                                 connect_timeout_ms, cooldown_ms, view_poll_ms,
                                                 max_inflight_bytes, max_pending_operations, last_view,
                                                 std::move(last_view_path), std::move(group)));
          },
          nb::arg("seeds"), nb::kw_only(), nb::arg("name") = "", nb::arg("secret") = nb::none(),
          nb::arg("connections_per_node") = 2, nb::arg("connect_timeout_ms") = 1000,
          nb::arg("cooldown_ms") = 500, nb::arg("view_poll_ms") = 10000,
          nb::arg("max_inflight_bytes") = std::uint64_t{1} << 30, nb::arg("max_pending_operations") = 4096,
          nb::arg("last_view") = nb::none(), nb::arg("last_view_path") = "", nb::arg("group") = "")
      .def("close", &ClientHandle::close, nb::arg("timeout_ms") = 2000.0)
      .def(
          "wait_ready",
          [](const ClientHandle& self, double timeout_ms) {
            self.get().check_process();
            const auto timeout = to_duration(timeout_ms, "timeout_ms");
            const WithoutGil released(self.get().counters());
            return self.get().wait_ready(timeout);
          },
          nb::arg("timeout_ms"))
      .def(
          "add_namespace",
          [](const ClientHandle& self, nb::bytes descriptor, std::string label) {
            const auto bytes = as_bytes(descriptor.c_str(), descriptor.size());
            const auto id = self.get().add_namespace({bytes.begin(), bytes.end()}, std::move(label));
            return nb::bytes(id.bytes.data(), id.bytes.size());
          },
          nb::arg("descriptor"), nb::arg("label") = "")
      .def(
          "namespace_difference",
          [](const ClientHandle& self, nb::bytes ns) {
            return self.get().namespace_difference(to_namespace(ns));
          },
          nb::arg("namespace"))
      .def("exists", &exists, nb::arg("namespace"), nb::arg("chunks"), nb::arg("parts"),
           nb::arg("deadline_ms"), nb::arg("lease_ms") = 0, nb::arg("wait_ms") = 0.0)
      .def(
          "get",
          [](const ClientHandle& self, nb::bytes ns, nb::object items, nb::object segments, nb::object counts,
             double deadline_ms) {
            return transfer(Kind::kGet, self, ns, items, segments, counts, deadline_ms, false, 0, Ack::kRam);
          },
          nb::arg("namespace"), nb::arg("items"), nb::arg("segments"), nb::arg("counts"),
          nb::arg("deadline_ms"))
      .def(
          "put",
          [](const ClientHandle& self, nb::bytes ns, nb::object items, nb::object segments, nb::object counts,
             double deadline_ms, bool replace, std::uint64_t recompute_us, bool durable) {
            return transfer(Kind::kPut, self, ns, items, segments, counts, deadline_ms, replace, recompute_us,
                            durable ? Ack::kDisk : Ack::kRam);
          },
          nb::arg("namespace"), nb::arg("items"), nb::arg("segments"), nb::arg("counts"),
          nb::arg("deadline_ms"), nb::arg("replace") = false, nb::arg("recompute_us") = 0,
          nb::arg("durable") = false)
      .def("remove", &remove_items, nb::arg("namespace"), nb::arg("items"), nb::arg("deadline_ms"))
      .def(
          "release",
          [](const ClientHandle& self, const std::vector<std::pair<std::string, std::uint64_t>>& leases) {
            std::vector<Lease> all;
            all.reserve(leases.size());
            for (const auto& [node, id] : leases) all.push_back({node, id});
            self.get().release(std::move(all));
          },
          nb::arg("leases"))
      .def(
          "erase",
          [](const ClientHandle& self, nb::bytes ns, double deadline_ms) {
            return ask_nodes(self, Kind::kErase, to_namespace(ns), deadline_ms);
          },
          nb::arg("namespace"), nb::arg("deadline_ms"))
      .def(
          "list_namespaces",
          [](const ClientHandle& self, double deadline_ms) {
            return ask_nodes(self, Kind::kList, {}, deadline_ms);
          },
          nb::arg("deadline_ms"))
      .def(
          "stat",
          [](const ClientHandle& self, double deadline_ms) {
            return ask_nodes(self, Kind::kStat, {}, deadline_ms);
          },
          nb::arg("deadline_ms"))
      .def(
          "ping",
          [](const ClientHandle& self, double deadline_ms) {
            return ask_nodes(self, Kind::kPing, {}, deadline_ms);
          },
          nb::arg("deadline_ms"))
      .def(
          "sync",
          [](const ClientHandle& self, double deadline_ms) {
            return ask_nodes(self, Kind::kSync, {}, deadline_ms);
          },
          nb::arg("deadline_ms"))
      .def("view", &encoded_view)
      .def("stats", &ClientHandle::stats)
      .def_prop_ro("completion_fd", [](const ClientHandle& self) { return self.get().completions()->fd(); })
      .def(
          "watch",
          [](const ClientHandle& self, const OperationHandle& operation, std::uint64_t token) {
            self.get().check_process();
            operation.operation()->watch(self.get().completions(), token);
          },
          nb::arg("operation"), nb::arg("token"))
      .def("take_completed", &take_completed, nb::arg("timeout_ms") = 0.0);
}

}  // namespace
}  // namespace dfkv::client

namespace dfkv {

void bind_client(nb::module_& m) {
  client::bind_ring(m);
  client::bind_operation(m);
  client::bind_client_class(m);
  // Runs while Python still works: threads that wait on a client come back, and none of its memory is written
  // later.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&client::end_clients));
}

}  // namespace dfkv
