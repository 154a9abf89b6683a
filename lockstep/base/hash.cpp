#include "lockstep/base/hash.h"

#include <openssl/evp.h>
#define XXH_INLINE_ALL  // Its header has all; the program needs no library.
#include <xxhash.h>

#include <cstring>
#include <new>

#include "lockstep/base/error.h"

namespace lockstep {

struct Hasher::Context {
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> openssl{nullptr, EVP_MD_CTX_free};
  std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> xxh3{nullptr, XXH3_freeState};
};

Hasher::Hasher(Algorithm algorithm) : context_(std::make_unique<Context>()) {
  if (algorithm == Algorithm::xxh128) {
    context_->xxh3.reset(XXH3_createState());
    if (!context_->xxh3) throw std::bad_alloc();
    XXH3_128bits_reset(context_->xxh3.get());
    return;
  }
  context_->openssl.reset(EVP_MD_CTX_new());
  const EVP_MD* kind = algorithm == Algorithm::md5 ? EVP_md5() : EVP_sha256();
  if (EVP_DigestInit_ex(context_->openssl.get(), kind, nullptr) != 1) {
    throw Error("OpenSSL refuses this digest (a FIPS policy forbids MD5, for one)");
  }
}

Hasher::~Hasher() = default;

void Hasher::update(const void* data, size_t size) {
  if (context_->xxh3) {
    XXH3_128bits_update(context_->xxh3.get(), data, size);
  } else {
    EVP_DigestUpdate(context_->openssl.get(), data, size);
  }
}

std::string Hasher::finish() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = sizeof(XXH128_canonical_t);
  if (context_->xxh3) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(context_->xxh3.get()));
    std::memcpy(digest, canonical.digest, size);
  } else {
    EVP_DigestFinal_ex(context_->openssl.get(), digest, &size);
  }
  std::string hex;
  for (unsigned int i = 0; i < size; ++i) {
    hex += "0123456789abcdef"[digest[i] >> 4];
    hex += "0123456789abcdef"[digest[i] & 15];
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
