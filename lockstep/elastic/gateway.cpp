#include "lockstep/elastic/gateway.h"

#include <openssl/evp.h>

#include "lockstep/base/text.h"

namespace lockstep::elastic {

std::string to_base64(std::string_view bytes) {
  std::string text((bytes.size() + 2) / 3 * 4 + 1, '\0');  // OpenSSL adds a zero
  const int size =
      EVP_EncodeBlock(reinterpret_cast<unsigned char*>(text.data()),
                      reinterpret_cast<const unsigned char*>(bytes.data()), int(bytes.size()));
  text.resize(static_cast<size_t>(size));
  return text;
}

std::optional<std::string> from_base64(std::string_view text) {
  std::string bytes(text.size() / 4 * 3, '\0');
  const int size =
      EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                      reinterpret_cast<const unsigned char*>(text.data()), int(text.size()));
  if (size < 0) return std::nullopt;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  bytes.resize(static_cast<size_t>(size) - std::min(padding, static_cast<size_t>(size)));
  if (to_base64(bytes) != text) return std::nullopt;  // OpenSSL overlooks blanks
  return bytes;
}

Json parse_json(std::string_view text) {
  return Json::parse(text, nullptr, false);
}

const Json& field(const Json& object, const char* name) {
  static const Json none;
  if (!object.is_object()) return none;
  const auto found = object.find(name);
  return found == object.end() ? none : *found;
}

std::optional<int64_t> int_field(const Json& object, const char* name) {
  const Json& value = field(object, name);
  if (value.is_null()) return 0;
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_string()) return parse_int(value.get_ref<const std::string&>());
  return std::nullopt;
}

std::optional<std::string> bytes_field(const Json& object, const char* name) {
  const Json& value = field(object, name);
  if (value.is_null()) return "";
  if (!value.is_string()) return std::nullopt;
  return from_base64(value.get_ref<const std::string&>());
}

std::string prefix_end(std::string prefix) {
  while (!prefix.empty() && prefix.back() == '\xff') prefix.pop_back();
  if (prefix.empty()) return std::string(1, '\0');  // to the last key
  prefix.back() = static_cast<char>(prefix.back() + 1);
  return prefix;
}

Json json_of(const Record& record) {
  Json kv = {{"key", to_base64(record.key)}, {"mod_revision", std::to_string(record.revision)}};
  if (!record.value.empty()) kv["value"] = to_base64(record.value);
  if (record.lease != 0) kv["lease"] = std::to_string(record.lease);
  return kv;
}

std::optional<Record> record_of(const Json& kv) {
  auto key = bytes_field(kv, "key"), value = bytes_field(kv, "value");
  const auto revision = int_field(kv, "mod_revision"), lease = int_field(kv, "lease");
  if (!key || key->empty() || !value || !revision || !lease) return std::nullopt;
  return Record{std::move(*key), std::move(*value), *revision, *lease};
}

}  // namespace lockstep::elastic
