#pragma once

#include <c10/util/intrusive_ptr.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/store.h"

namespace lockstep {

/// The c10d store behind a handle, for code of this room that builds c10d's objects.
c10::intrusive_ptr<c10d::Store> native_store(const Store& store);

/// A handle on a c10d store.
Store wrap_store(c10::intrusive_ptr<c10d::Store> store);

}  // namespace lockstep
