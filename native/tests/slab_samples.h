// A slab store in a directory of its own, with faults where a test wants them.
#pragma once

#include <doctest/doctest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "fault_devices.h"
#include "slab/slab_store.h"
#include "store_samples.h"
#include "wire/checksum.h"

namespace dfkv::test {

class TempDirectory {
 public:
  TempDirectory() {
    std::string path = (std::filesystem::temp_directory_path() / "dfkv-slab-XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("no temporary directory");
    path_ = path;
  }
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline Pages pages_of(Bytes bytes) {
  Pages pages((bytes.size() + 4095) / 4096 * 4096);
  std::ranges::copy(bytes, pages.begin());
  return pages;
}

// A directory whose payload goes through `faults`, which outlive it. The table does not: a record is read in
// a hurry before every read of a payload.
inline SlabStoreOptions faulty_directory(const std::string& path, std::uint64_t bytes,
                                         const std::string& node_id, Faults& faults) {
  SlabStoreOptions options;
  options.path = path;
  options.capacity_bytes = bytes;
  options.node_id = node_id;
  options.wrap = [&faults](std::unique_ptr<Device> device, DeviceRole role) -> std::unique_ptr<Device> {
    if (role == DeviceRole::kTable) return device;
    return std::make_unique<FaultyDevice>(std::move(device), faults);
  };
  return options;
}

struct SlabTest {
  static constexpr std::uint64_t kCapacity = 32 * 1024 * 1024;

  TempDirectory directory;
  TestNamespace ns{"slab"};
  Faults table_faults, payload_faults;
  SlabStoreOptions options;
  std::optional<SlabStore> store;

  explicit SlabTest(std::uint64_t capacity = kCapacity) {
    options.path = directory.path();
    options.capacity_bytes = capacity;
    options.node_id = "n-1";
    options.retry_ms = 0;
    options.wrap = [this](std::unique_ptr<Device> device, DeviceRole role) -> std::unique_ptr<Device> {
      return std::make_unique<FaultyDevice>(std::move(device),
                                            role == DeviceRole::kTable ? table_faults : payload_faults);
    };
    open();
    add(ns);
  }
  void open() { store.emplace(options); }
  void reopen() {
    store.reset();
    open();
  }
  void add(const TestNamespace& space) {
    NamespaceInfo info;
    info.id = space.id;
    info.descriptor = space.descriptor;
    info.label = "test";
    store->put_namespace(info);
  }
  [[nodiscard]] ObjectKey key(std::uint64_t block, std::uint16_t stage = 0) const {
    return {ns.id, make_block(block), make_part(stage)};
  }
  static std::vector<std::byte> payload(const ObjectKey& key, std::size_t bytes, std::uint64_t version = 0) {
    return make_payload(load_le<std::uint64_t>(key.block.bytes.data()) ^ key.part ^ (version << 40), bytes);
  }
  Status put(const ObjectKey& at, std::size_t bytes, std::uint64_t version = 0) {
    const auto source = payload(at, bytes, version);
    const Pages pages = pages_of(source);
    const auto pending = store->begin_write(at);
    return store->write(pending,
                        {route_of(at.block), static_cast<std::uint32_t>(bytes), xxh3_64(source), 7, pages});
  }
  // What a reader gets; the bytes are in `read` when the status is ok.
  std::vector<std::byte> read;
  Status get(const ObjectKey& at) {
    read.clear();
    const auto slot = store->pin(at);
    if (!slot) return Status::kMissNotFound;
    SlotRecord record;
    Status status = store->read_record(*slot, at, record);
    if (status == Status::kOk) {
      Pages pages((record.stored_bytes + 4095) / 4096 * 4096);
      status = store->read_payload(*slot, record, pages);
      if (status == Status::kOk) read.assign(pages.begin(), pages.begin() + record.stored_bytes);
    }
    store->unpin(*slot);
    return status;
  }
  [[nodiscard]] bool has(const ObjectKey& at, std::size_t bytes, std::uint64_t version = 0) {
    return get(at) == Status::kOk && same_bytes(read, payload(at, bytes, version));
  }
  int remove(const ObjectKey& at) {
    const int error = store->finish(store->begin_remove(at));
    return error != 0 ? error : store->sync(false);
  }
  void check(bool at_rest = true) { CHECK(store->violations(at_rest) == std::vector<std::string>{}); }
};

}  // namespace dfkv::test
