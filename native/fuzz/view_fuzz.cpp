// Views. First byte even: the rest is a whole encoded view. Odd: the rest is the array of nodes, put into a
// view with a digest that fits, so that the fuzzer gets past the digest.
#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "wire/msgpack.h"
#include "wire/view.h"

namespace {

std::vector<std::byte> sealed(dfkv::Bytes nodes) {
  constexpr std::string_view kPrefix = "dfkv.view.1";
  const std::uint32_t placement_rule = 1;
  dfkv::Sha256 hash;
  hash.update(dfkv::as_bytes(kPrefix.data(), kPrefix.size()));
  hash.update(dfkv::as_bytes(&placement_rule, sizeof placement_rule));
  hash.update(nodes);
  const dfkv::Sha256Digest digest = hash.finish();
  std::vector<std::byte> out;
  dfkv::msgpack::Writer writer(out);
  writer.map(5);
  writer.uint(1);
  writer.bin(std::vector<std::byte>(16));
  writer.uint(2);
  writer.uint(1);
  writer.uint(3);
  writer.bin(dfkv::Bytes(digest).first(16));
  writer.uint(4);
  writer.uint(placement_rule);
  writer.uint(5);
  writer.raw(nodes);
  return out;
}

void round_trip(dfkv::Bytes in) {
  std::optional<dfkv::View> view = dfkv::decode_view(in);
  if (!view) return;
  const std::vector<std::byte> first = dfkv::encode_view(*view);
  std::optional<dfkv::View> again = dfkv::decode_view(first);
  if (!again || again->nodes.size() != view->nodes.size()) std::abort();
  if (dfkv::encode_view(*again) != first) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const dfkv::Bytes rest = dfkv::as_bytes(data + 1, size - 1);
  if (data[0] % 2 == 0) {
    round_trip(rest);
  } else {
    round_trip(sealed(rest));
  }
  return 0;
}
