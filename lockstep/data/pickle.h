#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

/// A value of a pickle. A class or function is its name, and what it would make of its arguments
/// an object with these.
struct PickleValue {
  enum class Kind { none, boolean, integer, real, text, bytes, sequence, dict, global, object };
  using Entry = std::pair<const PickleValue*, const PickleValue*>;

  Kind kind = Kind::none;
  int64_t integer = 0;  ///< Also of a boolean.
  double real = 0;      ///< Also of an integer that int64 cannot hold.
  std::string text;  ///< Also bytes. The name of a global or of an object's class: "module.name".
  std::vector<const PickleValue*>
      items;                   ///< Of a list, tuple or set. An object's arguments and items.
  std::vector<Entry> entries;  ///< Of a dict or an object that is one. Named arguments.
  const PickleValue* state = nullptr;  ///< What an object's attributes are made from.
};

/// The values of one pickle, which point to each other.
struct Pickle {
  std::deque<PickleValue> values;
  const PickleValue* root = nullptr;
};

/// Reads a pickle of protocol 2 to 5 (Python's pickletools describes them) as what torch.save and
/// LibTorch write. Nothing is imported and nothing is run. A persistent id is an object of the
/// class "persistent". Values take memory in proportion to the bytes, and at most 20 million are
/// read. `fail` is called for the offset and the complaint of bytes that are no such pickle; it
/// must throw. A value may contain itself: who walks through it needs a limit.
Pickle read_pickle(std::string_view bytes,
                   const std::function<void(size_t offset, const std::string& complaint)>& fail);

}  // namespace lockstep
