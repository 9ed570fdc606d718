// The files of one slab store: who may use them, whether they belong together, and how they are made.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "net/fd.h"
#include "slab/allocator.h"
#include "slab/device.h"
#include "slab/record.h"
#include "wire/payloads.h"

namespace dfkv {

// A store that cannot be opened. The message says what was found, what was expected and what to do.
class StoreError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

enum class DeviceRole : std::uint8_t { kTable, kPayload };
using DeviceWrapper = std::function<std::unique_ptr<Device>(std::unique_ptr<Device>, DeviceRole)>;

struct SavedNamespace {
  NamespaceInfo info;  // objects and bytes are 0
  std::uint32_t generation = 0;
};
// What namespaces.tbl holds.
struct SavedState {
  StoreUuid store;
  std::uint64_t sequence = 0;  // the table holds a record with this sequence or a later one
  std::vector<SavedNamespace> namespaces;
};
[[nodiscard]] std::vector<std::byte> encode_saved_state(const SavedState& state);
[[nodiscard]] std::optional<SavedState> decode_saved_state(Bytes in);  // nullopt: damaged

inline constexpr std::uint64_t kMinDirectoryBytes = 16 * 1024 * 1024;

class SlabDirectory {
 public:
  // Extents of 1 to 32 MiB, 256 of them or more where the capacity allows. Throws StoreError.
  [[nodiscard]] static SlabGeometry geometry_for(std::uint64_t capacity_bytes);

  // Locks the directory, and makes the store in it where there is none. Throws StoreError.
  SlabDirectory(std::filesystem::path path, std::uint64_t capacity_bytes, const std::string& node_id);

  [[nodiscard]] const SlotTableHeader& header() const { return header_; }
  [[nodiscard]] SlabGeometry geometry() const {
    return {header_.extent_bytes, static_cast<std::uint32_t>(header_.extent_count)};
  }
  [[nodiscard]] bool created() const { return created_; }
  [[nodiscard]] std::unique_ptr<Device> open_table() const;
  // keep: false for a file of that length without its space.
  [[nodiscard]] std::unique_ptr<Device> open_payload(bool keep) const;

  // nullopt: absent or damaged.
  [[nodiscard]] std::optional<SavedState> load_state() const;
  // Replaces the file as a whole and makes it last. 0 or errno.
  [[nodiscard]] int save_state(const SavedState& state) const;

 private:
  void lock();
  void check_header(std::uint64_t capacity_bytes, const std::string& node_id);
  void create(std::uint64_t capacity_bytes, const std::string& node_id);
  [[nodiscard]] std::filesystem::path file(const char* name) const { return path_ / name; }

  std::filesystem::path path_;
  Fd lock_;
  SlotTableHeader header_;
  bool created_ = false;
};

// The files themselves, without the lock.
[[nodiscard]] SlotTableHeader read_table_header(const std::filesystem::path& table);  // throws StoreError
[[nodiscard]] std::optional<SavedState> read_saved_state(
    const std::filesystem::path& path);  // as load_state()

}  // namespace dfkv
