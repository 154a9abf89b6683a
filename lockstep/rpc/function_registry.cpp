#include "lockstep/rpc/function_registry.h"

#include <map>
#include <mutex>
#include <shared_mutex>

#include "lockstep/base/error.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/words.h"

namespace lockstep::rpc::detail {
namespace {

/// The process's functions. They register themselves before main, so this belongs to the process.
struct Registry {
  std::shared_mutex mutex;
  std::map<std::string, Registered, std::less<>> functions;
};

Registry& registry() {
  static auto* const instance = new Registry;  // Threads may outlive static objects.
  return *instance;
}

}  // namespace

Signature make_signature(std::string name, std::string types) {
  if (name.empty()) throw UsageError("rpc: a function's name is empty");
  const int64_t hash = fnv1a(types);
  return {std::move(name), std::move(types), hash};
}

void register_function(const Signature& signature, Handler handler) {
  Registry& all = registry();
  const std::unique_lock lock(all.mutex);
  const auto [place, added] =
      all.functions.try_emplace(signature.name, Registered{signature, std::move(handler)});
  if (!added) {
    throw UsageError("rpc: the function '" + signature.name + "' is registered twice: " +
                     place->second.signature.types + " and " + signature.types);
  }
}

const Registered& registered(const std::string& name) {
  Registry& all = registry();
  const std::shared_lock lock(all.mutex);
  const auto found = all.functions.find(name);
  if (found != all.functions.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [known, entry] : all.functions) names.push_back(known);
  throw UsageError("rpc: no function '" + name + "' is registered on the worker",
                   did_you_mean(name, names));
}

}  // namespace lockstep::rpc::detail
