#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>

#include "lockstep/comm/world.h"

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

}  // namespace lockstep
