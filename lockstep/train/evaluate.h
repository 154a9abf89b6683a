#pragma once

#include <c10/core/Device.h>
#include <c10/core/MemoryFormat.h>

#include <cstdint>
#include <functional>

#include "lockstep/comm/process_group.h"
#include "lockstep/train/train_task.h"
#include "lockstep/train/training_results.h"

namespace lockstep {

/// Runs the model over the loader's share of a held-out part, in evaluation mode and without a
/// graph, and reduces over ranks. Every rank calls. The sampler's padding is left out, so that each
/// sample counts exactly once. The result is the same for any number of ranks but for the rounding
/// of the loss's sum. Rank 0's buffers (batch norm's statistics) are used on all ranks. The model
/// is left in the mode that it was in. `limit_batches` of 0: all.
/// `memory_format` is the model's.
///
/// `go_on` is called after each batch, equally often on all ranks. Where it gives false, which must
/// be so on all ranks alike, the evaluation ends there, and the metrics are of no sample.
Metrics evaluate(Model& model, LossKind loss, DataLoader& loader, const ProcessGroup& group,
                 c10::Device device, int64_t limit_batches = 0,
                 at::MemoryFormat memory_format = at::MemoryFormat::Contiguous,
                 const std::function<bool()>& go_on = {});

}  // namespace lockstep
