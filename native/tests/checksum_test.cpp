#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "wire/checksum.h"

#include <doctest/doctest.h>

#include <random>

#include "golden.h"
#include "wire/meta.h"
#include "wire/portable.h"
#include "wire/sha256.h"
#include "wire/xxh3_backend.h"

namespace dfkv {
namespace {

Bytes text(std::string_view value) { return as_bytes(value.data(), value.size()); }

std::vector<std::pair<std::string, const detail::Xxh3Backend*>> backends() {
  std::vector<std::pair<std::string, const detail::Xxh3Backend*>> found{{"baseline", &detail::kXxh3Baseline}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") != 0) found.emplace_back("avx2", &detail::kXxh3Avx2);
  if (__builtin_cpu_supports("avx512f") != 0) found.emplace_back("avx512", &detail::kXxh3Avx512);
#endif
  return found;
}

// Padding done here, so that only the compression of the library is used.
Sha256Digest sha256_portable(Bytes data) {
  golden::Buffer padded(data.begin(), data.end());
  padded.push_back(std::byte{0x80});
  while (padded.size() % 64 != 56) padded.push_back(std::byte{0});
  for (int shift = 56; shift >= 0; shift -= 8) {
    padded.push_back(static_cast<std::byte>(data.size() * 8 >> shift));
  }
  std::array<std::uint32_t, 8> state{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                     0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  detail::sha256_compress_portable(state, padded.data(), padded.size() / 64);
  Sha256Digest digest;
  for (std::size_t i = 0; i < 32; ++i) {
    digest[i] = static_cast<std::byte>(state[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

TEST_CASE("known answers of the standards") {
  CHECK(crc32c(text("123456789")) == 0xE3069283);
  CHECK(crc32c(golden::Buffer(32)) == 0x8A9136AA);                   // RFC 3720
  CHECK(crc32c(golden::Buffer(32, std::byte{0xFF})) == 0x62A8AB43);  // RFC 3720
  CHECK(golden::hex(sha256(text("abc"))) ==
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(golden::hex(sha256({})) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(golden::hex(sha256(text("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(golden::hex(hmac_sha256(golden::Buffer(20, std::byte{0x0b}), text("Hi There"))) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");  // RFC 4231, 1
  CHECK(golden::hex(hmac_sha256(text("Jefe"), text("what do ya want for nothing?"))) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");  // RFC 4231, 2
  CHECK(golden::hex(hmac_sha256(golden::Buffer(131, std::byte{0xaa}),
                                text("Test Using Larger Than Block-Size Key - Hash Key First"))) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");  // RFC 4231, 6
}

TEST_CASE("golden checksums, with every implementation this CPU can run") {
  for (const golden::Row& row : golden::rows("checksum.txt")) {
    CAPTURE(row[0]);
    const golden::Buffer data = golden::pattern(golden::number(row[0]));
    CHECK(crc32c(data) == golden::number(row[1]));
    CHECK(~detail::crc32c_portable(~0u, data.data(), data.size()) == golden::number(row[1]));
    CHECK(xxh3_64(data) == golden::number(row[2]));
    for (const auto& backend : backends()) {
      CAPTURE(backend.first);
      CHECK(backend.second->hash(data.data(), data.size()) == golden::number(row[2]));
    }
    CHECK(golden::hex(sha256(data)) == row[3]);
    CHECK(golden::hex(sha256_portable(data)) == row[3]);
  }
}

TEST_CASE("golden proofs of AUTH") {
  for (const golden::Row& row : golden::rows("auth.txt")) {
    const std::string node_id = golden::unhex_text(row[4]);
    CHECK(golden::hex(auth_mac(golden::unhex(row[0]), row[1][0], golden::unhex(row[2]), golden::unhex(row[3]),
                               node_id)) == row[5]);
  }
  const golden::Buffer short_nonce(15);
  const golden::Buffer nonce(16);
  CHECK_THROWS_AS((void)auth_mac({}, 'c', short_nonce, nonce, "n"), std::invalid_argument);
  CHECK_THROWS_AS((void)auth_mac({}, 'c', nonce, short_nonce, "n"), std::invalid_argument);
}

TEST_CASE("pieces give the same digest as the whole") {
  const unsigned seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937 random(seed);
  StreamingChecksum streaming;
  for (int round = 0; round < 200; ++round) {
    const golden::Buffer data = golden::pattern(random() % 5000);
    CAPTURE(data.size());
    streaming.reset();
    Sha256 sha;
    std::uint32_t crc = 0;
    for (std::size_t at = 0; at < data.size();) {
      const std::size_t size = std::min<std::size_t>(random() % 300, data.size() - at);
      const Bytes piece = Bytes(data).subspan(at, size);
      streaming.update(piece);
      sha.update(piece);
      crc = crc32c(piece, crc);
      at += size;
    }
    CHECK(streaming.digest() == xxh3_64(data));
    CHECK(sha.finish() == sha256(data));
    CHECK(crc == crc32c(data));
  }
}

TEST_CASE("a streaming checksum can be moved and used again") {
  const golden::Buffer data = golden::pattern(1000);
  StreamingChecksum first;
  first.update(data);
  StreamingChecksum second = std::move(first);
  CHECK(second.digest() == xxh3_64(data));
  second.reset();
  CHECK(second.digest() == xxh3_64({}));
}

TEST_CASE("an unaligned start changes nothing") {
  const golden::Buffer data = golden::pattern(600);
  for (std::size_t shift = 0; shift < 16; ++shift) {
    golden::Buffer moved(shift);
    moved.insert(moved.end(), data.begin(), data.end());
    const Bytes view = Bytes(moved).subspan(shift);
    CHECK(crc32c(view) == crc32c(data));
    CHECK(xxh3_64(view) == xxh3_64(data));
    CHECK(sha256(view) == sha256(data));
  }
}

TEST_CASE("comparing proofs") {
  golden::Buffer a = golden::pattern(32);
  CHECK(equal_constant_time(a, golden::pattern(32)));
  CHECK_FALSE(equal_constant_time(a, golden::pattern(31)));
  for (std::byte& byte : a) {
    byte ^= std::byte{1};
    CHECK_FALSE(equal_constant_time(a, golden::pattern(32)));
    byte ^= std::byte{1};
  }
}

}  // namespace
}  // namespace dfkv
