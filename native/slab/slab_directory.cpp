#include "slab/slab_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>
#include <utility>

#include "slab/size_class.h"
#include "wire/checksum.h"

namespace dfkv {

namespace {

constexpr const char* kLockFile = "lock";
constexpr const char* kTableFile = "slots.tbl";
constexpr const char* kPayloadFile = "extents.dat";
constexpr const char* kStateFile = "namespaces.tbl";
constexpr const char* kNewSuffix = ".new";

constexpr std::uint64_t kStateMagic = 0x53454D414E4B4644;  // "DFKNAMES"
constexpr std::uint16_t kStateMajor = 1;
constexpr std::size_t kStateCrcAt = 12;
constexpr std::size_t kStateHeaderBytes = 48;
constexpr std::size_t kMaxStateBytes = 128 * 1024 * 1024;

constexpr std::uint64_t kMinExtentBytes = 1024 * 1024;
constexpr std::uint64_t kMaxExtentBytes = 32 * 1024 * 1024;
constexpr std::uint64_t kTargetExtents = 256;
constexpr std::uint64_t kMaxCapacityBytes = std::uint64_t{1} << 43;  // slot numbers have 32 bits

std::string text_of(int error) { return std::generic_category().message(error); }

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& what) {
  throw StoreError(path.string() + ": " + what);
}

std::string size_text(std::uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

int sync_directory(const std::filesystem::path& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd || ::fsync(fd.get()) != 0) return errno;
  return 0;
}

int write_file(const std::filesystem::path& path, Bytes bytes) {
  const Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!fd) return errno;
  while (!bytes.empty()) {
    const ssize_t moved = ::write(fd.get(), bytes.data(), bytes.size());
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno;
    bytes = bytes.subspan(static_cast<std::size_t>(moved));
  }
  return ::fsync(fd.get()) == 0 ? 0 : errno;
}

class Writer {
 public:
  explicit Writer(std::vector<std::byte>& out) : out_(out) {}
  template <typename T>
  void number(T value) {
    out_.resize(out_.size() + sizeof value);
    store_le(out_.data() + out_.size() - sizeof value, value);
  }
  void bytes(Bytes value) { out_.insert(out_.end(), value.begin(), value.end()); }
  void sized(Bytes value) {
    number(static_cast<std::uint32_t>(value.size()));
    bytes(value);
  }

 private:
  std::vector<std::byte>& out_;
};

class Reader {
 public:
  explicit Reader(Bytes in) : in_(in) {}
  template <typename T>
  bool number(T& value) {
    if (in_.size() < sizeof value) return false;
    value = load_le<T>(in_.data());
    in_ = in_.subspan(sizeof value);
    return true;
  }
  bool bytes(std::size_t count, Bytes& value) {
    if (in_.size() < count) return false;
    value = in_.first(count);
    in_ = in_.subspan(count);
    return true;
  }
  bool sized(std::size_t limit, Bytes& value) {
    std::uint32_t count = 0;
    return number(count) && count <= limit && bytes(count, value);
  }
  [[nodiscard]] bool at_end() const { return in_.empty(); }

 private:
  Bytes in_;
};

std::uint32_t state_crc(Bytes state) {
  constexpr std::array<std::byte, 4> kZeroCrc{};
  std::uint32_t crc = crc32c(state.first(kStateCrcAt));
  crc = crc32c(kZeroCrc, crc);
  return crc32c(state.subspan(kStateCrcAt + kZeroCrc.size()), crc);
}

}  // namespace

std::vector<std::byte> encode_saved_state(const SavedState& state) {
  std::vector<std::byte> out;
  Writer writer(out);
  writer.number(kStateMagic);
  writer.number(kStateMajor);
  writer.number(std::uint16_t{0});
  writer.number(std::uint32_t{0});  // the CRC
  writer.bytes(state.store.bytes);
  writer.number(state.sequence);
  writer.number(static_cast<std::uint32_t>(state.namespaces.size()));
  writer.number(std::uint32_t{0});
  for (const SavedNamespace& space : state.namespaces) {
    writer.bytes(space.info.id.bytes);
    writer.number(space.generation);
    writer.number(space.info.created_s);
    writer.number(space.info.last_used_s);
    writer.sized(as_bytes(space.info.label.data(), space.info.label.size()));
    writer.sized(space.info.descriptor);
  }
  store_le(out.data() + kStateCrcAt, state_crc(out));
  return out;
}

std::optional<SavedState> decode_saved_state(Bytes in) {
  if (in.size() < kStateHeaderBytes) return std::nullopt;
  if (load_le<std::uint64_t>(in.data()) != kStateMagic ||
      load_le<std::uint16_t>(in.data() + 8) != kStateMajor ||
      load_le<std::uint32_t>(in.data() + kStateCrcAt) != state_crc(in)) {
    return std::nullopt;
  }
  SavedState state;
  std::copy_n(in.begin() + 16, state.store.bytes.size(), state.store.bytes.begin());
  state.sequence = load_le<std::uint64_t>(in.data() + 32);
  const auto count = load_le<std::uint32_t>(in.data() + 40);
  Reader reader(in.subspan(kStateHeaderBytes));
  for (std::uint32_t i = 0; i < count; ++i) {
    SavedNamespace space;
    Bytes id;
    Bytes label;
    Bytes descriptor;
    if (!reader.bytes(space.info.id.bytes.size(), id) || !reader.number(space.generation) ||
        !reader.number(space.info.created_s) || !reader.number(space.info.last_used_s) ||
        !reader.sized(kMaxStateBytes, label) || !reader.sized(kMaxDescriptorBytes, descriptor)) {
      return std::nullopt;
    }
    std::ranges::copy(id, space.info.id.bytes.begin());
    space.info.label.assign(reinterpret_cast<const char*>(label.data()), label.size());
    space.info.descriptor.assign(descriptor.begin(), descriptor.end());
    state.namespaces.push_back(std::move(space));
  }
  if (!reader.at_end()) return std::nullopt;
  return state;
}

SlabGeometry SlabDirectory::geometry_for(std::uint64_t capacity_bytes) {
  if (capacity_bytes < kMinDirectoryBytes || capacity_bytes > kMaxCapacityBytes) {
    throw StoreError("a directory of " + size_text(capacity_bytes) + " was asked for; give it " +
                     std::to_string(kMinDirectoryBytes) + " to " + std::to_string(kMaxCapacityBytes) +
                     ", or several directories");
  }
  const std::uint64_t extent =
      std::clamp(std::bit_floor(capacity_bytes / kTargetExtents), kMinExtentBytes, kMaxExtentBytes);
  return {extent, static_cast<std::uint32_t>(capacity_bytes / extent)};
}

SlotTableHeader read_table_header(const std::filesystem::path& table) {
  std::array<std::byte, kSlotTableHeaderBytes> bytes{};
  std::ifstream file(table, std::ios::binary);
  file.read(reinterpret_cast<char*>(bytes.data()), bytes.size());
  if (!file) refuse(table, "it is shorter than its header; it is no table of dfkv, or was cut off");
  SlotTableHeader header;
  switch (decode_table_header(bytes, header)) {
    case TableFault::kNone:
      break;
    case TableFault::kMagic:
      refuse(table, "it does not begin like a table of dfkv; choose another directory");
    case TableFault::kCrc:
    case TableFault::kMalformed:
      refuse(table,
             "its header is damaged; restore it, or move the directory away to start with an empty cache");
    case TableFault::kMajor:
      refuse(table, "it was made by a later version of dfkv; use that version, or another directory");
  }
  return header;
}

SlabDirectory::SlabDirectory(std::filesystem::path path, std::uint64_t capacity_bytes,
                             const std::string& node_id)
    : path_(std::move(path)) {
  std::error_code error;
  if (!std::filesystem::is_directory(path_, error)) {
    refuse(path_, "there is no such directory; make it (mkdir -p) and give it to the user dfkv runs as");
  }
  lock();
  if (std::filesystem::exists(file(kTableFile), error)) {
    check_header(capacity_bytes, node_id);
  } else {
    create(capacity_bytes, node_id);
  }
}

void SlabDirectory::lock() {
  lock_ = Fd(::open(file(kLockFile).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!lock_) {
    const int error = errno;
    refuse(path_,
           "cannot open its lock: " + text_of(error) + "; the user dfkv runs as must be able to write there");
  }
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    std::string holder;
    std::ifstream(file(kLockFile)) >> holder;
    refuse(path_, "another node (process " + (holder.empty() ? "unknown" : holder) +
                      ") uses it; stop that one, or choose another directory");
  }
  const std::string pid = std::to_string(::getpid()) + "\n";
  if (::ftruncate(lock_.get(), 0) == 0) {
    // For the message above alone.
    [[maybe_unused]] const ssize_t written = ::pwrite(lock_.get(), pid.data(), pid.size(), 0);
  }
}

void SlabDirectory::check_header(std::uint64_t capacity_bytes, const std::string& node_id) {
  header_ = read_table_header(file(kTableFile));
  const SlabGeometry wanted = geometry_for(capacity_bytes);
  if (header_.lattice_id != kLatticeId) {
    refuse(path_, "its size classes are lattice " + std::to_string(header_.lattice_id) +
                      ", this version's are " + std::to_string(kLatticeId) +
                      "; use the version that made it, or another directory");
  }
  if (header_.extent_bytes != wanted.extent_bytes || header_.extent_count != wanted.extent_count) {
    refuse(path_, "it was made for " + size_text(header_.extent_bytes * header_.extent_count) + " (" +
                      std::to_string(header_.extent_count) + " extents of " +
                      size_text(header_.extent_bytes) + "), and " + size_text(capacity_bytes) + " (" +
                      std::to_string(wanted.extent_count) + " extents of " + size_text(wanted.extent_bytes) +
                      ") was asked for; start with the old capacity, or use another directory");
  }
  if (header_.slot_count != wanted.capacity_bytes() / kSlotAlignment) {
    refuse(path_, "its table has " + std::to_string(header_.slot_count) + " records and " +
                      std::to_string(wanted.capacity_bytes() / kSlotAlignment) +
                      " were expected; use the version that made it, or another directory");
  }
  if (header_.node_id != node_id) {
    refuse(path_, "it belongs to node " + header_.node_id + " and this is " + node_id +
                      "; start with --node-id " + header_.node_id + ", or choose another directory");
  }
}

void SlabDirectory::create(std::uint64_t capacity_bytes, const std::string& node_id) {
  const SlabGeometry geometry = geometry_for(capacity_bytes);
  std::error_code error;
  if (std::filesystem::exists(file(kPayloadFile), error) ||
      std::filesystem::exists(file(kStateFile), error)) {
    refuse(path_, std::string("it has ") + kPayloadFile + " or " + kStateFile + " and no " + kTableFile +
                      "; restore the table, or empty the directory to start with an empty cache");
  }
  header_.extent_bytes = geometry.extent_bytes;
  header_.extent_count = geometry.extent_count;
  header_.slot_count = geometry.capacity_bytes() / kSlotAlignment;
  header_.lattice_id = kLatticeId;
  header_.node_id = node_id;
  if (::getrandom(header_.store.bytes.data(), header_.store.bytes.size(), 0) !=
      static_cast<ssize_t>(header_.store.bytes.size())) {
    refuse(path_, "no random bytes for its name: " + text_of(errno));
  }
  std::array<std::byte, kSlotTableHeaderBytes> bytes{};
  encode_table_header(header_, bytes);
  // The table comes under its name when all of it is there: one that is found is complete.
  const std::filesystem::path table = file(kTableFile);
  std::filesystem::path fresh = table;
  fresh += kNewSuffix;
  int code = write_file(fresh, bytes);
  if (code == 0 && ::rename(fresh.c_str(), table.c_str()) != 0) code = errno;
  if (code == 0) code = sync_directory(path_);
  if (code == 0) code = save_state({header_.store, 0, {}});
  if (code != 0) refuse(path_, "cannot make a store in it: " + text_of(code));
  created_ = true;
}

std::unique_ptr<Device> SlabDirectory::open_table() const {
  try {
    const FileDevice::Options options{kSlotTableHeaderBytes + header_.slot_count * kSlotRecordBytes, false,
                                      false};
    return std::make_unique<FileDevice>(file(kTableFile), options);
  } catch (const std::system_error& error) {
    refuse(path_, error.what());
  }
}

std::unique_ptr<Device> SlabDirectory::open_payload(bool keep) const {
  try {
    return std::make_unique<FileDevice>(file(kPayloadFile),
                                        FileDevice::Options{geometry().capacity_bytes(), keep, keep});
  } catch (const std::system_error& error) {
    if (created_) {
      // Nothing was kept in it yet: the next start may ask for another size.
      std::error_code ignored;
      for (const char* name : {kPayloadFile, kTableFile, kStateFile})
        std::filesystem::remove(file(name), ignored);
    }
    const std::string hint = error.code().value() == ENOSPC
                                 ? "; free space on that file system or give a smaller --capacity"
                                 : "; check the directory's permissions and its file system";
    refuse(path_, std::string(error.what()) + hint);
  }
}

std::optional<SavedState> SlabDirectory::load_state() const { return read_saved_state(file(kStateFile)); }

std::optional<SavedState> read_saved_state(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) return std::nullopt;
  const auto size = static_cast<std::size_t>(in.tellg());
  if (size > kMaxStateBytes) return std::nullopt;
  std::vector<std::byte> bytes(size);
  in.seekg(0);
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
  if (!in) return std::nullopt;
  return decode_saved_state(bytes);
}

int SlabDirectory::save_state(const SavedState& state) const {
  std::filesystem::path fresh = file(kStateFile);
  fresh += kNewSuffix;
  const int error = write_file(fresh, encode_saved_state(state));
  if (error != 0) return error;
  if (::rename(fresh.c_str(), file(kStateFile).c_str()) != 0) return errno;
  return sync_directory(path_);
}

}  // namespace dfkv
