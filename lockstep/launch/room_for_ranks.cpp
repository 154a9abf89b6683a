#include "lockstep/launch/room_for_ranks.h"

#include <algorithm>

#include "lockstep/base/descriptors.h"
#include "lockstep/base/words.h"

namespace lockstep::launch {
namespace {

// Counted on running jobs of 2 to 8 ranks over each backend, and a little more.
constexpr int kOfALauncher =
    20;  ///< Signals, events, the supervisor, libraries while they are loaded.
constexpr int kOfARank = 12;
constexpr int kOfAPeer = 1;        ///< A rank's connection to another one.
constexpr int kInTheStore = 2;     ///< A rank's connections to who holds the store.
constexpr int kOfAnotherHost = 1;  ///< Launchers tell each other that their ranks have ended.

}  // namespace

void make_room_for_ranks(const RankLayout& layout, const RankStreams& streams) {
  const bool serves = layout.agent_store && layout.node_rank == 0;
  const int store = serves ? layout.world_size * kInTheStore + layout.nodes * kOfAnotherHost : 0;
  // While the ranks are started each pipe has both its ends here.
  const int started = layout.local_size * streams.pipes;
  const int launcher =
      kOfALauncher + layout.local_size * (streams.pipes + streams.files) + std::max(store, started);
  const int rank = kOfARank + layout.world_size * kOfAPeer;
  make_room_for_descriptors(std::max(launcher, rank),
                            "cannot start " + counted(layout.local_size, "rank"));
}

}  // namespace lockstep::launch
