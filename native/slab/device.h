// Where bytes are kept: flat addresses over one file. Blocking; any number of threads at once, as long as no
// two of them write the same bytes. Tests put devices with faults in between (native/tests/fault_devices.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "net/fd.h"
#include "wire/bytes.h"

namespace dfkv {

class Device {
 public:
  struct Range {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };

  Device() = default;
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Moves some of the bytes, at least one. Returns how many, 0 at the end of the file, or -errno.
  [[nodiscard]] virtual std::int64_t read_some(std::uint64_t offset, MutableBytes into) = 0;
  [[nodiscard]] virtual std::int64_t write_some(std::uint64_t offset, Bytes from) = 0;
  // What was written before the call survives the loss of power after it. 0 or errno.
  [[nodiscard]] virtual int sync() = 0;
  // The first range at or after `offset` that was ever written; what lies between ranges reads as zeros.
  [[nodiscard]] virtual std::optional<Range> next_written(std::uint64_t offset) = 0;
  [[nodiscard]] virtual std::uint64_t bytes() const = 0;
  // Payload has to be aligned to this, in memory, in offset and in length.
  [[nodiscard]] virtual std::size_t alignment() const = 0;

  // All of the bytes. 0 or errno; EIO also where the file ends too early.
  [[nodiscard]] int read(std::uint64_t offset, MutableBytes into);
  [[nodiscard]] int write(std::uint64_t offset, Bytes from);
};

class FileDevice final : public Device {
 public:
  struct Options {
    std::uint64_t bytes = 0;   // the file is made this long
    bool preallocate = false;  // with its space: writes then never find the disk full
    bool direct = false;       // past the page cache, where the file system can
  };
  // Opens or creates. Throws std::system_error.
  FileDevice(const std::filesystem::path& path, const Options& options);

  std::int64_t read_some(std::uint64_t offset, MutableBytes into) override;
  std::int64_t write_some(std::uint64_t offset, Bytes from) override;
  int sync() override;
  std::optional<Range> next_written(std::uint64_t offset) override;
  [[nodiscard]] std::uint64_t bytes() const override { return bytes_; }
  [[nodiscard]] std::size_t alignment() const override { return direct_ ? 4096 : 1; }
  [[nodiscard]] bool direct() const { return direct_; }

 private:
  Fd fd_;
  std::uint64_t bytes_;
  bool direct_ = false;
};

}  // namespace dfkv
