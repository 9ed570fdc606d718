// A view of any object with the buffer protocol. Holds the export, so the bytes stay in place while the GIL
// is away.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

#include "wire/bytes.h"

namespace dfkv {

class BufferView {
 public:
  // flags as for PyObject_GetBuffer. Raises TypeError or BufferError where `object` cannot give such a
  // buffer.
  explicit BufferView(nanobind::handle object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nanobind::python_error();
  }
  ~BufferView() { PyBuffer_Release(&view_); }  // with the GIL held
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;

  [[nodiscard]] Bytes bytes() const { return as_bytes(view_.buf, static_cast<std::size_t>(view_.len)); }
  [[nodiscard]] const Py_buffer& raw() const { return view_; }

 private:
  Py_buffer view_{};
};

// Runs `work` without the GIL where it is long enough for other threads to gain by that.
template <typename Work>
auto without_gil_if_large(std::size_t bytes, Work work) {
  constexpr std::size_t kLargeBytes = 16 * 1024;
  if (bytes < kLargeBytes) return work();
  const nanobind::gil_scoped_release released;
  return work();
}

}  // namespace dfkv
