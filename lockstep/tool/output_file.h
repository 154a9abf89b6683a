#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace lockstep::tool {

/// Throws Error when an AtomicFile of this name could not be written. Leaves nothing behind.
void check_can_be_made(const std::filesystem::path& path);

/// Checks before the work that the file which a flag names can be written after it. `example` is a
/// name for such a file, and `check` throws Error when one cannot be written. Throws UsageError
/// naming the flag. An empty `file` is none.
void check_output_file(
    const std::string& flag, const std::string& file, const std::string& example,
    const std::function<void(const std::filesystem::path&)>& check = check_can_be_made);

}  // namespace lockstep::tool
