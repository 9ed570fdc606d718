// The Python module dfkv_core._native. Each part binds itself; see dfkv_core/_native.pyi for the typed surface.
#include <nanobind/nanobind.h>

#include "bind/parts.h"

NB_MODULE(_native, m) {
  m.doc() = "Native data path of dfkv: formats, node and client.";
  dfkv::bind_formats(m);
  dfkv::bind_node(m);
  dfkv::bind_client(m);
}
