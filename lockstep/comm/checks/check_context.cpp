#include "lockstep/comm/checks/check_context.h"

#include <unistd.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/base/socket.h"
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

/// How long the connection may take when it is made late: the store may be gone by then.
constexpr std::chrono::milliseconds kLateConnect{2'000};

constexpr size_t kLongestWord = 400;

/// On a machine with work for all its processors. It took up to 40 ms.
constexpr std::chrono::milliseconds kSeenAfterItsSockets{200};

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// What of a text is told.
std::string word_for(const std::string& text) {
  return text.substr(0, std::min(text.find('\n'), kLongestWord));
}

std::string failed_key(int rank) {
  return "failed/" + std::to_string(rank);
}
std::string left_key(int rank) {
  return "left/" + std::to_string(rank);
}
std::string closed_key(int rank) {
  return "closed/" + std::to_string(rank);
}
std::string given_up_key(int rank) {
  return "given_up/" + std::to_string(rank);
}
std::string gone_key(int rank) {
  return "gone/" + std::to_string(rank);
}

/// Sets a key for the other ranks. Without a connection, or where the store is lost, nobody is
/// told: the loss is told by whoever asks it.
void tell(const std::atomic<c10d::Store*>& connected, const std::string& key,
          const std::string& word) noexcept {
  auto* store = connected.load(std::memory_order_acquire);
  if (!store) return;
  const QuietNativeLog quiet;
  try {
    store->set(key, word);
  } catch (const std::exception&) {  // As said above.
  }
}

/// PrefixStore tells its prefix to its heirs only.
struct PrefixReader : c10d::PrefixStore {
  static const std::string& prefix(const c10d::PrefixStore& store) {
    return store.*(&PrefixReader::prefix_);
  }
};

/// The same keys as `store`'s over another connection.
StorePtr with_prefixes_of(const StorePtr& store, StorePtr bottom) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  if (!prefixed) return bottom;
  return c10::make_intrusive<c10d::PrefixStore>(
      PrefixReader::prefix(*prefixed),
      with_prefixes_of(prefixed->getUnderlyingStore(), std::move(bottom)));
}

/// As TCPStore::clone, which would take as long as any request to the store may, and logs every
/// attempt: so one looks first whether somebody is there.
StorePtr own_connection(const StorePtr& store, std::chrono::milliseconds patience,
                        std::chrono::milliseconds silence) {
  const c10d::TCPStore& shared = *tcp_store_of(store);
  try {
    wait_until_listening(shared.getHost(), shared.getPort(), patience);
  } catch (const CommError&) {
    C10_THROW_ERROR(DistNetworkError, failure_text(std::current_exception()));
  }
  c10d::TCPStoreOptions options;
  options.port = shared.getPort();
  options.waitWorkers = false;
  options.useLibUV = shared.isLibUvBackend();
  options.timeout = patience;
  auto own = LimitedTcpStore::make(shared.getHost(), options, silence);
  own->setTimeout(shared.getTimeout());
  return with_prefixes_of(store, std::move(own));
}

}  // namespace

const c10d::TCPStore* tcp_store_of(const StorePtr& store) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  const auto bottom = prefixed ? prefixed->getUnderlyingNonPrefixStore() : store;
  return dynamic_cast<const c10d::TCPStore*>(bottom.get());
}

CheckContext::CheckContext(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                           RankNames names, std::string group, std::chrono::milliseconds timeout)
    : shared_store_(std::move(store)),
      over_tcp_(tcp_store_of(shared_store_) != nullptr),
      rank_(rank),
      size_(size),
      names_(names_or_numbers(std::move(names), size)),
      group_(std::move(group)),
      timeout_ms_(timeout.count()),
      identities_(static_cast<size_t>(size)),
      closed_(static_cast<size_t>(size)) {}

CheckContext::~CheckContext() = default;

c10d::Store& CheckContext::store() {
  return connected(std::min(kLateConnect, timeout()));
}

void CheckContext::connect() {
  connected(timeout());
  // Ranks of Python never announce themselves.
  if (size_ > 1 && all_announced()) remember_identities();
}

c10d::Store& CheckContext::connected(std::chrono::milliseconds patience) {
  if (auto* store = connected_.load(std::memory_order_acquire)) return *store;
  const std::lock_guard lock(connecting_);
  if (lost_) std::rethrow_exception(lost_);
  if (!store_) {
    const QuietNativeLog quiet;
    try {
      auto own = over_tcp_ ? own_connection(shared_store_, patience, timeout()) : shared_store_;
      store_ = c10::make_intrusive<c10d::PrefixStore>(check_prefix(group_), std::move(own));
    } catch (...) {
      lost_ = std::current_exception();
      throw;
    }
    connected_.store(store_.get(), std::memory_order_release);
  }
  return *store_;
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

void CheckContext::tell_failed(const std::string& text, bool known) noexcept {
  const std::string word = word_for(text);
  {
    const std::lock_guard lock(mutex_);
    told_ = word;
    told_cause_ = known;
  }
  tell(connected_, failed_key(rank_), (known ? "!" : "?") + word);
}

std::string CheckContext::told() const {
  const std::lock_guard lock(mutex_);
  return told_;
}

std::optional<CheckContext::Word> CheckContext::word_of(int rank) {
  const QuietNativeLog quiet;
  if (!store().check({failed_key(rank)})) return std::nullopt;
  const std::string word = store().get_to_str(failed_key(rank));
  return Word{word.substr(1), word[0] == '!'};
}

void CheckContext::tell_left(int64_t steps) noexcept {
  if (steps < 1 || !told().empty()) return;
  tell(connected_, left_key(rank_), std::to_string(steps));
}

void CheckContext::tell_closed() noexcept {
  tell(connected_, closed_key(rank_), "");
}

void CheckContext::tell_given_up() noexcept {
  tell(connected_, given_up_key(rank_), told());
}

std::optional<Failure> CheckContext::how_it_left(int rank) {
  const QuietNativeLog quiet;
  try {
    auto& keys = store();
    if (keys.check({given_up_key(rank)})) {
      const std::string cause = keys.get_to_str(given_up_key(rank));
      Failure failure = failure_of(rank, Failure::Kind::gave_up);
      if (!cause.empty()) failure.detail = "; it failed in " + cause;
      return failure;
    }
    if (const auto steps = steps_when_left(rank)) {
      Failure failure = failure_of(rank, Failure::Kind::left);
      failure.ranks[0].steps = *steps;
      return failure;
    }
    if (keys.check({closed_key(rank)})) return failure_of(rank, Failure::Kind::closed);
  } catch (const std::exception&) {  // The store is lost, which is told by whoever asks it.
  }
  return std::nullopt;
}

std::vector<int> CheckContext::died() {
  const QuietNativeLog quiet;
  const auto closed = [this](int rank) {
    const auto number = static_cast<size_t>(rank);
    {
      const std::lock_guard lock(mutex_);
      if (closed_[number]) return true;
    }
    try {
      if (!store().check({closed_key(rank)})) return false;
    } catch (const std::exception&) {  // The store is lost, perhaps with that rank.
      return false;
    }
    const std::lock_guard lock(mutex_);
    closed_[number] = true;
    return true;
  };
  // While the store is there: it may end with that rank.
  for (const int rank : others())
    if (is_first(rank)) closed(rank);
  std::vector<int> ranks = ended(others());
  std::erase_if(ranks, closed);
  return ranks;
}

std::optional<int64_t> CheckContext::steps_when_left(int rank) {
  const QuietNativeLog quiet;
  if (!store().check({left_key(rank)})) return std::nullopt;
  return parse_int(store().get_to_str(left_key(rank)));
}

void CheckContext::tell_gone(int rank, const Failure& gone) noexcept {
  auto* store = connected_.load(std::memory_order_acquire);
  if (!store) return;
  const QuietNativeLog quiet;
  try {
    store->set(gone_key(rank), encode(gone));
    store->add("gone", 1);
  } catch (const std::exception&) {  // The store is lost, which is told by whoever asks it.
  }
}

std::optional<Failure> CheckContext::gone(int rank) {
  const QuietNativeLog quiet;
  if (!store().check({gone_key(rank)})) return std::nullopt;
  return decode_failure(store().get_to_str(gone_key(rank)));
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
  std::vector<int> result, unseen;
  for (int rank : ranks) {
    std::string identity;
    try {
      identity = identity_of(rank);
    } catch (const std::exception&) {
      identity = known_identity(rank);
    }
    const ProcessState state = process_state(identity);
    if (state == ProcessState::ended) result.push_back(rank);
    if (state == ProcessState::unknown) unseen.push_back(rank);
  }
  if (!expects_gone_ || unseen.empty()) return result;
  try {
    if (!any_gone()) return result;
    for (int rank : unseen) {
      const auto told = gone(rank);
      if (told && told->kind == Failure::Kind::ended) result.push_back(rank);
    }
  } catch (const std::exception&) {  // The store is lost, which is told by whoever asks it.
  }
  std::sort(result.begin(), result.end());
  return result;
}

std::string CheckContext::name_with_process(int group_rank) {
  return with_process(rank_list({group_rank}, names_), known_identity(group_rank));
}

Failure::Rank CheckContext::member(int group_rank, Failure::Kind kind) const {
  return {.number = names_[static_cast<size_t>(group_rank)],
          .kind = kind,
          .process = process_number(known_identity(group_rank))};
}

Failure CheckContext::failure_of(int group_rank, Failure::Kind kind) const {
  return {.kind = kind, .ranks = {member(group_rank, kind)}};
}

void CheckContext::set_failure_check(FailureCheck check) {
  const std::lock_guard lock(checking_);
  failure_check_ = std::move(check);
}

std::optional<Failure> CheckContext::seen_failure() const {
  const std::lock_guard lock(checking_);
  return failure_check_ ? failure_check_() : std::nullopt;
}

Failure CheckContext::end_of(const std::vector<int>& ranks) {
  Failure ended, left;
  for (int rank : ranks) {
    try {
      if (const auto steps = steps_when_left(rank)) {
        left.add(failure_of(rank, Failure::Kind::left));
        left.ranks.back().steps = *steps;
        continue;
      }
    } catch (const std::exception&) {  // As below.
    }
    ended.add(failure_of(rank, Failure::Kind::ended));
    try {
      if (const auto word = word_of(rank))
        ended.detail += "; " + rank_list({rank}, names_) + " failed in " + word->text;
    } catch (const std::exception&) {  // The store is lost: that they ended is known all the same.
    }
  }
  return ended.ranks.empty() ? left : ended;
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
  const bool has_told_cause = [this] {
    const std::lock_guard lock(mutex_);
    return told_cause_;
  }();
  if (!has_told_cause) tell_failed(text, /*known=*/true);
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

void throw_in_fork(const std::string& rank, const std::string& group) {
  throw CommError("process " + std::to_string(::getpid()) + " is a fork of " + rank +
                      ", to which group '" + group + "' belongs",
                  "call collectives in the process that made the group");
}

}  // namespace lockstep
