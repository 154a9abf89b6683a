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

TEST(Hash, PiecesGiveTheDigestOfTheWhole) {
  Hasher hasher(Hasher::Algorithm::md5);
  hasher.update("a", 1);
  hasher.update("bc", 2);
  EXPECT_EQ(hasher.finish(), md5_hex("abc"));
}

}  // namespace hash_test
}  // namespace lockstep
