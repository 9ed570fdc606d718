#include "slab/device.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace dfkv {

namespace {

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

Fd open_file(const std::filesystem::path& path, bool direct) {
  return Fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | (direct ? O_DIRECT : 0), 0600));
}

}  // namespace

int Device::read(std::uint64_t offset, MutableBytes into) {
  while (!into.empty()) {
    const std::int64_t moved = read_some(offset, into);
    if (moved < 0) return static_cast<int>(-moved);
    if (moved == 0) return EIO;
    offset += static_cast<std::uint64_t>(moved);
    into = into.subspan(static_cast<std::size_t>(moved));
  }
  return 0;
}

int Device::write(std::uint64_t offset, Bytes from) {
  while (!from.empty()) {
    const std::int64_t moved = write_some(offset, from);
    if (moved < 0) return static_cast<int>(-moved);
    if (moved == 0) return EIO;
    offset += static_cast<std::uint64_t>(moved);
    from = from.subspan(static_cast<std::size_t>(moved));
  }
  return 0;
}

FileDevice::FileDevice(const std::filesystem::path& path, const Options& options) : bytes_(options.bytes) {
  if (options.direct) {
    fd_ = open_file(path, true);
    direct_ = static_cast<bool>(fd_);
    if (!fd_ && errno != EINVAL) fail(errno, "cannot open " + path.string());
  }
  if (!fd_) fd_ = open_file(path, false);
  if (!fd_) fail(errno, "cannot open " + path.string());
  struct stat found {};
  if (::fstat(fd_.get(), &found) != 0) fail(errno, "cannot look at " + path.string());
  if (static_cast<std::uint64_t>(found.st_size) < bytes_ &&
      ::ftruncate(fd_.get(), static_cast<off_t>(bytes_)) != 0) {
    fail(errno, "cannot size " + path.string());
  }
  // Also for a file that has its size already: it may have been made sparse by a copy.
  if (options.preallocate && bytes_ != 0) {
    const int error = ::posix_fallocate(fd_.get(), 0, static_cast<off_t>(bytes_));
    if (error != 0) fail(error, "cannot reserve " + std::to_string(bytes_) + " bytes for " + path.string());
  }
}

std::int64_t FileDevice::read_some(std::uint64_t offset, MutableBytes into) {
  while (true) {
    const ssize_t moved = ::pread(fd_.get(), into.data(), into.size(), static_cast<off_t>(offset));
    if (moved >= 0) return moved;
    if (errno != EINTR) return -errno;
  }
}

std::int64_t FileDevice::write_some(std::uint64_t offset, Bytes from) {
  while (true) {
    const ssize_t moved = ::pwrite(fd_.get(), from.data(), from.size(), static_cast<off_t>(offset));
    if (moved >= 0) return moved;
    if (errno != EINTR) return -errno;
  }
}

int FileDevice::sync() {
  while (::fdatasync(fd_.get()) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

std::optional<Device::Range> FileDevice::next_written(std::uint64_t offset) {
  if (offset >= bytes_) return std::nullopt;
  const off_t begin = ::lseek(fd_.get(), static_cast<off_t>(offset), SEEK_DATA);
  if (begin < 0) {
    if (errno == ENXIO) return std::nullopt;
    return Range{offset, bytes_};  // not told: all of it
  }
  const off_t end = ::lseek(fd_.get(), begin, SEEK_HOLE);
  if (end < 0) return Range{static_cast<std::uint64_t>(begin), bytes_};
  return Range{static_cast<std::uint64_t>(begin),
               std::min<std::uint64_t>(static_cast<std::uint64_t>(end), bytes_)};
}

}  // namespace dfkv
