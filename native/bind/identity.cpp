// Identity: checksums, digests, ids of namespaces and blocks, and the own block chain. See
// dfkv_core/_native.pyi for the typed surface.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>

#include "bind/parts.h"
#include "bind/values.h"
#include "wire/checksum.h"
#include "wire/identity.h"
#include "wire/meta.h"
#include "wire/sha256.h"
#include "wire/status.h"

namespace nb = nanobind;

namespace dfkv {

namespace {

// Tokens out of a C-contiguous buffer of 4-byte integers; copied only where they are not aligned.
class TokenView {
 public:
  explicit TokenView(nb::handle object) : buffer_(object, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) {
    const Py_buffer& raw = buffer_.raw();
    std::string_view format = raw.format != nullptr ? raw.format : "B";
    if (format.size() == 2 && (format[0] == '<' || format[0] == '=' || format[0] == '@'))
      format.remove_prefix(1);
    const bool integers = format == "I" || format == "i" || format == "L" || format == "l";
    if (raw.itemsize != sizeof(std::uint32_t) || !integers) {
      const std::string message = "tokens: expected a buffer of 4-byte integers, found items of " +
                                  std::to_string(raw.itemsize) + " bytes with format '" +
                                  std::string(format) + "'";
      throw nb::type_error(message.c_str());
    }
    const Bytes bytes = buffer_.bytes();
    count_ = bytes.size() / sizeof(std::uint32_t);
    if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(std::uint32_t) != 0) {
      copy_.resize(count_);
      std::memcpy(copy_.data(), bytes.data(), bytes.size());
    }
  }
  [[nodiscard]] std::span<const std::uint32_t> tokens() const {
    if (!copy_.empty()) return copy_;
    return {static_cast<const std::uint32_t*>(buffer_.raw().buf), count_};
  }

 private:
  BufferView buffer_;
  std::size_t count_ = 0;
  std::vector<std::uint32_t> copy_;
};

Extra make_extra(std::uint8_t tag, const nb::bytes& value) {
  const Bytes bytes = as_bytes(value.data(), value.size());
  return {tag, {bytes.begin(), bytes.end()}};
}

nb::bytes py_append(BlockChain& chain, nb::handle tokens,
                    const std::vector<std::tuple<std::uint8_t, nb::bytes>>& extras) {
  const TokenView view(tokens);
  std::vector<Extra> own;
  own.reserve(extras.size());
  for (const auto& [tag, value] : extras) own.push_back(make_extra(tag, value));
  const BlockId id = without_gil_if_large(view.tokens().size_bytes(),
                                          [&] { return chain.append(view.tokens(), std::move(own)); });
  return to_bytes(id.bytes);
}

nb::bytes py_append_blocks(BlockChain& chain, nb::handle tokens, std::uint32_t block_tokens,
                           const std::vector<std::tuple<std::size_t, std::uint8_t, nb::bytes>>& extras) {
  if (block_tokens == 0) value_error("block_tokens: expected 1 or more, found 0");
  const TokenView view(tokens);
  const std::size_t blocks = view.tokens().size() / block_tokens;
  std::vector<std::pair<std::size_t, Extra>> by_block;
  by_block.reserve(extras.size());
  for (const auto& [block, tag, value] : extras) {
    if (block >= blocks) {
      value_error("extras: block index " + std::to_string(block) + " is not one of the " +
                  std::to_string(blocks) + " whole blocks");
    }
    by_block.emplace_back(block, make_extra(tag, value));
  }
  std::ranges::stable_sort(by_block, {}, &std::pair<std::size_t, Extra>::first);
  std::vector<std::byte> ids;
  ids.reserve(blocks * sizeof(BlockId));
  without_gil_if_large(view.tokens().size_bytes(), [&] {
    auto next = by_block.begin();
    for (std::size_t block = 0; block < blocks; ++block) {
      std::vector<Extra> own;
      for (; next != by_block.end() && next->first == block; ++next) own.push_back(std::move(next->second));
      const BlockId id =
          chain.append(view.tokens().subspan(block * block_tokens, block_tokens), std::move(own));
      ids.insert(ids.end(), id.bytes.begin(), id.bytes.end());
    }
  });
  return to_bytes(ids);
}

void bind_block_chain(nb::module_& m) {
  nb::class_<BlockChain>(m, "BlockChain", nb::is_final())
      .def(
          "__init__",
          [](BlockChain* self, const std::optional<nb::bytes>& tip) {
            if (tip) {
              new (self) BlockChain(exact_bytes<32>(*tip, "tip"));
            } else {
              new (self) BlockChain();
            }
          },
          nb::arg("tip") = nb::none())
      .def_prop_ro("tip", [](const BlockChain& self) { return to_bytes(self.tip()); })
      .def("append", &py_append, nb::arg("tokens"), nb::arg("extras") = nb::tuple())
      .def("append_blocks", &py_append_blocks, nb::arg("tokens"), nb::arg("block_tokens"),
           nb::arg("extras") = nb::tuple());
}

void bind_hashes(nb::module_& m) {
  m.def(
      "crc32c",
      [](nb::handle data) {
        const BufferView view(data);
        return without_gil_if_large(view.bytes().size(), [&] { return crc32c(view.bytes()); });
      },
      nb::arg("data"));
  m.def(
      "xxh3_64",
      [](nb::handle data) {
        const BufferView view(data);
        return without_gil_if_large(view.bytes().size(), [&] { return xxh3_64(view.bytes()); });
      },
      nb::arg("data"));
  m.def(
      "sha256",
      [](nb::handle data) {
        const BufferView view(data);
        return to_bytes(without_gil_if_large(view.bytes().size(), [&] { return sha256(view.bytes()); }));
      },
      nb::arg("data"));
  m.def(
      "auth_mac",
      [](nb::handle secret, std::string_view role, nb::handle client_nonce, nb::handle server_nonce,
         std::string_view node_id) {
        if (role != "c" && role != "s")
          value_error("role: expected 'c' or 's', found '" + std::string(role) + "'");
        const BufferView key(secret);
        const auto client = exact_bytes<16>(client_nonce, "client nonce");
        const auto server = exact_bytes<16>(server_nonce, "server nonce");
        return to_bytes(auth_mac(key.bytes(), role[0], client, server, node_id));
      },
      nb::arg("secret"), nb::arg("role"), nb::arg("client_nonce"), nb::arg("server_nonce"),
      nb::arg("node_id"));
}

void bind_ids(nb::module_& m) {
  m.def(
      "namespace_id",
      [](nb::handle descriptor) {
        const BufferView view(descriptor);
        if (!parse_descriptor(view.bytes())) {
          value_error(
              "descriptor: expected at most 64 KiB of {u16 tag, u32 length, bytes} in ascending tag order");
        }
        return to_bytes(namespace_id(view.bytes()).bytes);
      },
      nb::arg("descriptor"));
  m.def(
      "opaque_block_id",
      [](std::uint8_t algorithm, nb::handle hash, nb::handle extras) {
        const BufferView hash_view(hash);
        const BufferView extras_view(extras);
        return to_bytes(opaque_block_id(algorithm, hash_view.bytes(), extras_view.bytes()).bytes);
      },
      nb::arg("algorithm"), nb::arg("hash"), nb::arg("extras"));
  m.def(
      "opaque_block_ids",
      [](std::uint8_t algorithm, nb::handle hashes, std::size_t hash_bytes) {
        const BufferView view(hashes);
        const Bytes all = view.bytes();
        if (hash_bytes == 0 || all.size() % hash_bytes != 0) {
          value_error("hashes: expected a multiple of " + std::to_string(hash_bytes) + " bytes, found " +
                      std::to_string(all.size()));
        }
        std::vector<std::byte> ids;
        without_gil_if_large(all.size(), [&] {
          ids.reserve(all.size() / hash_bytes * sizeof(BlockId));
          for (std::size_t at = 0; at < all.size(); at += hash_bytes) {
            const BlockId id = opaque_block_id(algorithm, all.subspan(at, hash_bytes), {});
            ids.insert(ids.end(), id.bytes.begin(), id.bytes.end());
          }
        });
        return to_bytes(ids);
      },
      nb::arg("algorithm"), nb::arg("hashes"), nb::arg("hash_bytes"));
  m.def(
      "encode_part",
      [](std::uint8_t group, std::uint8_t component, std::uint16_t stage, std::uint8_t cp_index,
         std::uint8_t shard_index, std::uint8_t shard_count) {
        return encode_part({group, component, stage, cp_index, shard_index, shard_count});
      },
      nb::arg("group"), nb::arg("component"), nb::arg("stage"), nb::arg("cp_index"), nb::arg("shard_index"),
      nb::arg("shard_count"));
  m.def(
      "status_name", [](std::uint16_t status) { return status_name(static_cast<Status>(status)); },
      nb::arg("status"));
}

}  // namespace

void bind_identity(nb::module_& m) {
  bind_hashes(m);
  bind_ids(m);
  bind_block_chain(m);
}

}  // namespace dfkv
