#pragma once

// What a step's calls must give, computed by ATen on one process: every rank knows all ranks'
// inputs, as the seed decides them.

#include <ATen/core/Tensor.h>

#include <vector>

#include "tests/fuzz/program.h"

namespace lockstep::fuzz {

/// Of one rank. Undefined outputs: their values are not promised.
struct Expectation {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  bool in_place = false;  ///< The inputs become the outputs.
  std::vector<int64_t> input_splits = {};
  std::vector<int64_t> output_splits = {};
};
/// Of a collective's call by `rank` of a group of `size`.
Expectation expect(const Step& step, Carrier carrier, int rank, int size);

/// A message of a step, with the ranks of the group.
struct Message {
  int from = 0;
  int to = 0;
  int tag = 0;
  at::Tensor values;
};
/// Kind::exchange and Kind::collect_any, in the order of their sends.
std::vector<Message> messages_of(const Step& step, int size);

/// Whole numbers that a rank gives as its tensor `index`. Their sums and products are exact, or
/// wrap around, so they have the same bits in any order.
at::Tensor values_for(const Step& step, Carrier carrier, int size, int rank, int index,
                      const std::vector<int64_t>& shape);

}  // namespace lockstep::fuzz
