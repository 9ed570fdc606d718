// A small, bounded msgpack writer and reader: what dfkv puts on the wire and nothing more.
//
// The writer always uses the shortest form. The reader takes every form of an integer, checks each length
// against the bytes that are really there before anything is allocated, and never recurses deeper than
// kMaxDepth.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "wire/bytes.h"

namespace dfkv::msgpack {

class Writer {
 public:
  explicit Writer(std::vector<std::byte>& out) : out_(out) {}

  void nil() { head(0xC0); }
  void boolean(bool value) { head(value ? 0xC3 : 0xC2); }
  void uint(std::uint64_t value);
  void str(std::string_view value);
  void bin(Bytes value);
  void array(std::uint32_t count);  // followed by `count` values
  void map(std::uint32_t count);    // followed by `count` pairs of key and value
  void raw(Bytes encoded);          // bytes that are msgpack already

 private:
  void head(std::uint8_t byte) { out_.push_back(static_cast<std::byte>(byte)); }
  template <typename T>
  void big_endian(T value);

  std::vector<std::byte>& out_;
};

// kLimit: longer than the caller allows; kValue: an integer beyond the caller's limit.
enum class Fault : std::uint8_t { kNone, kTruncated, kType, kLimit, kValue, kDepth, kText };

// Reads values one after another. The first fault sticks: every later call returns false, so that a caller
// may check once at the end. Strings and binaries are views into the input.
class Reader {
 public:
  static constexpr unsigned kMaxDepth = 8;

  explicit Reader(Bytes in) : in_(in) {}

  [[nodiscard]] bool uint(std::uint64_t& out);
  [[nodiscard]] bool uint_up_to(std::uint64_t limit, std::uint64_t& out);
  [[nodiscard]] bool boolean(bool& out);
  [[nodiscard]] bool str(std::size_t max_bytes, std::string_view& out);  // well-formed UTF-8 only
  [[nodiscard]] bool bin(std::size_t max_bytes, Bytes& out);
  [[nodiscard]] bool array(std::uint32_t max_count, std::uint32_t& count);
  [[nodiscard]] bool map(std::uint32_t max_count, std::uint32_t& count);
  // Skips one value of any type, including the ones dfkv never writes.
  [[nodiscard]] bool skip();

  [[nodiscard]] Fault fault() const { return fault_; }
  [[nodiscard]] std::size_t position() const { return at_; }
  // Everything was read and nothing is left over.
  [[nodiscard]] bool finished() const { return fault_ == Fault::kNone && at_ == in_.size(); }

 private:
  bool fail(Fault fault);
  bool take(std::size_t size, Bytes& out);
  bool big_endian(std::size_t size, std::uint64_t& out);
  bool head(std::uint8_t& out);
  bool length(std::uint8_t head, std::uint8_t fixed, std::uint8_t fixed_bits, std::uint8_t first_wide,
              unsigned wide_forms, std::uint64_t& out);
  bool container(std::uint64_t count, std::size_t least_bytes_each, std::uint32_t max_count,
                 std::uint32_t& out);
  bool skip_nested(unsigned depth);
  bool skip_values(std::uint64_t count, unsigned depth);

  Bytes in_;
  std::size_t at_ = 0;
  Fault fault_ = Fault::kNone;
};

[[nodiscard]] bool is_utf8(std::string_view text);
// The longest prefix of at most max_bytes that does not end inside a character.
[[nodiscard]] std::string_view utf8_prefix(std::string_view text, std::size_t max_bytes);

}  // namespace dfkv::msgpack
