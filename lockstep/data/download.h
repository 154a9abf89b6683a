#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

struct DownloadOptions {
  /// To reach the server: a live one answers within a round trip or two.
  std::chrono::seconds connect_timeout{20};
  /// A transfer without a byte for this long is given up and resumed by the next attempt.
  std::chrono::milliseconds stall_timeout{30'000};
  /// Tries at each address, for failures that may pass: a lost connection, a time-out, HTTP 408,
  /// 429 and 5xx.
  int attempts = 5;
  /// The pause before the second try; it doubles from try to try (0.5 + 1 + 2 + 4 seconds).
  std::chrono::milliseconds first_pause{500};
  /// Certificates to trust in place of the system's. Empty: CURL_CA_BUNDLE, then SSL_CERT_FILE (as
  /// the program curl has it), then the system's.
  std::filesystem::path ca_file = {};
};

/// Throws DataError when a downloaded file is not what was wanted (its checksum is another).
using VerifyFile = std::function<void(const std::filesystem::path&)>;

/// Fetches a file by HTTP or HTTPS from the first of `urls` that delivers it, and puts it at
/// `target` only when it is complete, verified and flushed to the disk.
///
/// What has arrived stays beside the target as "TARGET.part", also when this fails or the process
/// is killed, and the next try resumes there. A part that turns out wrong is fetched again from its
/// start once. Progress goes to standard error: a bar on a terminal, else a line at the end;
/// neither with --quiet. Call it from one process at a time for a target (see FolderLock); blocks.
/// Throws DataError naming each address and what was wrong there, SystemError for the local file.
void download(const std::vector<std::string>& urls, const std::filesystem::path& target,
              const VerifyFile& verify, const DownloadOptions& options = {});

}  // namespace lockstep
