#include "lockstep/comm/checks/check_context.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/checks/limited_tcp_store.h"
#include "lockstep/comm/checks/native_log.h"

namespace lockstep {

std::string announcement_key(int rank) {
  return "here/" + std::to_string(rank);
}
std::string check_prefix(const std::string& group) {
  return "lockstep_checks/" + group;
}

namespace {

constexpr size_t kLongestWord = 400;

/// On a machine with work for all its processors. It took up to 40 ms.
constexpr std::chrono::milliseconds kSeenAfterItsSockets{200};

std::string failed_key(int rank) {
  return "failed/" + std::to_string(rank);
}
std::string end_key(int rank) {
  return "end/" + std::to_string(rank);
}
constexpr const char* kEndsKey = "ends";  ///< How many have told theirs.
}  // namespace

CheckContext::CheckContext(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                           RankNames names, std::string group, std::chrono::milliseconds timeout)
    : over_tcp_(tcp_store_of(store) != nullptr),
      rank_(rank),
      size_(size),
      names_(names_or_numbers(std::move(names), size)),
      group_(std::move(group)),
      timeout_ms_(timeout.count()),
      store_(c10::make_intrusive<c10d::PrefixStore>(check_prefix(group_),
                                                    limited_store(store, timeout))),
      identities_(static_cast<size_t>(size)),
      ends_(static_cast<size_t>(size)) {}

CheckContext::~CheckContext() = default;

void CheckContext::tell(const std::string& key, const std::string& word, bool is_end) noexcept {
  const QuietNativeLog quiet;
  try {
    store_->set(key, word);
    if (is_end) store_->add(kEndsKey, 1);
  } catch (const std::exception&) {  // The store is lost, which is told by whoever asks it.
  }
}

int64_t CheckContext::read_number(const std::string& key) {
  const QuietNativeLog quiet;
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

void CheckContext::tell_failed(const std::string& text) noexcept {
  const std::string word = text.substr(0, std::min(text.find('\n'), kLongestWord));
  {
    const std::lock_guard lock(mutex_);
    told_ = word;
  }
  tell(failed_key(rank_), word);
}

std::string CheckContext::told() const {
  const std::lock_guard lock(mutex_);
  return told_;
}

std::optional<std::string> CheckContext::word_of(int rank) {
  const QuietNativeLog quiet;
  if (!store().check({failed_key(rank)})) return std::nullopt;
  return store().get_to_str(failed_key(rank));
}

void CheckContext::tell_end(Failure::Kind kind, int64_t steps) noexcept {
  const std::string failed = told();
  if (kind == Failure::Kind::closed && steps > 0 && failed.empty()) kind = Failure::Kind::left;
  Failure end = failure_of(rank_, kind);
  end.ranks[0].steps = steps;
  if (!failed.empty()) end.detail = "; it failed in " + failed;
  if (!has_told_end_.exchange(true)) tell(end_key(rank_), encode(end), true);
}

std::optional<Failure> CheckContext::known_end(int rank) {
  const std::lock_guard lock(mutex_);
  return ends_[static_cast<size_t>(rank)];
}

std::optional<Failure> CheckContext::told_end(int rank) {
  if (auto known = known_end(rank)) return known;
  const QuietNativeLog quiet;
  try {
    if (!store_->check({end_key(rank)})) return std::nullopt;
    auto end = decode_failure(store_->get_to_str(end_key(rank)));
    if (!end || end->ranks.empty()) return std::nullopt;
    end->ranks[0].process = member(rank, end->kind).process;
    const std::lock_guard lock(mutex_);
    return ends_[static_cast<size_t>(rank)] = std::move(end);
  } catch (const std::exception&) {  // The store is lost, which is told by whoever asks it.
    return std::nullopt;
  }
}

bool CheckContext::has_left_its_loop(int rank) {
  const auto end = told_end(rank);
  return end && end->kind == Failure::Kind::left;
}

std::vector<int> CheckContext::died() {
  // Asked while the store is there: it may end with that rank.
  for (const int rank : others())
    if (is_first(rank)) told_end(rank);
  std::vector<int> ranks = ended(others());
  std::erase_if(ranks, [this](int rank) {
    const auto end = told_end(rank);
    return end && end->kind != Failure::Kind::gave_up;
  });
  return ranks;
}

void CheckContext::remember_identities() {
  // Ranks of Python never announce themselves.
  if (size_ == 1 || !all_announced()) return;
  std::vector<std::string> keys;
  for (int rank : others()) keys.push_back(announcement_key(rank));
  std::vector<std::vector<uint8_t>> values;
  if (store_->hasExtendedApi()) {
    values = store_->multiGet(keys);
  } else {
    for (const auto& key : keys) values.push_back(store_->get(key));
  }
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < values.size(); ++i)
    identities_[static_cast<size_t>(others()[i])].assign(values[i].begin(), values[i].end());
}

std::string CheckContext::known_identity(int rank) const {
  const std::lock_guard lock(mutex_);
  return identities_[static_cast<size_t>(rank)];
}

std::string CheckContext::identity_of(int rank) {
  if (auto known = known_identity(rank); !known.empty()) return known;
  auto& keys = store();
  if (!keys.check({announcement_key(rank)})) return {};
  const std::string identity = keys.get_to_str(announcement_key(rank));
  const std::lock_guard lock(mutex_);
  return identities_[static_cast<size_t>(rank)] = identity;
}

std::vector<int> CheckContext::ended(const std::vector<int>& ranks) {
  const QuietNativeLog quiet;
  std::vector<int> result;
  for (int rank : ranks) {
    std::string identity;
    try {
      identity = identity_of(rank);
    } catch (const std::exception&) {
      identity = known_identity(rank);
    }
    if (process_state(identity) == ProcessState::ended) result.push_back(rank);
  }
  return result;
}

std::vector<int> CheckContext::gone() {
  const bool some_told = read_number(kEndsKey) > 0;
  std::vector<int> ranks = others();
  std::erase_if(ranks,
                [&](int rank) { return ended({rank}).empty() && !(some_told && told_end(rank)); });
  return ranks;
}

Failure::Rank CheckContext::member(int group_rank, Failure::Kind kind) const {
  return {.number = names_[static_cast<size_t>(group_rank)],
          .kind = kind,
          .process = process_number(known_identity(group_rank))};
}

Failure CheckContext::failure_of(int group_rank, Failure::Kind kind) const {
  return {.kind = kind, .ranks = {member(group_rank, kind)}};
}

void CheckContext::set_failure_callback(FailureCallback callback) {
  const std::lock_guard lock(checking_);
  failure_callback_ = std::move(callback);
}

std::optional<Failure> CheckContext::seen_failure() const {
  const std::lock_guard lock(checking_);
  return failure_callback_ ? failure_callback_() : std::nullopt;
}

Failure CheckContext::end_of(const std::vector<int>& ranks) {
  Failure lost, left;
  bool is_cause = false;  // Who told in what it failed may have done so because others left.
  for (int rank : ranks) {
    const auto told = told_end(rank);
    const bool has_left = told && told->kind == Failure::Kind::left;
    is_cause = is_cause || !told || (!has_left && told->detail.empty());
    if (has_left || (told && ended({rank}).empty())) {
      (has_left ? left : lost).add(*told);
      continue;
    }
    lost.add(failure_of(rank, Failure::Kind::ended));
    try {
      if (const auto word = word_of(rank))
        lost.detail += "; " + rank_list({rank}, names_) + " failed in " + *word;
    } catch (const std::exception&) {  // The store is lost: that they ended is known all the same.
    }
  }
  return left.ranks.empty() || is_cause ? lost : left;
}

std::exception_ptr CheckContext::store_lost(const std::string& what) {
  const std::string native = failure_text(std::current_exception());
  std::string text = what + " lost the store";
  if (over_tcp_) text += ", which rank 0 or the launcher holds";
  Failure failure{.kind = Failure::Kind::store_lost};
  if (const auto why = why_store_is_lost()) {
    text += ": " + describe(*why);
    failure.ranks = why->ranks;
    failure.cause = std::make_shared<const Failure>(*why);
  }
  if (told().empty()) tell_failed(text);
  return failure_error(me() + ": " + text + " [" + native + "]", failure);
}

std::optional<Failure> CheckContext::why_store_is_lost() {
  const auto state = [this](int rank) { return process_state(known_identity(rank)); };
  // A process that ends closes its connections before others see the end.
  if (over_tcp_ && !has_looked_for_holder_.exchange(true)) {
    const auto deadline = std::chrono::steady_clock::now() + kSeenAfterItsSockets;
    const auto holder_lives = [&] {
      return std::ranges::any_of(
          others(), [&](int rank) { return is_first(rank) && state(rank) == ProcessState::alive; });
    };
    for (PollPause pause; holder_lives() && std::chrono::steady_clock::now() < deadline;)
      pause.sleep();
  }
  auto failure = seen_failure();
  if (failure && failure->kind != Failure::Kind::gave_up) return failure;
  Failure ended;
  for (int rank : others())
    if (state(rank) == ProcessState::ended) ended.add(failure_of(rank, Failure::Kind::ended));
  return ended.ranks.empty() ? failure : ended;
}

}  // namespace lockstep
