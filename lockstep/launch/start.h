#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>

#include "lockstep/comm/world.h"
#include "lockstep/launch/spawn.h"

namespace lockstep {

/// A generator of this rank's own, on the world's device: each rank's gives other numbers, and the
/// same ones in every run with the same seed and rank.
///
///     auto own = lockstep::rank_generator(world);
///     auto noise = at::randn({64, 100}, own);  // another on every rank
///
/// It is for what must differ between ranks of which all called at::manual_seed(seed) alike: the
/// noise of a GAN, random augmentation, masks. LibTorch's dropout takes no generator: it draws from
/// the default one.
///
/// `seed`: the same on all ranks. None: that of the default generator of the device, as
/// StartOptions::seed or at::manual_seed left it. Where nothing has seeded that, each rank has
/// another seed, and so has each run. Ranks of one seed never share a stream. Keep the generator:
/// each call returns one that begins anew.
at::Generator rank_generator(const World& world, std::optional<uint64_t> seed = {});

struct StartOptions {
  /// How the processes are started. Where `stdout_ranks` is not given, start shows what local rank
  /// 0 prints, so that each line appears once.
  SpawnOptions spawn = {};
  InitOptions init = {};  ///< How the ranks meet: the backend, the time-out.
  /// Wins over `spawn.max_restarts` where it is not 0.
  int max_restarts = 0;
  /// Given: at::manual_seed with rank 0's value on every rank, so that it may come from a clock.
  /// Ranks then draw the same numbers: weights begin alike, but dropout and noise are the same on
  /// all ranks too, see rank_generator. None: nothing is seeded, and each rank draws other numbers.
  /// Data that is made up must then not be drawn from them, or every rank learns from other data.
  std::optional<uint64_t> seed = {};
};

/// Makes a program distributed by one line: `spawn`, `init`, and an end in words.
///
///     int main() {
///       auto world = lockstep::start(2);
///       ...  // runs on both ranks
///     }
///
/// Started by hand, the program starts `nprocs` processes of itself on this host, and `start`
/// returns in each of those. Under a launcher (`lockstep run`, torchrun, srun, mpirun) this process
/// is a rank already, of as many as the launcher says: `start` only meets the others, and the
/// launcher decides whose output is shown. start(1) by hand starts nothing either: the world of one
/// is this process. Rank 0 has the standard input of the process that was started.
///
/// The process that was started by hand never returns from here. It waits for the others (see
/// `spawn`), and ends by std::exit:
/// - with 0 when all ranks have,
/// - with the exit code of the rank that failed first, 128 + N where signal N ended that. The
///   failure is printed once, as "error: rank 1: ...". What follows from it on other ranks is not.
/// - with 128 + N after a signal (Ctrl-C: 130; TERM: 143), and "stopped by SIGINT",
/// - with 2 when `nprocs` or an option is wrong.
///
/// What stands before it in `main` runs in that process as well, so let it come first.
///
/// In a rank it sets a std::terminate handler. An exception that nobody catches, in any thread,
/// ends the rank with one message, "error: rank 1: " and its text, and its exit code: 1, and 2 for
/// a UsageError. c10's C++ stack is left out. As ever then, no destructor runs. Ranks that waited
/// for this one end by a PeerLostError. Under torchrun, srun and mpirun they print it as well,
/// since nobody does it for them. A handler that the program has set before is called in place of
/// the message. A rank that wants to end otherwise catches exceptions itself.
///
/// Throws in a rank what `init` throws, and UsageError at the second call in a process. Blocks.
World start(int nprocs, const StartOptions& options = {});

}  // namespace lockstep
