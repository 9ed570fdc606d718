// dfkv_core._native.Node.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "bind/parts.h"
#include "net/node.h"

namespace nb = nanobind;

namespace dfkv {

namespace {

Bytes view_of(const nb::bytes& bytes) { return as_bytes(bytes.data(), bytes.size()); }

nb::bytes to_python(Bytes bytes) { return nb::bytes(bytes.data(), bytes.size()); }

std::optional<std::vector<std::byte>> copy_of(const std::optional<nb::bytes>& bytes) {
  if (!bytes) return std::nullopt;
  const Bytes view = view_of(*bytes);
  return std::vector<std::byte>(view.begin(), view.end());
}

// OSError with its errno, as Python's own functions raise it.
[[noreturn]] void raise_os_error(const std::system_error& error) {
  PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
  throw nb::python_error();
}

void create(Node* self, std::string host, std::uint16_t port, std::uint64_t ram_bytes,
            std::uint64_t ram_ahead_bytes, std::string node_id, const std::optional<nb::bytes>& secret,
            std::uint32_t threads, std::uint32_t max_connections, std::uint64_t max_object_bytes,
            double max_leased_fraction, std::uint32_t handshake_timeout_ms, std::uint32_t stall_timeout_ms,
            bool insecure, const std::optional<nb::bytes>& tenant,
            const std::vector<std::string>& directories, std::uint64_t directory_bytes) {
  NodeOptions options;
  options.server.host = std::move(host);
  options.server.port = port;
  if (!directories.empty()) {
    options.store.disk.emplace();
    for (const std::string& path : directories) {
      SlabStoreOptions directory;
      directory.path = path;
      directory.capacity_bytes = directory_bytes;
      directory.node_id = node_id;
      directory.max_leased_fraction = max_leased_fraction;
      options.store.disk->directories.push_back(std::move(directory));
    }
  }
  options.server.node_id = std::move(node_id);
  options.server.secret = copy_of(secret);
  options.server.insecure = insecure;
  options.server.threads = threads;
  options.server.max_connections = max_connections;
  options.server.handshake_timeout_ms = handshake_timeout_ms;
  options.server.stall_timeout_ms = stall_timeout_ms;
  options.store.ahead_bytes = ram_ahead_bytes;
  options.store.catalog.capacity_bytes = ram_bytes;
  options.store.catalog.max_object_bytes = max_object_bytes;
  options.store.catalog.max_leased_fraction = max_leased_fraction;
  options.store.tenant = copy_of(tenant);
  try {
    const nb::gil_scoped_release release;
    new (self) Node(std::move(options));
  } catch (const std::system_error& error) {
    raise_os_error(error);
  }
}

bool stop(Node& self, std::int64_t timeout_ms) {
  const nb::gil_scoped_release release;
  return self.stop(Clock::now() + std::chrono::milliseconds(std::max<std::int64_t>(timeout_ms, 0)));
}

nb::dict stats(const Node& self) {
  Counters counters;
  {
    const nb::gil_scoped_release release;
    counters = self.stats();
  }
  nb::dict out;
  for (const auto& [name, value] : counters) out[name.c_str()] = value;
  return out;
}

nb::list namespaces(const Node& self) {
  std::vector<NamespaceInfo> infos;
  {
    const nb::gil_scoped_release release;
    infos = self.namespaces();
  }
  nb::list out;
  for (const NamespaceInfo& info : infos) {
    nb::dict entry;
    entry["id"] = to_python(info.id.bytes);
    entry["descriptor"] = to_python(info.descriptor);
    entry["label"] = info.label;
    entry["objects"] = info.objects;
    entry["stored_bytes"] = info.stored_bytes;
    entry["created_s"] = info.created_s;
    entry["last_used_s"] = info.last_used_s;
    out.append(entry);
  }
  return out;
}

nb::list recovery(const Node& self) {
  nb::list out;
  const DiskTier* disk = self.store().disk();
  for (std::size_t i = 0; disk != nullptr && i < disk->directories(); ++i) {
    const RecoveryReport& report = disk->directory(i).recovery();
    nb::dict entry;
    entry["path"] = disk->directory(i).path().string();
    entry["created"] = report.created;
    entry["objects"] = report.objects;
    entry["dropped"] = report.dropped;
    entry["faulty"] = report.faulty;
    entry["quarantined"] = report.quarantined;
    entry["seconds"] = report.seconds;
    entry["remark"] = report.remark;
    out.append(entry);
  }
  return out;
}

}  // namespace

void bind_node(nb::module_& m) {
  const server::ServerOptions server;
  const CatalogOptions catalog;
  nb::class_<Node>(m, "Node", "A cache node: RAM store, disks and TCP server on its own native threads.",
                   nb::is_final())
      .def("__init__", &create, nb::kw_only(), nb::arg("host"), nb::arg("port"), nb::arg("ram_bytes"),
           nb::arg("ram_ahead_bytes") = 0, nb::arg("node_id"), nb::arg("secret") = nb::none(),
           nb::arg("threads") = server.threads, nb::arg("max_connections") = server.max_connections,
           nb::arg("max_object_bytes") = catalog.max_object_bytes,
           nb::arg("max_leased_fraction") = catalog.max_leased_fraction,
           nb::arg("handshake_timeout_ms") = server.handshake_timeout_ms,
           nb::arg("stall_timeout_ms") = server.stall_timeout_ms, nb::arg("insecure") = false,
           nb::arg("tenant") = nb::none(), nb::arg("directories") = std::vector<std::string>(),
           nb::arg("directory_bytes") = 0)
      .def_prop_ro("port", &Node::port)
      .def_prop_ro("incarnation", &Node::incarnation)
      .def_prop_ro("boot_id", [](const Node& self) { return to_python(self.boot_id()); })
      .def("start", &Node::start, nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &stop, nb::arg("timeout_ms"))
      .def(
          "set_view", [](Node& self, const nb::bytes& view) { self.publish_view(view_of(view)); },
          nb::arg("view"))
      .def("stats", &stats)
      .def("recovery", &recovery)
      .def("namespaces", &namespaces);
}

}  // namespace dfkv
