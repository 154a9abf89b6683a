#include "lockstep/rpc/reference_holders.h"

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/rref_context.h>

#include <cstring>
#include <optional>
#include <string_view>

namespace lockstep::rpc::detail {
namespace {

namespace native = torch::distributed::rpc;
using Id = ReferenceHolders::Id;

/// LibTorch's: the worker stands in the upper bits of a context's number.
constexpr int kContextBits = 48;

template <class F>
void quietly(const F& work) noexcept {
  try {
    work();
  } catch (const std::exception&) {  // It was gone already, or this worker leaves.
  }
}

Id id_of(int64_t worker, int64_t number) {
  return {static_cast<native::worker_id_t>(worker), number};
}

/// Of what the other one had not yet said that it has, and of what it had.
void forget_fork(const Id& reference, const Id& fork) {
  quietly([&] {
    auto& all = native::RRefContext::getInstance();
    all.delPendingChild(fork);
    all.delForkOfOwner(reference, fork);
  });
}

/// Walks over a pickle of protocol 2 as LibTorch's Pickler writes it. A reference is the global
/// `rref`, or the place of the memo that has it, and a tuple: six whole numbers and a type.
class ReferenceReader {
 public:
  explicit ReferenceReader(std::string_view pickle) : rest_(pickle.substr(kHeadBytes)) {}

  std::vector<CarriedReference> run() {
    for (uint8_t code = number<uint8_t>(); code != '.'; code = number<uint8_t>()) step(code);
    return std::move(found_);
  }

 private:
  static constexpr size_t kHeadBytes = 2;
  static constexpr std::string_view kMaker = "torch.distributed.rpc\nrref\n";

  void step(uint8_t code) {
    switch (code) {
      case 'K':
        return whole(number<uint8_t>());
      case 'M':
        return whole(number<uint16_t>());
      case 'J':
        return whole(number<int32_t>());
      case 0x8a:
        rest_.remove_prefix(1);  // Its size: 8.
        return whole(number<int64_t>());
      case 'G':
        return rest_.remove_prefix(sizeof(double));
      case 'X':
        return rest_.remove_prefix(number<uint32_t>());
      case 'c':
        return global();
      case 'q':
        return put(number<uint8_t>());
      case 'r':
        return put(number<uint32_t>());
      case 'h':
        return get(number<uint8_t>());
      case 'j':
        return get(number<uint32_t>());
      case 'R':
        return reduce();
      default:
        return;  // It has no operand.
    }
  }

  template <class T>
  T number() {
    T value;
    std::memcpy(&value, rest_.data(), sizeof(T));
    rest_.remove_prefix(sizeof(T));
    return value;
  }
  void whole(int64_t number) {
    if (in_reference_) numbers_.push_back(number);
  }
  void global() {
    is_maker_ = rest_.starts_with(kMaker);
    if (is_maker_) begin_reference();
    for (int line = 0; line < 2; ++line) rest_.remove_prefix(rest_.find('\n') + 1);
  }
  void put(size_t place) {
    if (std::exchange(is_maker_, false)) maker_place_ = place;
  }
  void get(size_t place) {
    if (place == maker_place_) begin_reference();
  }
  void begin_reference() {
    in_reference_ = true;
    numbers_.clear();
  }
  void reduce() {
    if (!std::exchange(in_reference_, false)) return;
    found_.push_back({numbers_.at(0), id_of(numbers_.at(1), numbers_.at(2)),
                      id_of(numbers_.at(3), numbers_.at(4))});
  }

  std::string_view rest_;
  std::vector<int64_t> numbers_;
  std::optional<size_t> maker_place_;
  bool is_maker_ = false, in_reference_ = false;
  std::vector<CarriedReference> found_;
};

}  // namespace

std::vector<CarriedReference> references_in(const native::Message& message) {
  const std::string_view payload(message.payload().data(), message.payload().size());
  // In an autograd context the pickle comes first as well. Others have none, or a text.
  if (!payload.starts_with('\x80')) return {};
  return ReferenceReader(payload).run();
}

void ReferenceHolders::add(int worker, const Id& reference, const Id& fork) {
  if (worker == self_) return;
  bool gone = false;
  {
    const std::lock_guard lock(mutex_);
    forks_.erase(fork);
    forks_.emplace(fork, Held{worker, reference});
    gone = gone_.count(worker) > 0;
  }
  if (gone) release(worker);
}

void ReferenceHolders::add(int worker, const std::vector<CarriedReference>& carried) {
  for (const auto& c : carried) {
    if (c.owner == self_) add(worker, c.reference, c.fork);
  }
}

void ReferenceHolders::take_back(const std::vector<CarriedReference>& carried) {
  for (const auto& c : carried) {
    remove(c.fork);
    forget_fork(c.reference, c.fork);
  }
}

void ReferenceHolders::remove(const Id& fork) {
  const std::lock_guard lock(mutex_);
  forks_.erase(fork);
}

void ReferenceHolders::add_context(int64_t context) {
  const std::lock_guard lock(mutex_);
  contexts_[static_cast<int>(context >> kContextBits)].insert(context);
}

void ReferenceHolders::remove_context(int64_t context) {
  const std::lock_guard lock(mutex_);
  const auto found = contexts_.find(static_cast<int>(context >> kContextBits));
  if (found != contexts_.end()) found->second.erase(context);
}

void ReferenceHolders::release(int worker) {
  std::vector<std::pair<Id, Id>> forks;  // Reference and fork.
  std::unordered_set<int64_t> contexts;
  {
    const std::lock_guard lock(mutex_);
    gone_.insert(worker);
    for (auto it = forks_.begin(); it != forks_.end();) {
      if (it->second.worker != worker) {
        ++it;
        continue;
      }
      forks.emplace_back(it->second.reference, it->first);
      it = forks_.erase(it);
    }
    contexts.swap(contexts_[worker]);
  }
  for (const auto& [reference, fork] : forks) forget_fork(reference, fork);
  for (const int64_t context : contexts) {
    quietly([&] {
      torch::distributed::autograd::DistAutogradContainer::getInstance().releaseContextIfPresent(
          context);
    });
  }
}

}  // namespace lockstep::rpc::detail
