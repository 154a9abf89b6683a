#pragma once

namespace lockstep::tool {

/// Loads LibTorch from where it is on this machine, before a library that needs it. The first of
/// these counts that has the version of the build:
/// - LOCKSTEP_TORCH, a folder with LibTorch's include/ and lib/. No other counts where it is set.
/// - the folder that the build used,
/// - beside this binary: a wheel's neighbour torch, libtorch/, lib/python3*/*-packages/torch,
/// - the active environment: VIRTUAL_ENV, CONDA_PREFIX.
/// Throws lockstep::Error, which says where it looked and what was there.
void load_libtorch();

}  // namespace lockstep::tool
