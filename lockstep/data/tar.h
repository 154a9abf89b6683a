#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "lockstep/data/content_reader.h"

namespace lockstep {

/// A regular file in a tar archive.
struct TarMember {
  std::string name;  ///< With the folders before it, as it stands in the archive.
  uint64_t size = 0;
};

/// Walks through a tar archive, plain or gzip, from front to back. `wanted` says for each regular
/// file whether `take` gets its content, of which it must read all. Folders, links and what
/// POSIX adds to names are passed over. Throws DataError naming the offset of what is no archive or
/// is cut short, and for a checksum of gzip's that is another.
void read_tar(const std::filesystem::path& path,
              const std::function<bool(const TarMember&)>& wanted,
              const std::function<void(const TarMember&, ContentReader&)>& take);

}  // namespace lockstep
