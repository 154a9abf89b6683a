#include "lockstep/base/hash.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace hash_test {

// The test suites of RFC 1321 and FIPS 180-4.
TEST(Hash, KnownDigests) {
  EXPECT_EQ(md5_hex(""), "d41d8cd98f00b204e9800998ecf8427e");
  EXPECT_EQ(md5_hex("abc"), "900150983cd24fb0d6963f7d28e17f72");
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

// As `xxh128sum` prints them: of short, middling and long inputs the algorithm is another.
TEST(Hash, KnownXxh128) {
  const auto xxh128 = [](size_t size) {
    Hasher hasher(Hasher::Algorithm::xxh128);
    for (size_t i = 0; i < size; ++i) {
      const auto byte = static_cast<char>(i);
      hasher.update(&byte, 1);
    }
    return hasher.finish();
  };
  EXPECT_EQ(xxh128(0), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(xxh128(3), "e3b55f57945a17cf5f4299fc161c9cbb");
  EXPECT_EQ(xxh128(200), "cb0395310643ba0edd97e9af3609d9f5");
  EXPECT_EQ(xxh128(5000), "7a681524919c28221b74bda2c82a8c7a");
}

TEST(Hash, PiecesGiveTheDigestOfTheWhole) {
  Hasher hasher(Hasher::Algorithm::md5);
  hasher.update("a", 1);
  hasher.update("bc", 2);
  EXPECT_EQ(hasher.finish(), md5_hex("abc"));
}

}  // namespace hash_test
}  // namespace lockstep
