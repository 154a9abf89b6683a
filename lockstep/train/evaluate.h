#pragma once

#include <cstdint>
#include <functional>

#include "lockstep/comm/process_group.h"
#include "lockstep/train/batch_feed.h"
#include "lockstep/train/callback.h"
#include "lockstep/train/trained_part.h"

namespace lockstep {

/// Runs the module over the feed's share of a held-out part, in evaluation mode and without a
/// graph, and reduces what it notes over ranks. Every rank calls. The sampler's padding is left
/// out, so that each sample counts exactly once. The result is the same for any number of ranks but
/// for the rounding of the loss's sum. Rank 0's buffers (batch norm's statistics) are used on all
/// ranks, also those that belong to no part. The module and each module in it are left in the
/// mode that they were in. `limit_batches` of 0: all. `parts` are those of a training run. They may
/// be empty: then every rank has the whole module. With `logical_shards` the feed has this rank's
/// shards of so many, and the result has the same bits for any number of ranks.
///
/// `go_on` is called after each batch, equally often on all ranks. Where it gives false, which must
/// be so on all ranks alike, the evaluation ends there, and the metrics are of no sample.
Metrics evaluate(TrainingModuleBase& module, const detail::TrainedParts& parts,
                 detail::BatchFeed& feed, const ProcessGroup& group, int64_t limit_batches = 0,
                 const std::function<bool()>& go_on = {}, int64_t logical_shards = 0);

}  // namespace lockstep
