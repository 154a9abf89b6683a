#pragma once

#include "lockstep/launch/rank_environment.h"

namespace lockstep::launch {

/// What a launcher has open for each of its ranks, beside the store's connections.
struct RankStreams {
  int pipes = 1;  ///< Those of standard output and error that it reads.
  int files = 0;  ///< Log files that these go to as well.
};

/// Makes room for the open files and sockets of the launcher and of its ranks, which inherit the
/// limit: too few are told before anything is started, and once. See make_room_for_descriptors.
void make_room_for_ranks(const RankLayout& layout, const RankStreams& streams);

}  // namespace lockstep::launch
