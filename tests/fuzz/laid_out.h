#pragma once

// Tensors in memory as programs have them: strided, at odd addresses, lazily conjugated, leaves.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/base/random.h"

namespace lockstep::fuzz {

enum class Layout {
  contiguous,
  offset,   ///< Contiguous, not at the start of its memory.
  strided,  ///< Every second element.
  transposed,
  channels_last,  ///< Of four dimensions.
  expanded,       ///< Elements of dimension 0 share memory: inputs only.
  conjugated,     ///< Lazily, of complex numbers.
  negated,        ///< Lazily.
};

/// A tensor that is passed to a call, and the whole memory it lies in.
struct LaidOut {
  Layout layout = Layout::contiguous;
  std::vector<int64_t> shape;
  at::Tensor base;    ///< Contiguous.
  at::Tensor before;  ///< A copy of it from before the call.
  at::Tensor view;    ///< Passed to the call. A leaf that requires a gradient, sometimes.

  std::string text() const;
};

struct LayoutChoice {
  bool plain_only = false;  ///< Contiguous, with the values in memory.
  bool is_input = false;    ///< It is only read.
  bool repeated = false;    ///< Its values are the same along dimension 0.
};

/// A tensor of these values in a layout that `random` chooses.
LaidOut lay_out(const at::Tensor& values, KeyedRandom& random, const LayoutChoice& choice);

/// The same in the middle of memory that is there: one element before it, two after it.
LaidOut lay_out_in(const at::Tensor& memory, const at::Tensor& values);

/// Empty when the whole memory is as before but for these values, which the call has given the
/// tensor; undefined ones: it has given none. Else what differs.
std::string difference(const LaidOut& tensor, const at::Tensor& values);

}  // namespace lockstep::fuzz
