#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

struct evp_mac_ctx_st;

namespace lockstep {

/// HMAC-SHA256, by OpenSSL, of so many bytes.
inline constexpr size_t kHmacBytes = 32;

/// It in pieces. One thread at a time.
class Hmac {
 public:
  /// Throws Error where OpenSSL refuses it.
  explicit Hmac(const std::string& key);
  void add(const void* data, size_t size);
  void add_number(int64_t number) { add(&number, sizeof(number)); }
  /// Ends its use.
  std::string finish();

 private:
  std::unique_ptr<evp_mac_ctx_st, void (*)(evp_mac_ctx_st*)> context_;  ///< Of OpenSSL.
};

std::string hmac_sha256(const std::string& key, std::string_view text);

/// Takes as long for any two codes of the same length, so that none can be guessed piece by piece.
bool same_code(std::string_view one, std::string_view other);

}  // namespace lockstep
