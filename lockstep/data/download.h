#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep {

/// Throws DataError when a downloaded file is not what was wanted (its checksum is another).
using VerifyFile = std::function<void(const std::filesystem::path&)>;

/// The base URLs to fetch from, each ending in a slash: `chosen` alone, else that of the
/// environment's `variable`, else `known`.
std::vector<std::string> mirrors(std::string chosen, const std::string& variable,
                                 const std::vector<std::string>& known);

/// Fetches a file by HTTP or HTTPS from the first of `urls` that delivers it. Puts it at `target`
/// only when it is complete, verified and flushed to the disk.
///
/// What has arrived stays beside the target as "TARGET.part", also when this fails or the process
/// is killed, and the next try resumes there. A part that turns out wrong is fetched again from its
/// start once. Progress goes to standard error: a bar on a terminal, else a line at the end. There
/// is neither with --quiet. Call it from one process at a time for a target (see FolderLock).
/// Blocks. Throws DataError naming each address and what was wrong there, with the variable of
/// another mirror, and SystemError for the local file.
void download(const std::vector<std::string>& urls, const std::filesystem::path& target,
              const VerifyFile& verify, const DownloadOptions& options = {},
              const std::string& mirror_variable = {});

}  // namespace lockstep
