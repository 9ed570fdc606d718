// The last view of the cluster on disk, for the next start of a client that finds no seed.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "wire/bytes.h"

namespace dfkv::client {

// The file's bytes; nothing when there is no file, it cannot be read, or it is too large to be a view.
[[nodiscard]] std::vector<std::byte> load_view(const std::string& path);
// Replaces the file in one step: readers find the old bytes or the new ones. Several processes may do so.
// False: it could not be written, and the old one stands.
bool save_view(const std::string& path, Bytes view);

// Saves views on a thread of its own, which nobody waits for: a disk that hangs holds up neither operations
// nor the end of the client. At most one thread; of views that come while it works only the last is saved.
class ViewSaver : public std::enable_shared_from_this<ViewSaver> {
 public:
  // No path: nothing is saved.
  explicit ViewSaver(std::string path) : path_(std::move(path)) {}
  void save(std::vector<std::byte> view);  // any thread

 private:
  void work();

  const std::string path_;
  std::mutex mutex_;
  std::vector<std::byte> next_;
  bool working_ = false;
};

}  // namespace dfkv::client
