#include "lockstep/rpc/reference_holders.h"

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/rref_context.h>

#include <string>

#include "lockstep/base/error.h"

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

}  // namespace

void ReferenceHolders::know(int worker) {
  const std::lock_guard lock(mutex_);
  known_.insert(worker);
}

void ReferenceHolders::check_known(int64_t worker) const {
  const std::lock_guard lock(mutex_);
  if (worker >= 0 && worker <= INT16_MAX && known_.count(static_cast<int>(worker)) > 0) return;
  throw DataError("rpc: a message that cannot be read: a reference of worker number " +
                  std::to_string(worker) + ", which there is not");
}

void ReferenceHolders::check_known(const std::vector<CarriedReference>& carried) const {
  for (const auto& c : carried) {
    for (const int64_t worker : {c.owner, c.reference_on, c.fork_on, c.parent}) check_known(worker);
  }
}

void ReferenceHolders::check_fork(const Id& reference, const Id& fork) const {
  check_known(reference.createdOn_);
  check_known(fork.createdOn_);
  const std::lock_guard lock(mutex_);
  const auto found = forks_.find(fork);
  if (found == forks_.end() || found->second.reference == reference) return;
  throw DataError("rpc: a message that cannot be read: a fork of two references");
}

void ReferenceHolders::add(int worker, const Id& reference, const Id& fork, bool owned) {
  if (worker == self_) return;
  bool gone = false;
  {
    const std::lock_guard lock(mutex_);
    forks_.erase(fork);
    forks_.emplace(fork, Held{worker, reference, owned});
    gone = gone_.count(worker) > 0;
  }
  if (gone) release(worker);
}

void ReferenceHolders::add(int worker, const std::vector<CarriedReference>& carried) {
  for (const auto& c : carried) {
    add(worker, id_of(c.reference_on, c.reference_id), id_of(c.fork_on, c.fork_id),
        c.owner == self_);
  }
}

void ReferenceHolders::take_back(const std::vector<CarriedReference>& carried) {
  for (const auto& c : carried) {
    const Id reference = id_of(c.reference_on, c.reference_id), fork = id_of(c.fork_on, c.fork_id);
    remove(reference, fork);
    forget_fork(reference, fork);
  }
}

void ReferenceHolders::accepted(const Id& fork) {
  const std::lock_guard lock(mutex_);
  const auto found = forks_.find(fork);
  if (found != forks_.end() && !found->second.owned) forks_.erase(found);
}

void ReferenceHolders::remove(const Id& reference, const Id& fork) {
  const std::lock_guard lock(mutex_);
  const auto found = forks_.find(fork);
  if (found != forks_.end() && found->second.reference == reference) forks_.erase(found);
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

int64_t ReferenceHolders::count() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(forks_.size());
}

}  // namespace lockstep::rpc::detail
