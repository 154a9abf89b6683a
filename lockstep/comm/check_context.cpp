#include "lockstep/comm/check_context.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/base/text.h"
#include "lockstep/comm/process_identity.h"
#include "lockstep/comm/socket.h"

namespace lockstep {

std::string announcement_key(int rank) {
  return "here/" + std::to_string(rank);
}
std::string check_prefix(const std::string& group) {
  return "lockstep_checks/" + group;
}

namespace {

/// The port of a TCP store, 0 for another kind.
uint16_t port_of(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  const auto bottom = prefixed ? prefixed->getUnderlyingNonPrefixStore() : store;
  const auto* tcp = dynamic_cast<c10d::TCPStore*>(bottom.get());
  return tcp ? tcp->getPort() : 0;
}

c10::intrusive_ptr<c10d::Store> own_connection(const c10::intrusive_ptr<c10d::Store>& store,
                                               std::chrono::milliseconds timeout) {
  auto own = store->clone();
  limit_silence(port_of(store), timeout);
  return own;
}

RankNames names_or_numbers(RankNames names, int size) {
  for (int rank = static_cast<int>(names.size()); rank < size; ++rank) names.push_back(rank);
  return names;
}

}  // namespace

CheckContext::CheckContext(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                           RankNames names, std::string group, std::chrono::milliseconds timeout)
    : shared_store_(std::move(store)),
      over_tcp_(port_of(shared_store_) != 0),
      rank_(rank),
      size_(size),
      names_(names_or_numbers(std::move(names), size)),
      group_(std::move(group)),
      timeout_ms_(timeout.count()),
      identities_(static_cast<size_t>(size)) {}

CheckContext::~CheckContext() = default;

c10d::Store& CheckContext::store() {
  std::lock_guard lock(mutex_);
  if (!store_) {
    auto own = over_tcp_ ? own_connection(shared_store_, timeout()) : shared_store_;
    store_ = c10::make_intrusive<c10d::PrefixStore>(check_prefix(group_), std::move(own));
  }
  return *store_;
}

int64_t CheckContext::read_number(const std::string& key) {
  auto& numbers = store();
  if (over_tcp_) return numbers.add(key, 0);
  // The look for the key makes a file store read what is new; its get answers from memory.
  return numbers.check({key}) ? parse_int(numbers.get_to_str(key)).value_or(0) : 0;
}

std::vector<int> CheckContext::others() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_) ranks.push_back(rank);
  return ranks;
}

bool CheckContext::all_announced() {
  std::vector<std::string> keys;
  for (int rank : others()) keys.push_back(announcement_key(rank));
  return store().check(keys);
}

namespace {
std::string failed_key(int rank) {
  return "failed/" + std::to_string(rank);
}
constexpr size_t kLongestWord = 400;
}  // namespace

void CheckContext::tell_failed(const std::string& text, bool known) noexcept {
  {
    const std::lock_guard lock(mutex_);
    told_ = text.substr(0, std::min(text.find('\n'), kLongestWord));
  }
  try {
    store().set(failed_key(rank_),
                (known ? "!" : "?") + text.substr(0, std::min(text.find('\n'), kLongestWord)));
  } catch (const std::exception&) {  // The store is lost, which is told by whoever asks it.
  }
}

std::string CheckContext::told() const {
  const std::lock_guard lock(mutex_);
  return told_;
}

std::optional<CheckContext::Word> CheckContext::word_of(int rank) {
  if (!store().check({failed_key(rank)})) return std::nullopt;
  const std::string word = store().get_to_str(failed_key(rank));
  return Word{word.substr(1), word[0] == '!'};
}

std::vector<int> CheckContext::unannounced() {
  std::vector<int> missing;
  for (int rank : others())
    if (!store().check({announcement_key(rank)})) missing.push_back(rank);
  return missing;
}

void CheckContext::remember_identities() {
  std::vector<std::string> keys;
  for (int rank : others()) keys.push_back(announcement_key(rank));
  auto& announcements = store();
  std::vector<std::vector<uint8_t>> values;
  if (announcements.hasExtendedApi()) {
    values = announcements.multiGet(keys);
  } else {
    for (const auto& key : keys) values.push_back(announcements.get(key));
  }
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < values.size(); ++i)
    identities_[static_cast<size_t>(others()[i])].assign(values[i].begin(), values[i].end());
}

std::string CheckContext::identity_of(int rank) {
  auto& known = identities_[static_cast<size_t>(rank)];
  auto& keys = store();
  std::lock_guard lock(mutex_);
  if (known.empty() && keys.check({announcement_key(rank)}))
    known = keys.get_to_str(announcement_key(rank));
  return known;
}

std::vector<int> CheckContext::ended(const std::vector<int>& ranks) {
  std::vector<int> result;
  for (int rank : ranks) {
    std::string identity;
    try {
      identity = identity_of(rank);
    } catch (const std::exception&) {
      std::lock_guard lock(mutex_);
      identity = identities_[static_cast<size_t>(rank)];
    }
    if (process_state(identity) == ProcessState::ended) result.push_back(rank);
  }
  return result;
}

std::string CheckContext::name_with_process(int group_rank) {
  std::string identity;
  {
    std::lock_guard lock(mutex_);
    identity = identities_[static_cast<size_t>(group_rank)];
  }
  const int process = process_number(identity);
  const std::string name = rank_list({group_rank}, names_);
  return process > 0 ? name + " (process " + std::to_string(process) + ")" : name;
}

std::string CheckContext::how_they_ended(const std::vector<int>& ranks) {
  std::vector<std::string> names, words;
  for (int rank : ranks) {
    names.push_back(name_with_process(rank));
    try {
      if (const auto word = word_of(rank))
        words.push_back("; " + rank_list({rank}, names_) + " failed in " + word->text);
    } catch (const std::exception&) {  // The store is lost: that they ended is known all the same.
    }
  }
  return join(names, ", ") + (ranks.size() == 1 ? " has ended" : " have ended") + join(words, "");
}

}  // namespace lockstep
