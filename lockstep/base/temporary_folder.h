#pragma once

#include <filesystem>
#include <system_error>

namespace lockstep {

/// Where temporary files go: TMPDIR, and /tmp where that is unset or no folder, as in Python.
inline std::filesystem::path temporary_folder() {
  std::error_code unusable;
  const auto folder = std::filesystem::temp_directory_path(unusable);
  return unusable ? std::filesystem::path("/tmp") : folder;
}

}  // namespace lockstep
