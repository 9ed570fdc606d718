// Frame meta: a msgpack map with integer keys, decoded into flat structs with every limit checked first.
// Keys below 128 are critical (an unknown one refuses the request), from 128 on they may be ignored.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "wire/bytes.h"
#include "wire/identity.h"
#include "wire/status.h"

namespace dfkv {

enum class Lane : std::uint8_t { kControl = 0, kBulk = 1 };
enum class Ack : std::uint8_t { kRam = 0, kDisk = 1 };
enum class Priority : std::uint8_t { kDemand = 0, kBackground = 1 };

enum class MetaFault : std::uint8_t { kNone, kMalformed, kUnknownCritical, kBadType, kBadValue, kTooLarge };
[[nodiscard]] const char* meta_fault_name(MetaFault fault);

// HELLO, both directions. The server leaves auth_methods non-zero when it requires AUTH.
struct HelloMeta {
  std::uint64_t features_offered = 0;    // key 1
  std::uint64_t features_required = 0;   // key 2: unknown bits refuse the connection
  Lane lane = Lane::kControl;            // key 3
  std::uint32_t max_meta_bytes = 0;      // key 4
  std::uint32_t max_fragment_bytes = 0;  // key 5
  std::uint32_t auth_methods = 0;        // key 6: bit 0 none, bit 1 HMAC-SHA-256
  std::array<std::byte, 16> nonce{};     // key 7
  std::string node_id;                   // key 8 (reply), at most 128 bytes
  std::uint64_t incarnation = 0;         // key 9 (reply)
  std::array<std::byte, 16> boot_id{};   // key 10 (reply)
  std::string software;                  // key 128
  std::string client_name;               // key 129
  std::string group;                     // key 130: the one that a membership service must keep
};
inline constexpr std::uint32_t kAuthNone = 1;
inline constexpr std::uint32_t kAuthHmac = 2;

struct RequestMeta {
  std::optional<NamespaceId> ns;          // key 1
  std::uint64_t deadline_us = 0;          // key 2: time left when sent; 0: none
  std::uint32_t lease_ms = 0;             // key 3
  Ack ack = Ack::kRam;                    // key 4
  bool replace = false;                   // key 5
  std::uint64_t lease_id = 0;             // key 6: RELEASE, LEASE (renew)
  std::uint64_t target_request = 0;       // key 7: CANCEL
  std::uint64_t cursor = 0;               // key 8: LIST
  std::uint32_t limit = 0;                // key 9: LIST
  std::uint64_t known_revision = 0;       // key 10: SUBSCRIBE
  std::uint32_t wait_ms = 0;              // key 11: SUBSCRIBE
  std::vector<std::byte> descriptor;      // key 12: PUT_NS
  std::vector<std::byte> mac;             // key 13: AUTH, 32 bytes
  std::optional<std::uint64_t> checksum;  // key 14: last fragment of a PUT item
  bool aborted = false;                   // key 15: PUT item withdrawn; its payload so far is void
  std::uint64_t trace_id = 0;             // key 128
  Priority priority = Priority::kDemand;  // key 129
  std::uint64_t recompute_us = 0;         // key 130
  std::string label;                      // key 131: PUT_NS, for operators only, at most 256 bytes
};

struct ReplyMeta {
  Status status = Status::kOk;            // key 1, always present
  std::uint64_t length = 0;               // key 2: GET item, first fragment
  std::optional<std::uint64_t> checksum;  // key 3: GET item, first fragment
  std::uint64_t lease_id = 0;             // key 4
  std::uint32_t prefix = 0;               // key 5: EXISTS: chunks of the longest complete prefix
  std::uint64_t cursor = 0;               // key 6: LIST: 0 at the end
  std::vector<std::byte> mac;             // key 7: AUTH: the server's proof
  std::uint64_t queue_us = 0;             // key 128
  std::uint64_t disk_us = 0;              // key 129
  std::uint32_t retry_after_ms = 0;       // key 130
  std::string reason;                     // key 131: for people, at most 1024 bytes
  std::vector<std::uint16_t>
      nearest_differs_in;      // key 132: PUT_NS: tags in which the nearest namespace differs
  std::uint32_t lease_ms = 0;  // key 133: granted lease time
};

// Encoders append to `out`; fields at their default are left out (status and lane excepted).
void encode_hello(const HelloMeta& meta, std::vector<std::byte>& out);
void encode_request(const RequestMeta& meta, std::vector<std::byte>& out);
void encode_reply(const ReplyMeta& meta, std::vector<std::byte>& out);
[[nodiscard]] MetaFault decode_hello(Bytes in, HelloMeta& out);
[[nodiscard]] MetaFault decode_request(Bytes in, RequestMeta& out);
[[nodiscard]] MetaFault decode_reply(Bytes in, ReplyMeta& out);

// MAC of AUTH. role is 'c' for the client's proof and 's' for the server's:
// HMAC-SHA-256(secret, "dfkv.auth.1" || role || client nonce || server nonce || node id).
[[nodiscard]] Sha256Digest auth_mac(Bytes secret, char role, Bytes client_nonce, Bytes server_nonce,
                                    std::string_view node_id);

// Tables that travel packed in the payload of a request frame.
// EXISTS: u32 chunks, u32 parts, parts x u64 part, chunks x {block 16, route 8}.
// GET, PUT, REMOVE: u32 items, u32 zero, items x {block 16, part 8, route 8, u32 length, u32 zero}.
struct ChunkRef {
  BlockId block;
  Route route = 0;
};
struct ItemRef {
  BlockId block;
  Part part = 0;
  Route route = 0;
  std::uint32_t length = 0;  // GET: expected, 0 for any; PUT: exact
};
inline constexpr std::size_t kChunkRefBytes = 24;
inline constexpr std::size_t kItemRefBytes = 40;
inline constexpr std::uint32_t kMaxChunksPerRequest = 32768;
inline constexpr std::uint32_t kMaxItemsPerRequest = 16384;
inline constexpr std::uint32_t kMaxPartsPerRequest = 1024;

struct ExistsTable {
  std::vector<Part> parts;
  std::vector<ChunkRef> chunks;
};
void encode_exists_table(const ExistsTable& table, std::vector<std::byte>& out);
[[nodiscard]] bool decode_exists_table(Bytes in, ExistsTable& out);  // false: malformed or over a limit
void encode_item_table(std::span<const ItemRef> items, std::vector<std::byte>& out);
[[nodiscard]] bool decode_item_table(Bytes in, std::vector<ItemRef>& out);

}  // namespace dfkv
