// What is in a directory of the disk tier, without opening the store: read only, and while a node uses it
// too.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <vector>

#include "slab/slab_directory.h"

namespace dfkv {

struct DirectorySummary {
  struct Space {
    std::optional<SavedNamespace>
        saved;  // nullopt: not in namespaces.tbl, so its objects are dropped at a start
    std::uint64_t objects = 0;
    std::uint64_t stored_bytes = 0;
    std::uint64_t stale_objects = 0;  // of before the namespace was erased
  };
  SlotTableHeader header;
  bool state_found = false;  // namespaces.tbl is there and sound
  std::uint64_t objects = 0, stored_bytes = 0, slot_bytes = 0;
  std::uint64_t quarantined = 0, faulty = 0;
  std::uint64_t latest_sequence = 0;
  std::map<NamespaceId, Space> spaces;
  std::map<std::uint64_t, std::uint64_t> objects_by_slot_bytes;
};

// Throws StoreError.
[[nodiscard]] DirectorySummary inspect_directory(const std::filesystem::path& path);

}  // namespace dfkv
