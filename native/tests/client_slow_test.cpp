// The client with a node that answers, but slowly: what arrives counts, although the client is woken for
// large pieces only.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "net/client.h"
#include "tests/client_harness.h"

using namespace dfkv;
using namespace dfkv::test;

TEST_CASE("a connection that goes on with a load whose deadline has passed is kept") {
  FakePeer peer;
  auto options = options_for(peer.port);
  options.connections_per_node = 1;
  options.stall_timeout_ms = 400;
  Client client(options);
  const auto ns = add_test_namespace(client);
  std::mt19937_64 random{3};
  const ByteVector stored = random_bytes(40'000, random);
  peer.store(block_of(1), 0, stored);
  std::atomic<bool> slow{true};
  peer.set_hook([&](FakePeer::Conn& conn, const Frame& frame) {
    if (frame.opcode() != Opcode::kGet || !slow.exchange(false)) return false;
    ReplyMeta meta;
    meta.length = stored.size();
    meta.checksum = xxh3_64(stored);
    ByteVector encoded;
    encode_reply(meta, encoded);
    const auto whole = FakePeer::Conn::encode(Opcode::kGet, frame.header.request_id, 0,
                                              kFlagReply | kFlagLastOfItem, encoded, stored);
    // 1.4 s in all, three and a half times what a connection may stand still.
    for (std::size_t at = 0; at < whole.size(); at += 1'500) {
      if (!conn.send_raw(Bytes(whole).subspan(at, std::min<std::size_t>(1'500, whole.size() - at))))
        return true;
      conn.pause(50ms);
    }
    const auto status = static_cast<std::uint16_t>(Status::kOk);
    conn.reply(frame, {}, as_bytes(&status, sizeof status));
    return true;
  });
  ByteVector into(stored.size());
  const auto late = Batch(Kind::kGet, ns).item(block_of(1), 0, into).submit(client, 100ms);
  REQUIRE(late->wait(5s));
  CHECK(name_of(status_of(*late)) == "deadline");
  const auto next = Batch(Kind::kGet, ns).item(block_of(1), 0, into).submit(client, 10s);
  REQUIRE(next->wait(15s));
  CHECK(name_of(status_of(*next)) == "ok");
  CHECK(into == stored);
  CHECK(client.counters().stalled_connections.load() == 0);
  CHECK(client.counters().disconnects.load() == 0);
  peer.stop();  // before what its hook refers to goes
}
