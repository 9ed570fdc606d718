// dfkv_core._native: directories of the disk tier, offline.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bind/parts.h"
#include "slab/inspect.h"
#include "slab/slab_store.h"

namespace nb = nanobind;

namespace dfkv {

namespace {

nb::bytes to_python(Bytes bytes) { return nb::bytes(bytes.data(), bytes.size()); }

nb::dict inspect(const std::string& path) {
  DirectorySummary found;
  {
    const nb::gil_scoped_release release;
    found = inspect_directory(path);
  }
  nb::dict out;
  out["node_id"] = found.header.node_id;
  out["store"] = to_python(found.header.store.bytes);
  out["extent_bytes"] = found.header.extent_bytes;
  out["extents"] = found.header.extent_count;
  out["capacity_bytes"] = found.header.extent_bytes * found.header.extent_count;
  out["namespaces_found"] = found.state_found;
  out["objects"] = found.objects;
  out["stored_bytes"] = found.stored_bytes;
  out["slot_bytes"] = found.slot_bytes;
  out["quarantined"] = found.quarantined;
  out["faulty"] = found.faulty;
  nb::list spaces;
  for (const auto& [id, space] : found.spaces) {
    nb::dict entry;
    entry["id"] = to_python(id.bytes);
    entry["known"] = space.saved.has_value();
    entry["label"] = space.saved ? space.saved->info.label : std::string();
    entry["descriptor"] = space.saved ? to_python(space.saved->info.descriptor) : nb::bytes("", 0);
    entry["objects"] = space.objects;
    entry["stored_bytes"] = space.stored_bytes;
    entry["stale_objects"] = space.stale_objects;
    spaces.append(entry);
  }
  out["namespaces"] = spaces;
  nb::dict sizes;
  for (const auto& [bytes, objects] : found.objects_by_slot_bytes) sizes[nb::int_(bytes)] = objects;
  out["objects_by_slot_bytes"] = sizes;
  return out;
}

nb::dict as_dict(const SlabStore::ScrubReport& report) {
  nb::dict out;
  out["objects"] = report.objects;
  out["bytes"] = report.bytes;
  out["corrupt"] = report.corrupt;
  out["unreadable"] = report.unreadable;
  return out;
}

nb::dict scrub(const std::string& path, const nb::callable& progress) {
  SlabStore::ScrubReport report;
  std::uint64_t total = 0;
  std::uint64_t faulty = 0;
  std::string remark;
  {
    const nb::gil_scoped_release release;
    const SlotTableHeader header = read_table_header(std::filesystem::path(path) / "slots.tbl");
    SlabStoreOptions options;
    options.path = path;
    options.capacity_bytes = header.extent_bytes * header.extent_count;
    options.node_id = header.node_id;
    SlabStore store(options);
    total = store.recovery().objects;
    faulty = store.recovery().faulty;
    remark = store.recovery().remark;
    bool failed = false;
    report = store.scrub([&](const SlabStore::ScrubReport& so_far) {
      const nb::gil_scoped_acquire acquire;
      nb::dict state = as_dict(so_far);
      state["total"] = total;
      try {
        progress(state);
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        return true;
      } catch (nb::python_error& error) {
        error.restore();
        failed = true;
        return false;
      }
    });
    if (failed) {
      store.close();
      const nb::gil_scoped_acquire acquire;
      throw nb::python_error();
    }
  }
  nb::dict out = as_dict(report);
  out["total"] = total;
  out["faulty"] = faulty;
  out["remark"] = remark;
  return out;
}

}  // namespace

void bind_storage(nb::module_& m) {
  m.def("inspect_directory", &inspect, nb::arg("path"));
  m.def("scrub_directory", &scrub, nb::arg("path"), nb::arg("progress"));
}

}  // namespace dfkv
