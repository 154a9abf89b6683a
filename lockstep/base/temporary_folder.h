#pragma once

#include <filesystem>

namespace lockstep {

/// Where temporary files go: TMPDIR, and /tmp where that is unset, empty or, with a warning that
/// names it, no folder that one may write to.
std::filesystem::path temporary_folder();

}  // namespace lockstep
