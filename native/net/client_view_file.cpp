#include "net/client_view_file.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>

#include "wire/view.h"

namespace dfkv::client {

std::vector<std::byte> load_view(const std::string& path) {
  if (path.empty()) return {};
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error || size == 0 || size > kMaxViewBytes) return {};
  std::ifstream file(path, std::ios::binary);
  std::vector<std::byte> bytes(size);
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast)
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
  if (!file) return {};
  return bytes;
}

bool save_view(const std::string& path, Bytes view) {
  std::error_code error;
  const std::filesystem::path target(path);
  std::filesystem::create_directories(target.parent_path(), error);
  // A name of this thread's own: ranks of one engine share the file.
  const std::string draft = path + "." + std::to_string(::getpid()) + "-" + std::to_string(::gettid());
  {
    std::ofstream file(draft, std::ios::binary | std::ios::trunc);
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast)
    file.write(reinterpret_cast<const char*>(view.data()), static_cast<std::streamsize>(view.size()));
    file.close();
    if (!file) {
      std::filesystem::remove(draft, error);
      return false;
    }
  }
  std::filesystem::rename(draft, target, error);
  if (!error) return true;
  std::error_code ignored;
  std::filesystem::remove(draft, ignored);
  return false;
}

void ViewSaver::save(std::vector<std::byte> view) {
  if (path_.empty()) return;
  const std::lock_guard lock(mutex_);
  next_ = std::move(view);
  if (working_) return;
  try {
    std::thread([self = shared_from_this()] { self->work(); }).detach();
    working_ = true;
  } catch (const std::system_error&) {
    next_.clear();  // no thread to be had: the file stays as it is
  }
}

void ViewSaver::work() {
  for (;;) {
    std::vector<std::byte> view;
    {
      const std::lock_guard lock(mutex_);
      view.swap(next_);
      if (view.empty()) {
        working_ = false;
        return;
      }
    }
    save_view(path_, view);
  }
}

}  // namespace dfkv::client
