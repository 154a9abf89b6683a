#include "lockstep/base/hash.h"

#include <openssl/evp.h>

#include "lockstep/base/error.h"

namespace lockstep {

struct Hasher::Context {
  EVP_MD_CTX* handle = EVP_MD_CTX_new();
  ~Context() { EVP_MD_CTX_free(handle); }
};

Hasher::Hasher(Algorithm algorithm) : context_(std::make_unique<Context>()) {
  const EVP_MD* kind = algorithm == Algorithm::md5 ? EVP_md5() : EVP_sha256();
  if (EVP_DigestInit_ex(context_->handle, kind, nullptr) != 1) {
    throw Error("OpenSSL refuses this digest (a FIPS policy forbids MD5, for one)");
  }
}

Hasher::~Hasher() = default;

void Hasher::update(const void* data, size_t size) {
  EVP_DigestUpdate(context_->handle, data, size);
}

std::string Hasher::finish() {
  static constexpr char kDigits[] = "0123456789abcdef";
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  EVP_DigestFinal_ex(context_->handle, digest, &size);
  std::string hex;
  for (unsigned int i = 0; i < size; ++i) {
    hex += kDigits[digest[i] >> 4];
    hex += kDigits[digest[i] & 15];
  }
  return hex;
}

std::string md5_hex(std::string_view bytes) {
  Hasher hasher(Hasher::Algorithm::md5);
  hasher.update(bytes.data(), bytes.size());
  return hasher.finish();
}

std::string sha256_hex(std::string_view bytes) {
  Hasher hasher(Hasher::Algorithm::sha256);
  hasher.update(bytes.data(), bytes.size());
  return hasher.finish();
}

}  // namespace lockstep
