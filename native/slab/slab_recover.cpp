// What a slab store finds in its table when it starts.
//
// A slab is bound by writing all its records, with a generation that only grows: the highest generation that
// covers an extent is the one that counts, and records of another one are of no use. Of two records for one
// key, the higher sequence counts. What is of no use is freed and synced before anything is served, so that
// it is not believed later.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "slab/slab_store.h"
#include "wire/checksum.h"

namespace dfkv {

namespace {

constexpr std::size_t kReadBytes = 512 * 1024;  // more would stay with the allocator
constexpr std::uint32_t kNoClass = ~std::uint32_t{0};

bool all_zero(Bytes bytes) {
  return bytes[0] == std::byte{0} && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0;
}

}  // namespace

struct SlabStore::Recovery {
  struct Binding {
    std::uint32_t generation = 0;
    std::uint32_t size_class = kNoClass;
    bool valid = false;
  };
  std::vector<Binding> bindings;    // by first extent
  std::vector<SlotNumber> useless;  // taken, not linked
  std::vector<SlotNumber> foreign;  // live records outside of every binding
  std::uint64_t first_sequence = 0;
  bool believe = true;
};

void SlabStore::recover() {
  const auto start = std::chrono::steady_clock::now();
  recovery_.created = directory_.created();
  Recovery work;
  const auto state = directory_.load_state();
  if (state) {
    if (state->store != directory_.header().store) {
      throw StoreError(
          options_.path.string() +
          ": slots.tbl and namespaces.tbl are of two stores; restore the one that was replaced, or empty "
          "the directory to start with an empty cache");
    }
    for (const SavedNamespace& space : state->namespaces) {
      static_cast<void>(add_space(space.info, space.generation));
    }
  } else {
    // Which namespaces were erased is not known any more: nothing can be believed.
    work.believe = false;
    if (!recovery_.created)
      recovery_.remark = "namespaces.tbl is missing or damaged: every object was dropped";
  }
  find_bindings(work);
  if (state && sequence_ < state->sequence) {
    work.believe = false;
    recovery_.remark = "slots.tbl is older than namespaces.tbl: every object was dropped";
  }
  recorded_sequence_ = sequence_;
  if (state)
    sequence_ = std::max(sequence_, state->sequence);  // what is written from now on is no older copy
  clock_ = sequence_;

  std::vector<Found> found;
  std::uint32_t extent = 0;
  read_table([&](const Found& one) {
    const std::uint32_t at = one.slot >> record_shift_;
    if (at != extent) {
      take_slab(work, extent, found);
      found.clear();
      extent = at;
    }
    found.push_back(one);
  });
  take_slab(work, extent, found);
  drop_useless(work);
  synced_sequence_ = state ? state->sequence : 0;
  if (!state) ++spaces_version_;
  recovery_.objects = counts_.objects;
  recovery_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void SlabStore::read_table(const std::function<void(const Found&)>& visit) {
  std::vector<std::byte> buffer(kReadBytes);
  std::uint64_t at = kSlotTableHeaderBytes;
  Found found;
  while (const auto written = table_->next_written(at)) {
    std::uint64_t begin = std::max(written->begin / kSlotRecordBytes * kSlotRecordBytes, at);
    const std::uint64_t end = std::min(
        (written->end + kSlotRecordBytes - 1) / kSlotRecordBytes * kSlotRecordBytes, table_->bytes());
    while (begin < end) {
      const MutableBytes piece =
          MutableBytes(buffer).first(std::min<std::uint64_t>(buffer.size(), end - begin));
      if (const int error = table_->read(begin, piece); error != 0) {
        throw StoreError(options_.path.string() + ": slots.tbl cannot be read (" +
                         std::generic_category().message(error) +
                         "); replace the disk, or leave the directory out");
      }
      recovery_.table_bytes += piece.size();
      for (std::size_t i = 0; i < piece.size(); i += kSlotRecordBytes) {
        const auto bytes = Bytes(piece).subspan(i, kSlotRecordBytes);
        if (all_zero(bytes)) continue;
        found.slot = static_cast<SlotNumber>((begin + i - kSlotTableHeaderBytes) / kSlotRecordBytes);
        found.fault =
            decode_slot_record(std::span<const std::byte, kSlotRecordBytes>(bytes.data(), kSlotRecordBytes),
                               directory_.header().store, found.slot, found.record);
        visit(found);
      }
      begin += piece.size();
    }
    at = std::max(end, at + 1);
  }
}

void SlabStore::find_bindings(Recovery& work) {
  work.bindings.resize(geometry_.extent_count);
  read_table([&](const Found& found) {
    if (found.fault != RecordFault::kNone) return;
    const SlotRecord& record = found.record;
    sequence_ = std::max(sequence_, record.sequence);
    binding_ = std::max(binding_, record.extent_generation);
    if (record.stored_bytes == 0 || record.stored_bytes > kMaxSlotBytes) return;
    const std::size_t size_class = size_class_of(record.stored_bytes);
    const SlotRef ref = ref_of(found.slot);
    Recovery::Binding& binding = work.bindings[ref.slab];
    if (record.extent_generation <= binding.generation || !allocator_.fits(size_class) ||
        ref.slot >= allocator_.slots_per_slab(size_class) ||
        allocator_.extents_per_slab(size_class) > geometry_.extent_count - ref.slab) {
      return;
    }
    binding.generation = record.extent_generation;
    binding.size_class = static_cast<std::uint32_t>(size_class);
  });
  std::vector<std::uint32_t> newest(geometry_.extent_count);
  const auto for_covered = [&](std::uint32_t slab, const auto& visit) {
    const std::uint32_t count = allocator_.extents_per_slab(work.bindings[slab].size_class);
    for (std::uint32_t at = slab; at < slab + count; ++at) visit(newest[at]);
  };
  for (std::uint32_t slab = 0; slab < geometry_.extent_count; ++slab) {
    const Recovery::Binding& binding = work.bindings[slab];
    if (binding.size_class == kNoClass) continue;
    for_covered(slab,
                [&](std::uint32_t& generation) { generation = std::max(generation, binding.generation); });
  }
  for (std::uint32_t slab = 0; slab < geometry_.extent_count; ++slab) {
    Recovery::Binding& binding = work.bindings[slab];
    if (binding.size_class == kNoClass) continue;
    binding.valid = true;
    for_covered(slab, [&](std::uint32_t generation) {
      binding.valid = binding.valid && generation == binding.generation;
    });
  }
}

void SlabStore::take_slab(Recovery& work, std::uint32_t slab, const std::vector<Found>& found) {
  if (found.empty()) return;
  const Recovery::Binding& binding = work.bindings[slab];
  const std::uint32_t slots = binding.valid ? allocator_.slots_per_slab(binding.size_class) : 0;
  std::vector<SlabAllocator::Owner> owners(slots, SlabAllocator::kNoOwner);
  bool any = false;
  for (const Found& one : found) {
    const std::uint32_t at = ref_of(one.slot).slot;
    const bool faulty = one.fault != RecordFault::kNone;
    if (faulty) ++recovery_.faulty;
    const bool inside =
        at < slots && (faulty || (one.record.extent_generation == binding.generation &&
                                  size_class_of(one.record.stored_bytes) == binding.size_class));
    if (!inside) {
      if (!faulty && one.record.state == RecordState::kLive) work.foreign.push_back(one.slot);
      continue;
    }
    if (!faulty && one.record.state == RecordState::kFree) continue;
    any = true;
    // What cannot be read is kept as it is, out of use: it may be of a later version, or tell what happened.
    if (faulty) {
      owners[at] = kQuarantinedOwner;
      continue;
    }
    // After a loss of power some payloads are not what their records say. That is no fault of the medium, and
    // its slots would be missing for ever: quarantine lasts until the next start.
    if (one.record.state == RecordState::kQuarantined) {
      ++recovery_.quarantined;
      owners[at] = kUselessOwner;
      continue;
    }
    const auto space = space_index_.find(one.record.key.ns);
    const bool known = work.believe && space != space_index_.end() &&
                       spaces_[space->second].generation == one.record.namespace_generation;
    owners[at] = known ? owner_of(space->second, one.record.namespace_generation) : kUselessOwner;
  }
  if (!any) return;
  index_.bind(slab, slots);
  class_slabs_[binding.size_class].push_back(slab);
  slab_generation_[slab] = binding.generation;
  slab_ready_[slab] = kReady;
  static_cast<void>(allocator_.restore(slab, binding.size_class, owners));
  for (const Found& one : found) {
    const SlotRef ref = ref_of(one.slot);
    if (ref.slot >= slots || owners[ref.slot] == SlabAllocator::kNoOwner) continue;
    const SlabAllocator::Owner owner = owners[ref.slot];
    if (owner == kQuarantinedOwner) {
      allocator_.set_busy(ref, true);
      ++counts_.quarantined;
      counts_.quarantined_bytes += allocator_.slot_bytes(ref);
      continue;
    }
    if (owner == kUselessOwner) {
      work.useless.push_back(one.slot);
      continue;
    }
    const ObjectKey& key = one.record.key;
    const std::uint64_t tag = tag_of(chunk_tag(key.ns, one.record.namespace_generation, key.block), key.part);
    const auto stamp = static_cast<std::uint32_t>(one.record.sequence);
    if (const SlotNumber other = index_.find(tag); other != kNoSlot) {
      if (static_cast<std::int32_t>(stamp - index_.node(other).stamp) < 0) {
        work.useless.push_back(one.slot);
        continue;
      }
      unlink(other);
      work.useless.push_back(other);
    }
    link(one.slot, tag, owner);
    index_.node(one.slot).stamp = stamp;
    allocator_.heat(ref, one.record.sequence);
  }
}

void SlabStore::drop_useless(Recovery& work) {
  recovery_.dropped = work.useless.size() + work.foreign.size();
  if (recovery_.dropped == 0) return;
  int error = 0;
  constexpr std::array<std::byte, kSlotRecordBytes> kZeros{};
  for (const SlotNumber slot : work.foreign) {
    const int one = table_->write(record_at(slot), kZeros);
    if (error == 0) error = one;
  }
  Lock lock(mutex_);
  for (const SlotNumber slot : work.useless) condemn(slot);
  const int freed = free_records(lock, work.useless);
  lock.unlock();
  if (error == 0) error = freed;
  if (error == 0) error = table_->sync();
  if (error != 0) {
    throw StoreError(options_.path.string() + ": slots.tbl cannot be written (" +
                     std::generic_category().message(error) +
                     "); make the disk writable, or leave the directory out");
  }
}

SlabStore::ScrubReport SlabStore::scrub(const ScrubProgress& progress) {
  ScrubReport report;
  auto next = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  std::vector<std::byte> memory;
  for (std::uint32_t extent = 0; extent < geometry_.extent_count; ++extent) {
    for (std::uint32_t i = 0;; ++i) {
      const SlotRef ref{extent, i};
      const SlotNumber slot = number_of(ref);
      {
        const std::lock_guard lock(mutex_);
        if (allocator_.slab_of(extent) != extent || i >= allocator_.slots_per_slab(allocator_.class_of(ref)))
          break;
        ++report.slots;
        if (!evictable(ref)) continue;
        ++pins_[slot].reads;
        ++counts_.pins;
        allocator_.set_busy(ref, true);
      }
      scrub_slot(slot, memory, report);
      unpin(slot);
      if (std::chrono::steady_clock::now() < next) continue;
      next += std::chrono::seconds(1);
      if (!progress(report)) return report;
    }
  }
  static_cast<void>(progress(report));
  return report;
}

void SlabStore::scrub_slot(SlotNumber slot, std::vector<std::byte>& memory, ScrubReport& report) {
  std::array<std::byte, kSlotRecordBytes> bytes{};
  SlotRecord record;
  Status status = Status::kAgainDisk;
  if (table_->read(record_at(slot), bytes) == 0) {
    // The key is not known here: the record's own is checked against the tag under which the slot is found.
    status = decode_slot_record(bytes, directory_.header().store, slot, record) == RecordFault::kNone
                 ? Status::kOk
                 : Status::kMissCorrupt;
    const std::lock_guard lock(mutex_);
    const std::uint64_t tag = index_.node(slot).tag;
    if (tag == 0) return;
    if (tag_of(record.key) != tag) status = Status::kMissCorrupt;
  }
  if (status == Status::kOk) {
    const std::uint64_t pages = (record.stored_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
    if (memory.size() < pages + kSlotAlignment) memory.resize(pages + kSlotAlignment);
    const auto misaligned = reinterpret_cast<std::uintptr_t>(memory.data()) % kSlotAlignment;
    const std::size_t skip = misaligned == 0 ? 0 : kSlotAlignment - misaligned;
    status = read_payload(slot, record, MutableBytes(memory).subspan(skip, pages));
  } else if (status == Status::kMissCorrupt) {
    Lock lock(mutex_);
    quarantine_slot(lock, slot, record);
  }
  ++report.objects;
  report.bytes += record.stored_bytes;
  if (status == Status::kMissCorrupt) ++report.corrupt;
  if (status == Status::kAgainDisk) ++report.unreadable;
}

}  // namespace dfkv
