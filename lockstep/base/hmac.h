#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep {

/// HMAC-SHA256, by OpenSSL, of so many bytes.
inline constexpr size_t kHmacBytes = 32;

/// It in pieces. One thread at a time.
class Hmac {
 public:
  /// Throws Error where OpenSSL refuses it.
  explicit Hmac(const std::string& key);
  ~Hmac();
  void add(const void* data, size_t size);
  void add_number(int64_t number) { add(&number, sizeof(number)); }
  /// Ends its use.
  std::string finish();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

std::string hmac_sha256(const std::string& key, std::string_view text);

/// Takes as long for any two codes of the same length, so that none can be guessed piece by piece.
bool same_code(std::string_view one, std::string_view other);

}  // namespace lockstep
