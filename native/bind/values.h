// Values between Python and the native side, with errors that say what was expected and found.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <string>

#include "bind/buffer.h"

namespace dfkv {

inline nanobind::bytes to_bytes(Bytes value) { return nanobind::bytes(value.data(), value.size()); }

[[noreturn]] inline void value_error(const std::string& message) {
  throw nanobind::value_error(message.c_str());
}

// A fixed-width field given as bytes.
template <std::size_t size>
std::array<std::byte, size> exact_bytes(nanobind::handle value, const char* what) {
  const BufferView view(value);
  if (view.bytes().size() != size) {
    value_error(std::string(what) + ": expected " + std::to_string(size) + " bytes, found " +
                std::to_string(view.bytes().size()));
  }
  std::array<std::byte, size> out;
  std::ranges::copy(view.bytes(), out.begin());
  return out;
}

}  // namespace dfkv
