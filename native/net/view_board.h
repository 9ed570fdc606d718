// The view of the cluster that this node gives to its clients. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "wire/bytes.h"

namespace dfkv::server {

class ViewBoard {
 public:
  using Encoded = std::shared_ptr<const std::vector<std::byte>>;
  struct Snapshot {
    std::uint64_t revision = 0;
    Encoded view;  // null: none was published yet
  };

  // Throws std::invalid_argument when the bytes are no view or do not fit in one frame.
  void publish(Bytes view);
  [[nodiscard]] Snapshot now() const;

 private:
  mutable std::mutex mutex_;
  Snapshot current_;
};

}  // namespace dfkv::server
