// The simulator behind `dfkv plan`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <span>
#include <string>

#include "bind/buffer.h"
#include "bind/parts.h"
#include "plan/cluster.h"
#include "plan/replay.h"
#include "plan/trace.h"
#include "slab/eviction.h"

namespace nb = nanobind;

namespace dfkv {

namespace {

template <typename T>
std::span<const T> items_of(const BufferView& view, const char* name) {
  if (view.raw().itemsize != sizeof(T) || view.raw().len % static_cast<Py_ssize_t>(sizeof(T)) != 0) {
    const std::string text =
        std::string(name) + " is a C-contiguous buffer of items of " + std::to_string(sizeof(T)) + " bytes";
    throw nb::type_error(text.c_str());
  }
  return {static_cast<const T*>(view.raw().buf), static_cast<std::size_t>(view.raw().len) / sizeof(T)};
}

void append(plan::Trace& self, nb::handle block_counts, nb::handle block_ids) {
  const BufferView counts(block_counts, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT);
  const BufferView ids(block_ids, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT);
  const auto count_items = items_of<std::uint32_t>(counts, "block_counts");
  const auto id_items = items_of<std::uint64_t>(ids, "block_ids");
  const nb::gil_scoped_release release;
  self.append(count_items, id_items);
}

nb::bytes to_python(const std::vector<std::uint32_t>& hits) {
  return nb::bytes(hits.data(), hits.size() * sizeof(std::uint32_t));
}

nb::dict replay(const plan::Trace& trace, const std::string& policy, std::uint64_t capacity_blocks) {
  plan::Replay result;
  {
    const nb::gil_scoped_release release;
    result = plan::replay(trace, policy, capacity_blocks);
  }
  nb::dict out;
  out["hits"] = to_python(result.hits);
  out["hit_blocks"] = result.hit_blocks;
  out["written_blocks"] = result.written_blocks;
  out["evicted_blocks"] = result.evicted_blocks;
  return out;
}

nb::dict replay_cluster(const plan::Trace& trace, std::uint32_t nodes, std::uint64_t capacity_blocks,
                        const std::string& policy, std::uint32_t run_blocks, std::uint32_t spread_blocks,
                        std::uint32_t copy_after_reads, double copy_share,
                        std::optional<std::uint32_t> lost_node, std::uint64_t lost_at) {
  plan::ClusterReplay result;
  {
    const nb::gil_scoped_release release;
    result = plan::replay_cluster(trace, {nodes, capacity_blocks, policy, run_blocks, spread_blocks,
                                          copy_after_reads, copy_share, lost_node, lost_at});
  }
  nb::dict out;
  out["hits"] = to_python(result.hits);
  out["touched"] = result.touched;
  out["copied_blocks"] = result.copied_blocks;
  nb::list loads;
  for (const plan::NodeLoad& load : result.nodes) {
    nb::dict entry;
    entry["held_blocks"] = load.held_blocks;
    entry["copy_blocks"] = load.copy_blocks;
    entry["read_blocks"] = load.read_blocks;
    entry["written_blocks"] = load.written_blocks;
    loads.append(entry);
  }
  out["nodes"] = loads;
  return out;
}

template <typename Names>
nb::list to_list(const Names& names) {
  nb::list out;
  for (const std::string_view name : names) out.append(nb::str(name.data(), name.size()));
  return out;
}

}  // namespace

void bind_plan(nb::module_& m) {
  nb::class_<plan::Trace>(m, "Trace", "Requests as lists of block ids, for the simulator.", nb::is_final())
      .def(nb::init<>())
      .def("append", &append, nb::arg("block_counts"), nb::arg("block_ids"))
      .def_prop_ro("requests", &plan::Trace::requests)
      .def_prop_ro("blocks", &plan::Trace::blocks)
      .def_prop_ro("unique_blocks", &plan::Trace::unique_blocks)
      .def_prop_ro("conflicts", &plan::Trace::conflicts);
  m.def("eviction_policies", [] { return to_list(eviction_policy_names()); });
  m.def("replay_policies", [] { return to_list(plan::replay_names()); });
  m.attr("DEFAULT_EVICTION_POLICY") = nb::str(kDefaultEvictionPolicy.data(), kDefaultEvictionPolicy.size());
  m.def("replay", &replay, nb::arg("trace"), nb::arg("policy"), nb::arg("capacity_blocks"));
  m.def("replay_cluster", &replay_cluster, nb::arg("trace"), nb::kw_only(), nb::arg("nodes"),
        nb::arg("capacity_blocks") = 0, nb::arg("policy"), nb::arg("run_blocks") = 1,
        nb::arg("spread_blocks") = 0, nb::arg("copy_after_reads") = 0, nb::arg("copy_share") = 0.0,
        nb::arg("lost_node") = nb::none(), nb::arg("lost_at") = 0);
}

}  // namespace dfkv
