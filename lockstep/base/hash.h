#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep {

/// A running digest of bytes. One thread at a time. xxh128 (XXH3 of 128 bits) is as fast as memory;
/// it finds damage, but somebody can make other bytes with the same digest.
class Hasher {
 public:
  enum class Algorithm { md5, sha256, xxh128 };
  explicit Hasher(Algorithm algorithm);
  ~Hasher();
  void update(const void* data, size_t size);
  /// The digest in lower-case hexadecimal. Ends the hasher's use.
  std::string finish();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

/// FNV-1a: a small number, the same for all processes that have the text.
inline uint32_t fnv1a(std::string_view text) {
  uint32_t hash = 2166136261u;
  for (const unsigned char c : text) hash = (hash ^ c) * 16777619u;
  return hash;
}

std::string md5_hex(std::string_view bytes);
std::string sha256_hex(std::string_view bytes);

}  // namespace lockstep
