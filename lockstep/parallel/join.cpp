#include "lockstep/parallel/join.h"

#include <ATen/ops/full.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

/// One number, where the group communicates.
at::Tensor number(const ProcessGroup& group, double value) {
  const auto device = group.native().getBoundDeviceId().value_or(c10::Device(c10::kCPU));
  return at::full({1}, value, at::dtype(at::kFloat).device(device));
}

/// How many ranks have told 1.
int count_of(const ProcessGroup& group, double mine) {
  at::Tensor count = number(group, mine);
  group.all_reduce(count);
  return static_cast<int>(count.item<double>());
}

std::string who(const ProcessGroup& group) {
  return "Join, rank " + std::to_string(group.rank()) + ": ";
}

constexpr const char* kHint =
    "give every rank as many batches, or leave JoinOptions::throw_on_early_termination false";

}  // namespace

int ActiveRanks::wait() {
  work_.wait();
  return static_cast<int>(count_.item<double>());
}

Join::Join(std::vector<std::reference_wrapper<Joinable>> joinables, const JoinOptions& options)
    : joinables_(std::move(joinables)), options_(options) {
  if (joinables_.empty()) throw UsageError("Join: there is nothing to join");
  const ProcessGroup& group = joinables_.front().get().join_process_group();
  for (Joinable& joinable : joinables_) {
    if (joinable.join_process_group() != group)
      throw UsageError("Join: what is joined has different process groups");
    hooks_.push_back(joinable.join_hook(options_));
  }
  if (!options_.enable) return;
  for (Joinable& joinable : joinables_) joinable.join_ = this;
}

Join::~Join() {
  for (Joinable& joinable : joinables_) joinable.join_ = nullptr;
}

void Join::run(const std::function<void()>& inputs) {
  inputs();
  if (!options_.enable) return;
  const ProcessGroup& group = joinables_.front().get().join_process_group();
  bool is_last_joiner = true;
  while (count_of(group, 0) > 0) {
    if (options_.throw_on_early_termination) {
      count_of(group, 1);
      throw MismatchError(who(group) + "this rank has no inputs left, but others have", kHint);
    }
    for (const auto& hook : hooks_) hook->main_hook();
    is_last_joiner = false;
  }
  for (const auto& hook : hooks_) hook->post_hook(is_last_joiner);
}

std::optional<ActiveRanks> Join::notify_join_context(Joinable& joinable) {
  const Join* const join = joinable.join_;
  if (!join || &joinable != &join->joinables_.front().get()) return std::nullopt;
  const ProcessGroup& group = joinable.join_process_group();
  at::Tensor ones = number(group, 1);
  Work work = group.all_reduce_async(ones);
  if (join->options_.throw_on_early_termination && count_of(group, 0) > 0)
    throw MismatchError(who(group) + "another rank has no inputs left", kHint);
  return ActiveRanks(std::move(work), std::move(ones));
}

}  // namespace lockstep
