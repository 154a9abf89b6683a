#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace lockstep::tool {

/// Checks before the work that the file which a flag names can be written after it. `example` is a
/// name for such a file, and `check` throws Error when one cannot be written; empty: AtomicFile's
/// own. Throws UsageError naming the flag. An empty `file` is none.
void check_output_file(const std::string& flag, const std::string& file, const std::string& example,
                       const std::function<void(const std::filesystem::path&)>& check = {});

}  // namespace lockstep::tool
