#include "tests/fuzz/deviations.h"

#include <signal.h>
#include <unistd.h>

#include <ATen/ATen.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <utility>

namespace lockstep::fuzz {
namespace {

// Each returns false where it changes nothing.

bool change_dtype(Carrier carrier, Step& step, KeyedRandom& random) {
  std::vector<at::ScalarType> others;
  for (const auto dtype : dtypes_of(carrier, step.kind))
    if (dtype != step.dtype &&
        (!reduces(step.kind) || has_reduction(carrier, dtype, step.reduction)))
      others.push_back(dtype);
  if (others.empty()) return false;
  step.dtype = any_of(others, random);
  return true;
}

bool change_reduction(Carrier carrier, Step& step, KeyedRandom& random) {
  std::vector<ReduceOp> others;
  for (const auto reduction : reductions())
    if (reduction != step.reduction && has_reduction(carrier, step.dtype, reduction))
      others.push_back(reduction);
  if (others.empty()) return false;
  step.reduction = any_of(others, random);
  return true;
}

bool change_size(Step& step, KeyedRandom& random) {
  const auto more = static_cast<int64_t>(1 + random.below(random.below(2) == 0 ? 3 : 5000));
  // The parts of these come of `extra`.
  if (step.kind == Kind::all_to_all || step.kind == Kind::all_to_all_single) {
    step.extra = 1 + more % 3;
    return c10::multiply_integers(step.shape.empty() ? at::IntArrayRef{}
                                                     : at::IntArrayRef(step.shape).slice(1)) > 0;
  }
  if (!is_collective(step.kind) && step.kind != Kind::symmetric) {
    step.extra = more;
    return true;
  }
  step.shape = {c10::multiply_integers(step.shape) + more};
  return true;
}

/// As many elements in another shape.
bool change_shape(Step& step) {
  if (!is_collective(step.kind) || step.kind == Kind::all_to_all ||
      step.kind == Kind::all_to_all_single)
    return false;
  step.shape.push_back(1);
  return true;
}

bool change_operation(const Job& job, Carrier carrier, Step& step, KeyedRandom& random, int size) {
  if (!is_collective(step.kind)) return false;
  for (int tries = 0; tries < 100; ++tries) {
    Step other = make_step(job, carrier, size, random.next(), 0);
    if (!is_collective(other.kind) || other.kind == step.kind) continue;
    step = other;
    return true;
  }
  return false;
}

/// Whether the call's absence shows: the rank's next one is compared with it, and is another.
bool is_missed(const Job& job, const std::vector<std::vector<int>>& groups, const Ending& ending) {
  const auto planned = make_block(job, groups, ending.block).steps[ending.step];
  if (planned.group != 0) return false;
  const Step step = make_step(job, carrier_of(job, groups[0]), job.size(), planned.key, 0);
  return is_collective(step.kind) && step.kind != Kind::barrier &&
         c10::multiply_integers(step.shape) > 1;
}

}  // namespace

std::optional<Step> deviated(const Job& job, Carrier carrier, const Step& step, int size) {
  // Not compared, by their contract or by what they do:
  // - objects: their sizes may differ, and what is no object is not told apart from one,
  // - monitored_barrier: it is of the store, and not of the group's calls,
  // - a new group: who does not form it comes too late, see Ending,
  // - receives from any rank, but over shm.
  if (step.kind == Kind::objects || step.kind == Kind::monitored_barrier ||
      step.kind == Kind::form_group || (step.kind == Kind::collect_any && carrier != Carrier::shm))
    return std::nullopt;
  const bool tensors = step.kind != Kind::barrier;
  KeyedRandom random(step.key, 11);
  for (int tries = 0; tries < 20; ++tries) {
    Step other = step;
    bool changed = false;
    switch (random.below(6)) {
      case 0:
        changed = tensors && change_dtype(carrier, other, random);
        break;
      case 1:
        changed = tensors && change_size(other, random);
        break;
      case 2:
        changed = tensors && change_shape(other);
        break;
      case 3:
        changed = reduces(step.kind) && change_reduction(carrier, other, random);
        break;
      case 4:
        changed = has_root(step.kind);
        other.root =
            (step.root + 1 + static_cast<int>(random.below(static_cast<uint64_t>(size) - 1))) %
            size;
        break;
      default:
        changed = change_operation(job, carrier, other, random, size);
    }
    if (changed) return other;
  }
  return std::nullopt;
}

Ending make_ending(const Job& job, const std::vector<std::vector<int>>& groups) {
  KeyedRandom random(job.seed, 3, 3);
  Ending ending;
  if (job.ending.empty()) return ending;
  ending.rank = static_cast<int>(random.below(static_cast<uint64_t>(job.size())));
  // While the first calls of the groups are compared, or later.
  ending.block = static_cast<int64_t>(random.below(random.below(2) == 0 ? 4 : 40));
  ending.step = random.below(make_block(job, groups, ending.block).steps.size());
  ending.moment = static_cast<Ending::Moment>(random.below(3));
  ending.microseconds = static_cast<int>(random.below(random.below(2) == 0 ? 200 : 5000));
  // These are things that the thread does which calls the groups.
  const bool by_caller = job.ending == "leave" || job.ending == "throw" || job.ending == "silence";
  if (by_caller && ending.moment == Ending::Moment::during) ending.moment = Ending::Moment::after;
  if (job.ending == "skip") {
    ending.moment = Ending::Moment::before;
    while (!is_missed(job, groups, ending)) {
      if (++ending.step < make_block(job, groups, ending.block).steps.size()) continue;
      ending.step = 0;
      ++ending.block;
    }
  }
  return ending;
}

void end_by(const std::string& how) {
  if (how == "leave" || how == "skip") return;
  if (how == "kill") ::kill(::getpid(), SIGKILL);
  if (how == "stop") ::kill(::getpid(), SIGSTOP);
  if (how == "exit") ::_exit(7);
  if (how == "throw") throw std::runtime_error("this rank was to throw");
  for (;;) ::pause();
}

EndingSoon::EndingSoon(std::string how, int microseconds)
    : thread_([how = std::move(how), microseconds] {
        // The random moment; nothing is waited for.
        std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
        end_by(how);
      }) {}

}  // namespace lockstep::fuzz
