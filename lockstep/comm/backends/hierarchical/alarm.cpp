#include "lockstep/comm/backends/hierarchical/alarm.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace lockstep::hierarchical {
namespace {

constexpr const char* kKey = "cause";
/// The store answers at once or is lost.
constexpr std::chrono::seconds kPatience{3};

c10::intrusive_ptr<c10d::Store> own_connection(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  const auto bottom = prefixed ? prefixed->getUnderlyingNonPrefixStore() : store;
  if (!dynamic_cast<c10d::TCPStore*>(bottom.get())) return store;
  auto own = store->clone();
  own->setTimeout(kPatience);
  return own;
}

std::string encode(const Cause& cause) {
  return (cause.timed_out ? "T" : "L") + cause.text;
}
Cause decode(const std::string& word) {
  return {word[0] == 'T', word.substr(1)};
}

}  // namespace

Alarm::Alarm(const c10::intrusive_ptr<c10d::Store>& store) : store_(own_connection(store)) {}
Alarm::~Alarm() = default;

Cause Alarm::raise(const Cause& cause) noexcept {
  const std::lock_guard lock(mutex_);
  if (known_) return *known_;
  known_ = cause;
  try {
    // The add makes one rank the first on every kind of store.
    if (store_->add("told", 1) == 1) {
      store_->set(kKey, encode(cause));
    } else {
      known_ = decode(store_->get_to_str(kKey));
    }
  } catch (const std::exception&) {
  }
  return *known_;
}

std::optional<Cause> Alarm::heard() noexcept {
  const std::lock_guard lock(mutex_);
  if (known_) return known_;
  try {
    if (store_->check({kKey})) known_ = decode(store_->get_to_str(kKey));
  } catch (const std::exception&) {
  }
  return known_;
}

}  // namespace lockstep::hierarchical
