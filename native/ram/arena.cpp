#include "ram/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>

namespace dfkv {

namespace {

constexpr std::uint64_t kUnlimited = ~std::uint64_t{0};
constexpr std::uint64_t kHugePageBytes = 2 << 20;

std::optional<std::uint64_t> read_number(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // absent, or "max"
}

// The value after `name` in a file of lines "name value ...".
std::optional<std::uint64_t> read_field(const std::filesystem::path& path, std::string_view name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.size() > name.size() && line.starts_with(name)) {
      return std::strtoull(line.c_str() + name.size(), nullptr, 10);
    }
  }
  return std::nullopt;
}

std::uint64_t group_headroom(const std::filesystem::path& group, const char* limit_name,
                             const char* usage_name, std::string_view reclaimable_name) {
  const auto limit = read_number(group / limit_name);
  const auto usage = read_number(group / usage_name);
  if (!limit || !usage) return kUnlimited;
  const std::uint64_t reclaimable = read_field(group / "memory.stat", reclaimable_name).value_or(0);
  const std::uint64_t held = *usage - std::min(*usage, reclaimable);
  return *limit > held ? *limit - held : 0;
}

// The control groups that hold this process, from its own up to the root, in version 2 and in version 1.
std::uint64_t groups_headroom() {
  std::uint64_t headroom = kUnlimited;
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const bool unified = line.starts_with("0::");
    const bool memory = line.find(":memory:") != std::string::npos;
    if (!unified && !memory) continue;
    const std::filesystem::path root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    std::filesystem::path at(line.substr(line.rfind(':') + 1));
    while (true) {
      const std::filesystem::path group = root / at.relative_path();
      headroom =
          std::min(headroom, unified ? group_headroom(group, "memory.max", "memory.current", "inactive_file ")
                                     : group_headroom(group, "memory.limit_in_bytes", "memory.usage_in_bytes",
                                                      "total_inactive_file "));
      if (!at.has_relative_path()) break;
      at = at.parent_path();
    }
  }
  return headroom;
}

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

std::uint64_t available_memory_bytes() {
  const auto machine_kib = read_field("/proc/meminfo", "MemAvailable:");
  const std::uint64_t machine = machine_kib ? *machine_kib * 1024 : kUnlimited;
  const std::uint64_t available = std::min(machine, groups_headroom());
  return available == kUnlimited ? 0 : available;
}

Arena::Mapping::Mapping(std::uint64_t bytes) {
  // Pages come with the first write, so a size that cannot be had would end the process later, far from here.
  const std::uint64_t available = available_memory_bytes();
  if (available != 0 && bytes > available) {
    errno = ENOMEM;
    fail("the RAM store asks for " + std::to_string(bytes) + " bytes and " + std::to_string(available) +
         " can be had; give it less or free memory");
  }
  // Address space for a start on a huge page: the kernel alone does not always choose one.
  const std::uint64_t whole_bytes = bytes + kHugePageBytes;
  void* const whole = ::mmap(nullptr, whole_bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (whole == MAP_FAILED) fail("cannot map the arena of " + std::to_string(bytes) + " bytes");
  whole_ = {static_cast<std::byte*>(whole), whole_bytes};
  const auto beyond = reinterpret_cast<std::uintptr_t>(whole) % kHugePageBytes;
  memory_ = whole_.subspan(beyond == 0 ? 0 : kHugePageBytes - beyond, bytes);
  // Requests, all three: a kernel without huge pages serves small ones, a core dump without the cached bytes
  // is only smaller, and a forked child, which has no use for them, would make every page be copied at its
  // next write.
  ::madvise(memory_.data(), bytes, MADV_HUGEPAGE);
  ::madvise(memory_.data(), bytes, MADV_DONTDUMP);
  ::madvise(memory_.data(), bytes, MADV_DONTFORK);
}

Arena::Mapping::~Mapping() { ::munmap(whole_.data(), whole_.size()); }

Arena::Arena(std::uint64_t capacity_bytes, std::uint64_t ahead_bytes)
    : mapping_(capacity_bytes), ahead_(mapping_.memory(), ahead_bytes) {}

}  // namespace dfkv
