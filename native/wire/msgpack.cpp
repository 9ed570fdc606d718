#include "wire/msgpack.h"

namespace dfkv::msgpack {

template <typename T>
void Writer::big_endian(T value) {
  for (int shift = static_cast<int>(sizeof(T)) * 8 - 8; shift >= 0; shift -= 8) {
    out_.push_back(static_cast<std::byte>(value >> shift));
  }
}

void Writer::uint(std::uint64_t value) {
  if (value < 0x80) {
    head(static_cast<std::uint8_t>(value));
  } else if (value <= 0xFF) {
    head(0xCC);
    head(static_cast<std::uint8_t>(value));
  } else if (value <= 0xFFFF) {
    head(0xCD);
    big_endian(static_cast<std::uint16_t>(value));
  } else if (value <= 0xFFFFFFFF) {
    head(0xCE);
    big_endian(static_cast<std::uint32_t>(value));
  } else {
    head(0xCF);
    big_endian(value);
  }
}

void Writer::str(std::string_view value) {
  const std::size_t size = value.size();
  if (size < 32) {
    head(static_cast<std::uint8_t>(0xA0 | size));
  } else if (size <= 0xFF) {
    head(0xD9);
    head(static_cast<std::uint8_t>(size));
  } else if (size <= 0xFFFF) {
    head(0xDA);
    big_endian(static_cast<std::uint16_t>(size));
  } else {
    head(0xDB);
    big_endian(static_cast<std::uint32_t>(size));
  }
  raw(as_bytes(value.data(), size));
}

void Writer::bin(Bytes value) {
  const std::size_t size = value.size();
  if (size <= 0xFF) {
    head(0xC4);
    head(static_cast<std::uint8_t>(size));
  } else if (size <= 0xFFFF) {
    head(0xC5);
    big_endian(static_cast<std::uint16_t>(size));
  } else {
    head(0xC6);
    big_endian(static_cast<std::uint32_t>(size));
  }
  raw(value);
}

void Writer::array(std::uint32_t count) {
  if (count < 16) {
    head(static_cast<std::uint8_t>(0x90 | count));
  } else if (count <= 0xFFFF) {
    head(0xDC);
    big_endian(static_cast<std::uint16_t>(count));
  } else {
    head(0xDD);
    big_endian(count);
  }
}

void Writer::map(std::uint32_t count) {
  if (count < 16) {
    head(static_cast<std::uint8_t>(0x80 | count));
  } else if (count <= 0xFFFF) {
    head(0xDE);
    big_endian(static_cast<std::uint16_t>(count));
  } else {
    head(0xDF);
    big_endian(count);
  }
}

void Writer::raw(Bytes encoded) { out_.insert(out_.end(), encoded.begin(), encoded.end()); }

bool Reader::fail(Fault fault) {
  if (fault_ == Fault::kNone) fault_ = fault;
  return false;
}

bool Reader::take(std::size_t size, Bytes& out) {
  if (fault_ != Fault::kNone) return false;
  if (size > in_.size() - at_) return fail(Fault::kTruncated);
  out = in_.subspan(at_, size);
  at_ += size;
  return true;
}

bool Reader::big_endian(std::size_t size, std::uint64_t& out) {
  Bytes bytes;
  if (!take(size, bytes)) return false;
  out = 0;
  for (const std::byte byte : bytes) out = out << 8 | static_cast<std::uint8_t>(byte);
  return true;
}

bool Reader::head(std::uint8_t& out) {
  Bytes bytes;
  if (!take(1, bytes)) return false;
  out = static_cast<std::uint8_t>(bytes[0]);
  return true;
}

bool Reader::uint(std::uint64_t& out) {
  std::uint8_t byte = 0;
  if (!head(byte)) return false;
  if (byte < 0x80) {
    out = byte;
    return true;
  }
  if (byte >= 0xCC && byte <= 0xCF) return big_endian(std::size_t{1} << (byte - 0xCC), out);
  if (byte >= 0xD0 && byte <= 0xD3) {
    // Signed forms hold a usable value as long as the sign bit is clear: some writers never use the unsigned
    // ones.
    const std::size_t size = std::size_t{1} << (byte - 0xD0);
    if (!big_endian(size, out)) return false;
    if ((out >> (size * 8 - 1)) != 0) return fail(Fault::kType);
    return true;
  }
  return fail(Fault::kType);
}

bool Reader::uint_up_to(std::uint64_t limit, std::uint64_t& out) {
  if (!uint(out)) return false;
  return out <= limit || fail(Fault::kValue);
}

bool Reader::boolean(bool& out) {
  std::uint8_t byte = 0;
  if (!head(byte)) return false;
  if (byte != 0xC2 && byte != 0xC3) return fail(Fault::kType);
  out = byte == 0xC3;
  return true;
}

// Length of a value whose short form is `fixed` with the length in its low bits (fixed_bits 0: there is
// none), and whose wide forms start at `first_wide`, each twice as wide as the one before, ending with 32
// bits.
bool Reader::length(std::uint8_t byte, std::uint8_t fixed, std::uint8_t fixed_bits, std::uint8_t first_wide,
                    unsigned wide_forms, std::uint64_t& out) {
  if (fixed_bits != 0 && (byte >> fixed_bits) == (fixed >> fixed_bits)) {
    out = byte & ((1u << fixed_bits) - 1);
    return true;
  }
  if (byte < first_wide || byte >= first_wide + wide_forms) return fail(Fault::kType);
  const unsigned widest_first = first_wide + wide_forms - 1;
  return big_endian(std::size_t{4} >> (widest_first - byte), out);
}

bool Reader::str(std::size_t max_bytes, std::string_view& out) {
  std::uint8_t byte = 0;
  std::uint64_t size = 0;
  if (!head(byte) || !length(byte, 0xA0, 5, 0xD9, 3, size)) return false;
  if (size > max_bytes) return fail(Fault::kLimit);
  Bytes bytes;
  if (!take(static_cast<std::size_t>(size), bytes)) return false;
  out = {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  return is_utf8(out) || fail(Fault::kText);
}

bool Reader::bin(std::size_t max_bytes, Bytes& out) {
  std::uint8_t byte = 0;
  std::uint64_t size = 0;
  if (!head(byte) || !length(byte, 0, 0, 0xC4, 3, size)) return false;
  if (size > max_bytes) return fail(Fault::kLimit);
  return take(static_cast<std::size_t>(size), out);
}

bool Reader::container(std::uint64_t count, std::size_t least_bytes_each, std::uint32_t max_count,
                       std::uint32_t& out) {
  if (count > max_count) return fail(Fault::kLimit);
  // Each element takes at least one byte, so a count beyond the bytes left is a lie: refused before
  // allocating.
  if (count * least_bytes_each > in_.size() - at_) return fail(Fault::kTruncated);
  out = static_cast<std::uint32_t>(count);
  return true;
}

bool Reader::array(std::uint32_t max_count, std::uint32_t& count) {
  std::uint8_t byte = 0;
  std::uint64_t found = 0;
  return head(byte) && length(byte, 0x90, 4, 0xDC, 2, found) && container(found, 1, max_count, count);
}

bool Reader::map(std::uint32_t max_count, std::uint32_t& count) {
  std::uint8_t byte = 0;
  std::uint64_t found = 0;
  return head(byte) && length(byte, 0x80, 4, 0xDE, 2, found) && container(found, 2, max_count, count);
}

bool Reader::skip() { return skip_nested(0); }

bool Reader::skip_values(std::uint64_t count, unsigned depth) {
  if (depth + 1 > kMaxDepth) return fail(Fault::kDepth);
  if (count > in_.size() - at_) return fail(Fault::kTruncated);
  for (std::uint64_t i = 0; i < count; ++i) {
    if (!skip_nested(depth + 1)) return false;
  }
  return true;
}

bool Reader::skip_nested(unsigned depth) {
  std::uint8_t byte = 0;
  if (!head(byte)) return false;
  Bytes ignored;
  std::uint64_t size = 0;
  if (byte < 0x80 || byte >= 0xE0 || byte == 0xC0 || byte == 0xC2 || byte == 0xC3) return true;
  if (byte < 0x90) return skip_values(std::uint64_t{2} * (byte & 0x0F), depth);
  if (byte < 0xA0) return skip_values(byte & 0x0F, depth);
  if (byte < 0xC0) return take(byte & 0x1F, ignored);
  switch (byte) {
    case 0xC4:  // bin
    case 0xC5:
    case 0xC6:
      return big_endian(std::size_t{1} << (byte - 0xC4), size) &&
             take(static_cast<std::size_t>(size), ignored);
    case 0xC7:  // ext: length, then one byte of type
    case 0xC8:
    case 0xC9:
      return big_endian(std::size_t{1} << (byte - 0xC7), size) &&
             take(static_cast<std::size_t>(size) + 1, ignored);
    case 0xCA:  // float
      return take(4, ignored);
    case 0xCB:
      return take(8, ignored);
    case 0xCC:  // unsigned
    case 0xCD:
    case 0xCE:
    case 0xCF:
      return take(std::size_t{1} << (byte - 0xCC), ignored);
    case 0xD0:  // signed
    case 0xD1:
    case 0xD2:
    case 0xD3:
      return take(std::size_t{1} << (byte - 0xD0), ignored);
    case 0xD4:  // ext of a fixed length, with its type
    case 0xD5:
    case 0xD6:
    case 0xD7:
    case 0xD8:
      return take((std::size_t{1} << (byte - 0xD4)) + 1, ignored);
    case 0xD9:  // str
    case 0xDA:
    case 0xDB:
      return big_endian(std::size_t{1} << (byte - 0xD9), size) &&
             take(static_cast<std::size_t>(size), ignored);
    case 0xDC:  // array
    case 0xDD:
      return big_endian(std::size_t{2} << (byte - 0xDC), size) && skip_values(size, depth);
    case 0xDE:  // map
    case 0xDF:
      return big_endian(std::size_t{2} << (byte - 0xDE), size) && skip_values(2 * size, depth);
    default:  // 0xC1 is no msgpack
      return fail(Fault::kType);
  }
}

bool is_utf8(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const auto first = static_cast<std::uint8_t>(text[at]);
    std::size_t more = 0;
    std::uint32_t least = 0;
    std::uint32_t point = 0;
    if (first < 0x80) {
      ++at;
      continue;
    }
    if ((first & 0xE0) == 0xC0) {
      more = 1, least = 0x80, point = first & 0x1Fu;
    } else if ((first & 0xF0) == 0xE0) {
      more = 2, least = 0x800, point = first & 0x0Fu;
    } else if ((first & 0xF8) == 0xF0) {
      more = 3, least = 0x10000, point = first & 0x07u;
    } else {
      return false;
    }
    if (more > text.size() - at - 1) return false;
    for (std::size_t i = 1; i <= more; ++i) {
      const auto next = static_cast<std::uint8_t>(text[at + i]);
      if ((next & 0xC0) != 0x80) return false;
      point = point << 6 | (next & 0x3Fu);
    }
    if (point < least || point > 0x10FFFF || (point >= 0xD800 && point <= 0xDFFF)) return false;
    at += more + 1;
  }
  return true;
}

std::string_view utf8_prefix(std::string_view text, std::size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  std::size_t end = max_bytes;
  while (end > 0 && (static_cast<std::uint8_t>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end);
}

}  // namespace dfkv::msgpack
