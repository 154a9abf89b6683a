#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/file.h"

namespace lockstep::launch {

/// Which lines of the console are copied into a file: those that contain one of `words`.
struct LineCopiesPlan {
  std::filesystem::path file;  ///< Empty: none are.
  std::vector<std::string> words;
};

/// The file of a LineCopiesPlan.
class LineCopies {
 public:
  /// Makes the file, if there is to be one. Throws SystemError naming it.
  explicit LineCopies(LineCopiesPlan plan);

  /// Copies the line, with its prefix, if it has one of the words.
  void take(std::string_view prefix, std::string_view line);

 private:
  LineCopiesPlan plan_;
  UniqueFd file_;
};

}  // namespace lockstep::launch
