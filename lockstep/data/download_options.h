#pragma once

#include <chrono>
#include <filesystem>

namespace lockstep {

struct DownloadOptions {
  /// To reach the server: a live one answers within a round trip or two.
  std::chrono::seconds connect_timeout{20};
  /// A transfer without a byte for this long is given up and resumed by the next attempt.
  std::chrono::milliseconds stall_timeout{30'000};
  /// Tries at each address, for failures that may pass: a lost connection, a time-out, HTTP 408,
  /// 429 and 5xx.
  int attempts = 5;
  /// The pause before the second try. It doubles from try to try (0.5 + 1 + 2 + 4 seconds).
  std::chrono::milliseconds first_pause{500};
  /// Certificates to trust in place of the system's. Empty: CURL_CA_BUNDLE, then SSL_CERT_FILE (as
  /// the program curl has it), then the system's.
  std::filesystem::path ca_file = {};
};

}  // namespace lockstep
