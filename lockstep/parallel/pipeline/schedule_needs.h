#pragma once

#include <optional>
#include <set>

#include "lockstep/parallel/pipeline/schedule.h"

namespace lockstep::detail {

/// The computation of the neighbouring stage that must be done first. Of backward it is "B", which
/// I stands for too.
std::optional<PipelineAction> needed_from_elsewhere(const PipelineSchedule& schedule,
                                                    const PipelineAction& action);
bool is_done(const std::set<PipelineAction>& done, const PipelineAction& need);

}  // namespace lockstep::detail
