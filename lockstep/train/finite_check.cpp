#include "lockstep/train/finite_check.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/base/call_origin.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/train/all_finite.h"

namespace lockstep {
using nlohmann::json;
namespace {

/// Enough to see where it begins; a run that goes on like that must not flood its log.
constexpr int64_t kSkipsTold = 3;

constexpr const char* kRemedies = "lower --lr, clip with --gradient-clip-val, or look at the data";

/// "nan", "inf" or "-inf": the sign of a NaN says nothing.
std::string text_of(double value) {
  if (std::isnan(value)) return "nan";
  return value < 0 ? "-inf" : "inf";
}

}  // namespace

bool FiniteCheck::loss_is_good(double loss) {
  if (policy_ == OnNan::proceed || std::isfinite(loss)) return true;
  if (!bad_loss_) bad_loss_ = loss;
  return false;
}

bool FiniteCheck::is_good_everywhere(bool good_here) const {
  if (group_.size() == 1) return good_here;
  at::Tensor bad = at::full({1}, good_here ? 0.0 : 1.0, at::device(device_).dtype(at::kFloat));
  const CallOrigin origin("check of the loss", "Trainer");
  group_.all_reduce(bad, ReduceOp::max);
  return bad.item<float>() == 0;
}

std::vector<json> FiniteCheck::bad_losses() const {
  const json mine = bad_loss_ ? json(text_of(*bad_loss_)) : json();
  if (group_.size() == 1) return {mine};
  return group_.all_gather_object(mine);
}

std::string FiniteCheck::explain(int64_t step, int64_t epoch) const {
  const auto losses = bad_losses();
  std::vector<std::string> bad;
  for (size_t rank = 0; rank < losses.size(); ++rank) {
    if (losses[rank].is_string()) {
      bad.push_back(losses[rank].get<std::string>() + " on rank " + std::to_string(rank));
    }
  }
  const std::string where =
      " at step " + std::to_string(step) + " (epoch " + std::to_string(epoch + 1) + ")";
  if (bad.empty()) return "a gradient is NaN or infinite" + where + "; the losses are finite";
  return "the loss is " + join(bad, ", ") + where;
}

bool FiniteCheck::step_is_good(const Found& found, int64_t step, int64_t epoch) {
  if (policy_ == OnNan::proceed) return true;
  if (found.overflowed.value_or(false)) {
    const auto losses = bad_losses();
    const auto is_finite = [](const json& loss) { return loss.is_null(); };
    if (std::all_of(losses.begin(), losses.end(), is_finite)) return true;
  }
  const bool finite = found.overflowed ? !*found.overflowed : all_finite(found.gradients);
  const bool reduced = found.sharded && !found.overflowed;
  if (reduced ? is_good_everywhere(finite && !bad_loss_) : finite) {
    if (!bad_loss_) return true;
    // The loss reaches no gradient, so the other ranks cannot know: this one must leave, and they
    // notice that.
    throw NumericError("the loss is " + text_of(*bad_loss_) + " on rank " +
                           std::to_string(group_.rank()) + " at step " + std::to_string(step),
                       kRemedies);
  }
  if (policy_ == OnNan::stop) {
    throw NumericError(
        explain(step, epoch),
        std::string(kRemedies) +
            "; --on-nan skip goes on without such steps, --on-nan proceed with them");
  }
  ++skipped_;
  ++skipped_in_epoch_;
  // All ranks have skipped as many, so that all of them explain or none does.
  if (skipped_ <= kSkipsTold) {
    std::string what = explain(step, epoch) + "; the step is skipped on all ranks";
    if (skipped_ == kSkipsTold) what += "; further ones are counted at the end of each epoch";
    if (group_.rank() == 0) log_warning(what);
  }
  bad_loss_.reset();
  return false;
}

void FiniteCheck::end_epoch(int64_t epoch, int64_t steps, bool from_its_start) {
  const int64_t skipped = std::exchange(skipped_in_epoch_, 0);
  if (skipped == 0) return;
  const std::string where = "epoch " + std::to_string(epoch + 1);
  if (skipped == steps && from_its_start) {
    throw NumericError("every step of " + where + " was skipped (" + with_thousands(steps) +
                           "): each loss or gradient is NaN or infinite",
                       kRemedies);
  }
  if (skipped_ > kSkipsTold && group_.rank() == 0) {
    log_warning(where + ": " + with_thousands(skipped) + " of " + counted(steps, "step") +
                " skipped");
  }
}

}  // namespace lockstep
