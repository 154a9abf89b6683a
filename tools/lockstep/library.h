#pragma once

#include "entry.h"

namespace lockstep::tool {

/// A function of entry.h: loads its library, and LibTorch (0.2 s), first. A process loads either
/// liblockstep_cli.so or liblockstep_bench.so: each holds what it needs of Lockstep. Throws
/// lockstep::Error.
void* library_symbol(const std::string& library, const char* name);

template <class Function>
Function* library_function(const std::string& library, const char* name) {
  return reinterpret_cast<Function*>(library_symbol(library, name));
}

}  // namespace lockstep::tool
