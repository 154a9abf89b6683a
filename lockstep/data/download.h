#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep {

/// The base URLs to fetch from, each ending in a slash: that of the environment's `variable`, else
/// `known`.
std::vector<std::string> mirrors(const std::string& variable,
                                 const std::vector<std::string>& known);

/// Fetches a file by HTTP or HTTPS from the first of `urls` that delivers one with this MD5. Puts
/// it at `target` only when it is complete, verified and flushed to the disk.
///
/// Progress goes to standard error: a percentage on a terminal, and a line at the end. There is
/// neither with --quiet. Blocks. Throws DataError naming each address and what was wrong there,
/// with the variable of another mirror, and SystemError for the local file.
void download(const std::vector<std::string>& urls, const std::filesystem::path& target,
              const std::string& md5, const DownloadOptions& options,
              const std::string& mirror_variable);

/// Makes the folder where it is missing, and fills it with `fill` unless it is `filled()`. One
/// process of this host does that, its first rank if that comes within 10 s, and the others wait
/// for it. Its lock (the file ".lockstep.lock") ends with it, however that ends. Throws
/// TimeoutError, SystemError (a read-only folder) and what `fill` throws.
void fill_folder(const std::filesystem::path& folder, const std::function<bool()>& filled,
                 const std::function<void()>& fill,
                 std::chrono::milliseconds timeout = std::chrono::minutes(10));

}  // namespace lockstep
