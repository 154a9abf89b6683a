#pragma once

#include <filesystem>

#include "lockstep/data/dataset.h"

namespace lockstep {

/// load_dataset's "text:PATH". See there.
DatasetSplits load_text(const std::filesystem::path& path, const DatasetOptions& options);

}  // namespace lockstep
