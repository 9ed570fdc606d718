// Damaged files of a slab store: never wrong bytes, what is corrupt is counted and put out of use, the rest
// is there.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <fstream>
#include <map>
#include <random>

#include "slab_samples.h"

using namespace dfkv;
using namespace dfkv::test;

namespace {

constexpr auto kOk = Status::kOk;
constexpr std::uint64_t kKeys = 120;
constexpr std::uint64_t kRegionBytes = 256 * kSlotRecordBytes;  // records of an extent of 1 MiB

std::size_t length_of(std::uint64_t number) { return 20'000 + number * 777; }

struct Damaged : SlabTest {
  std::map<std::uint64_t, SlotNumber> slots;  // of each key

  Damaged() {
    for (std::uint64_t i = 0; i < kKeys; ++i) REQUIRE(put(key(i), length_of(i)) == kOk);
    store.reset();
    std::ifstream file(table(), std::ios::binary);
    const SlotTableHeader header = read_table_header(table());
    file.seekg(kSlotTableHeaderBytes);
    std::array<std::byte, kSlotRecordBytes> bytes{};
    for (SlotNumber slot = 0; file.read(reinterpret_cast<char*>(bytes.data()), bytes.size()); ++slot) {
      SlotRecord record;
      if (decode_slot_record(bytes, header.store, slot, record) != RecordFault::kNone ||
          record.state != RecordState::kLive) {
        continue;
      }
      for (std::uint64_t i = 0; i < kKeys; ++i) {
        if (key(i) == record.key) slots[i] = slot;
      }
    }
    REQUIRE(slots.size() == kKeys);
  }
  [[nodiscard]] std::filesystem::path table() const { return directory.path() / "slots.tbl"; }
  [[nodiscard]] std::filesystem::path payloads() const { return directory.path() / "extents.dat"; }
  static std::uint64_t record_at(SlotNumber slot) { return kSlotTableHeaderBytes + slot * kSlotRecordBytes; }
  // Slots are 4 KiB multiples from the start of their extent of 1 MiB; runs of extents keep that.
  [[nodiscard]] std::uint64_t payload_at(std::uint64_t number) const {
    const SlotNumber slot = slots.at(number);
    return std::uint64_t{slot / 256} * (1 << 20) +
           (slot % 256) * slot_bytes_of(size_class_of(length_of(number)));
  }
  static std::string bytes_of(const std::filesystem::path& path, std::uint64_t at, std::size_t count) {
    std::ifstream file(path, std::ios::binary);
    file.seekg(static_cast<std::streamoff>(at));
    std::string bytes(count, '\0');
    file.read(bytes.data(), static_cast<std::streamsize>(count));
    return bytes;
  }
  static void write(const std::filesystem::path& path, std::uint64_t at, const std::string& bytes) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(at));
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    REQUIRE(file.flush());
  }
  static void flip(const std::filesystem::path& path, std::uint64_t at) {
    std::string byte = bytes_of(path, at, 1);
    byte[0] = static_cast<char>(byte[0] ^ 0x10);
    write(path, at, byte);
  }
  // Reads every key twice. Returns those that are there; none is wrong.
  std::vector<std::uint64_t> read_all() {
    std::vector<std::uint64_t> there;
    for (int turn = 0; turn < 2; ++turn) {
      there.clear();
      for (std::uint64_t i = 0; i < kKeys; ++i) {
        const Status status = get(key(i));
        if (status == kOk) {
          CHECK(same_bytes(read, payload(key(i), length_of(i))));
          there.push_back(i);
        } else {
          CHECK(range_of(status) == StatusRange::kMiss);
        }
      }
    }
    check();
    return there;
  }
};

}  // namespace

TEST_CASE("a flipped byte of a record or of a payload costs that object alone") {
  const auto seed = std::random_device{}();
  MESSAGE("seed ", seed);
  std::mt19937_64 random(seed);
  Damaged t;
  // Not the latest one: its sequence says that the table is not an old copy.
  for (int i = 0; i < 5; ++i) {
    Damaged::flip(t.table(), Damaged::record_at(t.slots.at(i)) + random() % kSlotRecordBytes);
    Damaged::flip(t.payloads(), t.payload_at(50 + i) + random() % length_of(50 + i));
  }
  t.open();
  CHECK(t.store->recovery().faulty == 5);
  CHECK(t.store->stats().quarantined == 5);
  CHECK(t.read_all().size() == kKeys - 10);
  CHECK(t.store->stats().corrupt == 5);
  CHECK(t.store->stats().quarantined == 10);
  for (std::uint64_t i = 0; i < 5; ++i) CHECK(t.put(t.key(i), length_of(i)) == kOk);  // elsewhere
  t.reopen();
  CHECK(t.store->recovery().quarantined == 5);
  CHECK(t.store->recovery().faulty == 5);
  CHECK(t.store->stats().quarantined == 5);  // records that cannot be read are left as they are
  CHECK(t.read_all().size() == kKeys - 5);
  CHECK(t.store->stats().corrupt == 0);
}

TEST_CASE("a scrub finds what is corrupt before a reader does") {
  Damaged t;
  for (std::uint64_t i = 0; i < 4; ++i) Damaged::flip(t.payloads(), t.payload_at(10 + i) + 100);
  t.open();
  int calls = 0;
  const auto report = t.store->scrub([&calls](const SlabStore::ScrubReport&) { return ++calls > 0; });
  CHECK(calls >= 1);
  CHECK(report.objects == kKeys);
  CHECK(report.corrupt == 4);
  CHECK(report.unreadable == 0);
  CHECK(report.bytes > kKeys * 20'000);
  CHECK(t.read_all().size() == kKeys - 4);
  CHECK(t.store->stats().corrupt == 4);
  t.payload_faults.read_error = EIO;
  CHECK(t.store->scrub([](const SlabStore::ScrubReport&) { return true; }).unreadable == kKeys - 4);
  t.payload_faults.read_error = 0;
  CHECK(t.read_all().size() == kKeys - 4);
}

TEST_CASE("files that are cut off lose what was behind the cut") {
  for (const bool table : {true, false}) {
    Damaged t;
    const auto path = table ? t.table() : t.payloads();
    const std::uint64_t half =
        table ? Damaged::record_at(t.slots.at(kKeys / 2)) : t.payload_at(kKeys / 2) / 4096 * 4096;
    std::filesystem::resize_file(path, half);
    t.open();
    const auto there = t.read_all();
    if (table) {
      // The latest record is gone: this could be an old copy as well.
      CHECK(there.empty());
      CHECK(t.store->recovery().remark.find("older") != std::string::npos);
    } else {
      CHECK(there.size() > kKeys / 4);
      CHECK(there.size() < kKeys);
      CHECK(t.store->stats().corrupt == kKeys - there.size());
    }
    CHECK(t.put(t.key(1000), 50'000) == kOk);
    CHECK(t.has(t.key(1000), 50'000));
  }
}

TEST_CASE("records that were exchanged, and payloads that were, are not believed") {
  Damaged t;
  const auto exchange = [](const std::filesystem::path& path, std::uint64_t a, std::uint64_t b,
                           std::size_t count) {
    const std::string first = Damaged::bytes_of(path, a, count);
    Damaged::write(path, a, Damaged::bytes_of(path, b, count));
    Damaged::write(path, b, first);
  };
  exchange(t.table(), Damaged::record_at(t.slots.at(1)), Damaged::record_at(t.slots.at(2)), kSlotRecordBytes);
  exchange(t.payloads(), t.payload_at(61), t.payload_at(62), 65'536);
  t.open();
  const auto there = t.read_all();
  CHECK(there.size() == kKeys - 4);
  for (const std::uint64_t gone : {1, 2, 61, 62}) CHECK(std::ranges::find(there, gone) == there.end());
  CHECK(t.store->recovery().faulty == 2);
  CHECK(t.store->stats().corrupt == 2);
}

TEST_CASE("an extent that reads as zeros, of payload or of records") {
  Damaged t;
  const std::uint64_t extent = t.slots.at(5) / 256;
  Damaged::write(t.payloads(), extent << 20, std::string(1 << 20, '\0'));
  const std::uint64_t other = t.slots.at(100) / 256;
  REQUIRE(other != extent);
  Damaged::write(t.table(), kSlotTableHeaderBytes + other * kRegionBytes, std::string(kRegionBytes, '\0'));
  t.open();
  const auto there = t.read_all();
  CHECK(there.size() < kKeys);
  CHECK(std::ranges::find(there, 5) == there.end());
  CHECK(std::ranges::find(there, 100) == there.end());
  for (std::uint64_t i = 0; i < kKeys; ++i) static_cast<void>(t.put(t.key(i), length_of(i)));
  CHECK(t.read_all().size() == kKeys);
}

TEST_CASE("an older copy of the table brings nothing back") {
  Damaged t;
  std::filesystem::copy_file(t.table(), t.directory.path() / "old");
  t.open();
  for (std::uint64_t i = 0; i < 20; ++i) CHECK(t.remove(t.key(i)) == 0);
  for (std::uint64_t i = 20; i < 40; ++i) CHECK(t.put(t.key(i), length_of(i), 9) == kOk);  // other bytes
  t.store.reset();
  std::filesystem::copy_file(t.directory.path() / "old", t.table(),
                             std::filesystem::copy_options::overwrite_existing);
  t.open();
  CHECK(t.store->recovery().remark.find("older") != std::string::npos);
  for (std::uint64_t i = 0; i < kKeys; ++i) CHECK(t.get(t.key(i)) == Status::kMissNotFound);
  CHECK(t.store->stats().used_bytes == 0);
  for (std::uint64_t i = 0; i < kKeys; ++i) CHECK(t.put(t.key(i), length_of(i)) == kOk);
  t.reopen();
  CHECK(t.read_all().size() == kKeys);
}

TEST_CASE("without its namespaces nothing of a table is believed") {
  for (const bool damaged : {true, false}) {
    Damaged t;
    if (damaged) {
      Damaged::flip(t.directory.path() / "namespaces.tbl", 60);
    } else {
      std::filesystem::remove(t.directory.path() / "namespaces.tbl");
    }
    t.open();
    CHECK(t.store->recovery().remark.find("namespaces.tbl") != std::string::npos);
    CHECK(t.store->recovery().dropped == kKeys);
    CHECK(t.read_all().empty());
    t.add(t.ns);
    CHECK(t.put(t.key(1), length_of(1)) == kOk);
    t.reopen();
    CHECK(t.read_all() == std::vector<std::uint64_t>{1});
  }
}
