#pragma once

#include <nanobind/nanobind.h>

namespace dfkv {

void bind_formats(nanobind::module_& m);
void bind_identity(nanobind::module_& m);
void bind_node(nanobind::module_& m);
void bind_client(nanobind::module_& m);
void bind_bench(nanobind::module_& m);
void bind_storage(nanobind::module_& m);
void bind_plan(nanobind::module_& m);

}  // namespace dfkv
