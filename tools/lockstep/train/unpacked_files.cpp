#include "tools/lockstep/train/unpacked_files.h"

namespace lockstep::tool {

std::map<std::filesystem::path, std::span<const std::byte>>& unpacked_files() {
  static std::map<std::filesystem::path, std::span<const std::byte>> files;
  return files;
}

}  // namespace lockstep::tool
