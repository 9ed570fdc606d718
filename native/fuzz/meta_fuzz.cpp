// Meta of every kind: the first byte chooses hello, request or reply. What decodes must survive being written
// again.
#include <cstdlib>

#include "wire/meta.h"

namespace {

template <typename Meta>
void round_trip(dfkv::Bytes in, dfkv::MetaFault (*decode)(dfkv::Bytes, Meta&),
                void (*encode)(const Meta&, std::vector<std::byte>&)) {
  Meta meta;
  if (decode(in, meta) != dfkv::MetaFault::kNone) return;
  std::vector<std::byte> first;
  encode(meta, first);
  Meta again;
  if (decode(first, again) != dfkv::MetaFault::kNone) std::abort();
  std::vector<std::byte> second;
  encode(again, second);
  if (first != second || first.size() > in.size() + 8) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const dfkv::Bytes in = dfkv::as_bytes(data + 1, size - 1);
  switch (data[0] % 3) {
    case 0:
      round_trip<dfkv::HelloMeta>(in, dfkv::decode_hello, dfkv::encode_hello);
      break;
    case 1:
      round_trip<dfkv::RequestMeta>(in, dfkv::decode_request, dfkv::encode_request);
      break;
    default:
      round_trip<dfkv::ReplyMeta>(in, dfkv::decode_reply, dfkv::encode_reply);
      break;
  }
  return 0;
}
