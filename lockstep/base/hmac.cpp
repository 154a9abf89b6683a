#include "lockstep/base/hmac.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/params.h>

#include "lockstep/base/error.h"

namespace lockstep {

Hmac::Hmac(const std::string& key) : context_(nullptr, EVP_MAC_CTX_free) {
  EVP_MAC* const mac = EVP_MAC_fetch(nullptr, "HMAC", nullptr);
  if (mac) context_.reset(EVP_MAC_CTX_new(mac));
  EVP_MAC_free(mac);  // The context keeps it.
  char digest[] = "SHA256";
  const OSSL_PARAM parameters[] = {OSSL_PARAM_construct_utf8_string("digest", digest, 0),
                                   OSSL_PARAM_construct_end()};
  if (!context_ ||
      EVP_MAC_init(context_.get(), reinterpret_cast<const unsigned char*>(key.data()), key.size(),
                   parameters) != 1) {
    throw Error("OpenSSL refuses HMAC-SHA256");
  }
}

void Hmac::add(const void* data, size_t size) {
  EVP_MAC_update(context_.get(), static_cast<const unsigned char*>(data), size);
}

std::string Hmac::finish() {
  std::string code(kHmacBytes, '\0');
  size_t size = 0;
  EVP_MAC_final(context_.get(), reinterpret_cast<unsigned char*>(code.data()), &size, code.size());
  return code;
}

std::string hmac_sha256(const std::string& key, std::string_view text) {
  Hmac hmac(key);
  hmac.add(text.data(), text.size());
  return hmac.finish();
}

bool same_code(std::string_view one, std::string_view other) {
  return one.size() == other.size() && CRYPTO_memcmp(one.data(), other.data(), one.size()) == 0;
}

}  // namespace lockstep
