#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep {

/// A running digest of bytes, by OpenSSL. One thread at a time.
class Hasher {
 public:
  enum class Algorithm { md5, sha256 };
  explicit Hasher(Algorithm algorithm);
  ~Hasher();
  void update(const void* data, size_t size);
  /// The digest in lower-case hexadecimal; ends the hasher's use.
  std::string finish();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

std::string md5_hex(std::string_view bytes);
std::string sha256_hex(std::string_view bytes);

}  // namespace lockstep
