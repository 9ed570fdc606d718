// The view of the cluster: who is there and how routes are placed. (cluster id, revision) orders views.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "wire/bytes.h"
#include "wire/identity.h"

namespace dfkv {

enum class NodeState : std::uint8_t { kJoining = 0, kServing = 1, kDraining = 2, kGone = 3 };

struct ViewNode {
  std::string id;  // 1-128 bytes of [A-Za-z0-9._-]
  std::uint64_t incarnation = 0;
  std::array<std::byte, 16> boot_id{};
  NodeState state = NodeState::kServing;
  std::uint32_t read_weight = 100;
  std::uint32_t write_weight = 100;
  std::string zone;
  std::uint64_t features = 0;
  std::vector<std::string> tcp;   // "host:port"
  std::vector<std::string> rdma;  // gids
  std::string unix_path;
};

struct View {
  std::array<std::byte, 16> cluster_id{};
  std::uint64_t revision = 0;
  std::array<std::byte, 16> digest{};  // of the encoded nodes and the rule; filled by encode_view
  std::uint32_t placement_rule = 1;
  std::vector<ViewNode> nodes;
};

inline constexpr std::size_t kMaxViewBytes = 4 * 1024 * 1024;
inline constexpr std::size_t kMaxViewNodes = 4096;

// msgpack map with integer keys; see docs/formats.md. Sorts view.nodes by id and sets view.digest.
// Throws std::invalid_argument when a node id is malformed or repeated or a limit is exceeded.
[[nodiscard]] std::vector<std::byte> encode_view(View& view);
// nullopt: malformed, over a limit, or the digest does not match. The caller checks that it knows the
// placement rule.
[[nodiscard]] std::optional<View> decode_view(Bytes in);

}  // namespace dfkv
