#include "net/view_board.h"

#include <stdexcept>
#include <string>

#include "wire/frame.h"
#include "wire/view.h"

namespace dfkv::server {

void ViewBoard::publish(Bytes view) {
  const auto decoded = decode_view(view);
  if (!decoded)
    throw std::invalid_argument("not a view: malformed, over a limit, or its digest does not match");
  if (view.size() > kDefaultMaxFragmentBytes) {
    throw std::invalid_argument("a view of " + std::to_string(view.size()) +
                                " bytes does not fit in one frame of " +
                                std::to_string(kDefaultMaxFragmentBytes) + "; list fewer nodes");
  }
  auto encoded = std::make_shared<const std::vector<std::byte>>(view.begin(), view.end());
  const std::lock_guard lock(mutex_);
  current_ = {decoded->revision, std::move(encoded)};
}

ViewBoard::Snapshot ViewBoard::now() const {
  const std::lock_guard lock(mutex_);
  return current_;
}

}  // namespace dfkv::server
