// The Python module dfkv_core._native. Each part binds itself; see dfkv_core/_native.pyi for the typed
// surface.
#include <nanobind/nanobind.h>

#include "bind/parts.h"

NB_MODULE(_native, m) {
  // An engine may end with a client alive in a thread of its own; that is no fault worth words on its stderr.
  nanobind::set_leak_warnings(false);
  m.doc() = "Native data path of dfkv: formats, node and client.";
  dfkv::bind_formats(m);
  dfkv::bind_identity(m);
  dfkv::bind_node(m);
  dfkv::bind_client(m);
  dfkv::bind_storage(m);
  dfkv::bind_bench(m);
  dfkv::bind_plan(m);
}
