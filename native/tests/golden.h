// Reads tests/golden: lines of columns between blanks; '#' starts a comment line, '-' stands for no bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "wire/bytes.h"

namespace dfkv::golden {

using Row = std::vector<std::string>;
using Buffer = std::vector<std::byte>;

inline std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in{std::string(text)};
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

inline std::ifstream open(const std::string& name) {
  std::ifstream in(std::string(DFKV_GOLDEN_DIR) + "/" + name, std::ios::binary);
  if (!in) throw std::runtime_error("no golden file " + name);
  return in;
}

inline std::vector<Row> rows(const std::string& name) {
  std::ifstream in = open(name);
  std::vector<Row> found;
  for (std::string line; std::getline(in, line);) {
    if (!line.empty() && line[0] != '#') found.push_back(split(line, ' '));
  }
  if (found.empty()) throw std::runtime_error("golden file " + name + " has no rows");
  return found;
}

inline Buffer file(const std::string& name) {
  std::ifstream in = open(name);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const Bytes bytes = as_bytes(text.data(), text.size());
  return {bytes.begin(), bytes.end()};
}

inline Buffer unhex(std::string_view text) {
  Buffer out;
  if (text == "-") return out;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    out.push_back(static_cast<std::byte>(std::stoul(std::string(text.substr(i, 2)), nullptr, 16)));
  }
  return out;
}

inline std::string hex(Bytes data) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  for (const std::byte byte : data) {
    out += kDigits[static_cast<std::uint8_t>(byte) >> 4];
    out += kDigits[static_cast<std::uint8_t>(byte) & 15];
  }
  return out;
}

inline std::string hex_text(std::string_view text) { return hex(as_bytes(text.data(), text.size())); }
inline std::string unhex_text(std::string_view text) {
  const Buffer bytes = unhex(text);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline std::uint64_t number(const std::string& text) { return std::stoull(text); }

template <std::size_t size>
std::array<std::byte, size> exact(std::string_view text) {
  const Buffer bytes = unhex(text);
  if (bytes.size() != size) throw std::runtime_error("golden value of another length");
  std::array<std::byte, size> out;
  std::copy(bytes.begin(), bytes.end(), out.begin());
  return out;
}

// byte i is (31 * i + 7) mod 251.
inline Buffer pattern(std::size_t size) {
  Buffer out(size);
  for (std::size_t i = 0; i < size; ++i) out[i] = static_cast<std::byte>((31 * i + 7) % 251);
  return out;
}

}  // namespace dfkv::golden
