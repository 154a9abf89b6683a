#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace lockstep {

/// Whether the open file still is the one of that name, which others may have removed or replaced.
bool is_still_named(int fd, const std::filesystem::path& name);

/// Files and sockets that this process has open.
int64_t open_descriptors();

/// Makes room for `more` open files and sockets: raises the soft limit (`ulimit -n`), which stands
/// at 1024 on most systems, up to the hard one where it does not suffice. Processes that are
/// started afterwards inherit it. Throws Error naming both limits and how many are needed; it
/// begins with `what`.
void make_room_for_descriptors(int64_t more, const std::string& what);

}  // namespace lockstep
