#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::rpc::detail {

/// A call as it travels: the function's name, the hash of its types, how deep it is within others,
/// then the arguments.
struct WireCall {
  std::string name;
  int64_t types_hash = 0;
  int64_t depth = 0;  ///< 1: of no function.
  std::vector<at::IValue> arguments;

  WireCall(std::string function, int64_t hash, int64_t calls_deep, std::vector<at::IValue> values)
      : name(std::move(function)),
        types_hash(hash),
        depth(calls_deep),
        arguments(std::move(values)) {}

  /// Throws DataError for anything else.
  explicit WireCall(std::vector<at::IValue>& stack) {
    if (stack.size() < kHead || !stack[0].isString() || !stack[1].isInt() || !stack[2].isInt()) {
      throw DataError("rpc: a call came that is none of ours");
    }
    name = stack[0].toStringRef();
    types_hash = stack[1].toInt();
    depth = stack[2].toInt();
    arguments.assign(std::make_move_iterator(stack.begin() + kHead),
                     std::make_move_iterator(stack.end()));
  }

  std::vector<at::IValue> stack() && {
    std::vector<at::IValue> values;
    values.reserve(arguments.size() + kHead);
    values.emplace_back(std::move(name));
    values.emplace_back(types_hash);
    values.emplace_back(depth);
    for (auto& argument : arguments) values.push_back(std::move(argument));
    return values;
  }

 private:
  static constexpr int kHead = 3;
};

}  // namespace lockstep::rpc::detail
