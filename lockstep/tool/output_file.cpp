#include "lockstep/tool/output_file.h"

#include <system_error>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"

namespace lockstep::tool {
namespace fs = std::filesystem;

void check_output_file(const std::string& flag, const std::string& file, const std::string& example,
                       const std::function<void(const fs::path&)>& check) {
  if (file.empty()) return;
  const fs::path path(file);
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  const std::string what = flag + " " + file + ": ";
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) {
    throw UsageError(what + "there is no folder " + folder.string(),
                     "make it, or name a file in a folder that is there");
  }
  if (fs::is_directory(path, ignored)) {
    throw UsageError(what + "this is a folder; a file's name is needed",
                     "for example " + (path / example).string());
  }
  try {
    if (check) return check(path);
    const AtomicFile can_be_made(path);
  } catch (const Error& error) {
    throw UsageError(what + error.what());
  }
}

}  // namespace lockstep::tool
