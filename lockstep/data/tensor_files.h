#pragma once

#include <filesystem>

#include "lockstep/data/dataset.h"

namespace lockstep {

/// load_dataset's "file:PATH": see there for the names that the tensors may have. `test_fraction`
/// of the rows, from the end and at least one, is held out when there is no test part.
DatasetSplits load_tensor_dataset(const std::filesystem::path& path, double test_fraction);

/// Throws UsageError unless it is between 0 and 1.
void check_test_fraction(double test_fraction);

}  // namespace lockstep
