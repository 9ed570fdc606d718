// Building batches by hand, for tests of the client.
#pragma once

#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "net/client.h"
#include "tests/fake_peer.h"
#include "wire/identity.h"

namespace dfkv::test {

using namespace std::chrono_literals;
using client::Client;
using client::Input;
using client::Kind;
using client::Operation;
using client::Options;

inline BlockId block_of(std::uint64_t n) {
  BlockId id;
  store_le(id.bytes.data(), n * 0x9E3779B97F4A7C15ULL + 1);
  store_le(id.bytes.data() + 8, n);
  return id;
}

inline ByteVector random_bytes(std::size_t size, std::mt19937_64& random) {
  ByteVector bytes(size);
  std::size_t at = 0;
  for (; at + 8 <= size; at += 8) store_le<std::uint64_t>(bytes.data() + at, random());
  for (; at < size; ++at) bytes[at] = static_cast<std::byte>(random());
  return bytes;
}

inline Options options_for(std::uint16_t port) {
  Options options;
  options.seeds = {{"127.0.0.1", port}};
  return options;
}

// One descriptor that every test uses.
inline NamespaceId add_test_namespace(Client& client) {
  ByteVector descriptor(2 + 4 + 3);
  store_le<std::uint16_t>(descriptor.data(), 1);
  store_le<std::uint32_t>(descriptor.data() + 2, 3);
  std::memcpy(descriptor.data() + 6, "abc", 3);
  return client.add_namespace(descriptor, "test");
}

class Batch {
 public:
  Batch(Kind kind, const NamespaceId& ns) {
    input.kind = kind;
    input.ns = ns;
    input.first_segment = {0};
  }
  Batch& chunk(const BlockId& block) {
    const auto at = input.table.size();
    input.table.resize(at + kChunkRefBytes);
    std::memcpy(input.table.data() + at, block.bytes.data(), 16);
    store_le(input.table.data() + at + 16, route_of(block));
    ++input.count;
    return *this;
  }
  // `segments` in order make up the item; their sum is its length.
  Batch& item(const BlockId& block, Part part, const std::vector<client::Segment>& segments) {
    std::uint64_t length = 0;
    for (const auto& segment : segments) length += segment.length;
    const auto at = input.table.size();
    input.table.resize(at + kItemRefBytes);
    std::memcpy(input.table.data() + at, block.bytes.data(), 16);
    store_le(input.table.data() + at + 16, part);
    store_le(input.table.data() + at + 24, route_of(block));
    store_le(input.table.data() + at + 32, static_cast<std::uint32_t>(length));
    input.segments.insert(input.segments.end(), segments.begin(), segments.end());
    input.first_segment.push_back(static_cast<std::uint32_t>(input.segments.size()));
    ++input.count;
    return *this;
  }
  Batch& item(const BlockId& block, Part part, ByteVector& memory) {
    return item(block, part, {{reinterpret_cast<std::uint64_t>(memory.data()), memory.size()}});
  }
  Batch& parts(std::vector<Part> required) {
    input.parts = std::move(required);
    return *this;
  }
  std::shared_ptr<Operation> submit(Client& client, std::chrono::nanoseconds deadline = 5s) {
    return client.submit(std::move(input), deadline);
  }

  Input input;
};

inline std::shared_ptr<Operation> ask_nodes(Client& client, Kind kind, std::chrono::nanoseconds deadline) {
  Input input;
  input.kind = kind;
  return client.submit(std::move(input), deadline);
}

inline Status status_of(const Operation& op, std::size_t key = 0) {
  return static_cast<Status>(op.statuses().at(key));
}

inline std::string name_of(Status status) { return std::string(status_name(status)); }

// Cuts `memory` into up to `most` segments at random places.
inline std::vector<client::Segment> cut_randomly(ByteVector& memory, std::size_t most,
                                                 std::mt19937_64& random) {
  std::vector<client::Segment> segments;
  std::size_t at = 0;
  while (at < memory.size()) {
    auto size = memory.size() - at;
    if (segments.size() + 1 < most) size = std::min<std::size_t>(size, 1 + random() % size);
    segments.push_back({reinterpret_cast<std::uint64_t>(memory.data() + at), size});
    at += size;
  }
  return segments;
}

inline double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Waits for something that another thread brings about.
inline bool eventually(const std::function<bool()>& condition, std::chrono::milliseconds limit = 3s) {
  const auto until = Clock::now() + limit;
  while (!condition()) {
    if (Clock::now() > until) return false;
    std::this_thread::sleep_for(2ms);
  }
  return true;
}

}  // namespace dfkv::test
