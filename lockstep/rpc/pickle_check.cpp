#include "lockstep/rpc/pickle_check.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::rpc::detail {
namespace {

constexpr std::string_view kTensorMaker = "torch.jit._pickle\nbuild_tensor_from_id\n";
constexpr std::string_view kTagMaker = "torch.jit._pickle\nrestore_type_tag\n";
constexpr std::string_view kReferenceMaker = "torch.distributed.rpc\nrref\n";
/// The only tagged value: the devices of a message in an autograd context.
constexpr std::string_view kTag = "Dict[str, str]";
/// The type of every reference of ours.
constexpr std::string_view kReferenceType = "Any";
constexpr size_t kReferenceParts = 7;

enum class Kind : uint8_t {
  plain,
  integer,
  string,
  dict,
  tuple,
  mark,
  tensor_maker,
  tag_maker,
  reference_maker,
  reference_parts,
};

/// A value on the reader's stack.
struct Slot {
  Kind kind = Kind::plain;
  int depth = 0;
  uint32_t count = 0;   ///< Of a tuple's elements.
  uint64_t weight = 1;  ///< Bytes, about.
  int64_t number = -1;  ///< Of an integer; a tuple's first one; where a string begins; an index.
};

/// pickle's machine, without making any value. Protocol 2 as LibTorch's Pickler writes it.
class Scan {
 public:
  Scan(std::string_view bytes, const PickleLimits& limits) : bytes_(bytes), limits_(limits) {}

  PickleShape run() {
    if (take() != 0x80 || take() != 2) fail("no pickle of protocol 2");
    for (uint8_t code = take(); code != '.'; code = take()) step(code);
    if (place_ != bytes_.size()) fail("bytes after the end");
    if (stack_.size() != 1 || stack_[0].kind == Kind::mark) fail("not one value");
    shape_.is_tuple = stack_[0].kind == Kind::tuple;
    shape_.count = stack_[0].count;
    if (shape_.is_tuple) shape_.first_number = stack_[0].number;
    return std::move(shape_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw DataError("rpc: a message that cannot be read: " + what + " at byte " +
                    std::to_string(place_) + " of " + std::to_string(bytes_.size()));
  }

  uint8_t take() {
    if (place_ >= bytes_.size()) fail("it ends too early");
    return static_cast<uint8_t>(bytes_[place_++]);
  }
  std::string_view take_bytes(uint64_t size) {
    if (size > bytes_.size() - place_) fail("a length beyond the end");
    const auto part = bytes_.substr(place_, size);
    place_ += size;
    return part;
  }
  template <class T>
  T take_number() {
    T value;
    std::memcpy(&value, take_bytes(sizeof(T)).data(), sizeof(T));
    return value;
  }

  void push(const Slot& slot) {
    if (slot.weight > limits_.bytes) fail("a value of more bytes than the limit");
    if (slot.depth > limits_.depth) fail("values within values deeper than the limit");
    stack_.push_back(slot);
  }
  Slot pop() {
    if (stack_.empty() || stack_.back().kind == Kind::mark) fail("a value is missing");
    const Slot slot = stack_.back();
    stack_.pop_back();
    return slot;
  }
  void push_integer(int64_t value) { push({.kind = Kind::integer, .number = value}); }

  void step(uint8_t code) {
    switch (code) {
      case '(':
        stack_.push_back({.kind = Kind::mark});
        return;
      case 'N':
      case 0x88:
      case 0x89:
        return push({});
      case 'K':
        return push_integer(take());
      case 'M':
        return push_integer(take_number<uint16_t>());
      case 'J':
        return push_integer(take_number<int32_t>());
      case 0x8a:
        if (take() != 8) fail("a number of an unknown size");
        return push_integer(take_number<int64_t>());
      case 'G':
        take_bytes(sizeof(double));
        return push({.weight = sizeof(double)});
      case 'X':
        return string();
      case ')':
        return push({.kind = Kind::tuple});
      case 0x85:
      case 0x86:
      case 0x87:
        return tuple(code - 0x84);
      case 't':
        return tuple_from_mark();
      case '}':
        return push({.kind = Kind::dict});
      case 'u':
        return set_items();
      case 'c':
        return global();
      case 'R':
        return reduce();
      case 'q':
        return put(take());
      case 'r':
        return put(take_number<uint32_t>());
      case 'h':
        return get(take());
      case 'j':
        return get(take_number<uint32_t>());
      default:
        fail("an operation that RPC does not use");
    }
  }

  void string() {
    const auto size = take_number<uint32_t>();
    const auto start = static_cast<int64_t>(place_);
    take_bytes(size);
    push({.kind = Kind::string, .count = size, .weight = uint64_t{size} + 1, .number = start});
  }
  std::string_view text(const Slot& slot) const {
    return bytes_.substr(static_cast<size_t>(slot.number), slot.count);
  }

  // LibTorch numbers its memo's places one after the other.
  void put(size_t number) {
    if (number != memo_.size() || stack_.empty() || stack_.back().kind == Kind::mark) {
      fail("a memo's place out of order");
    }
    memo_.push_back(stack_.back());
  }
  void get(size_t number) {
    if (number >= memo_.size()) fail("an unknown memo's place");
    push(memo_[number]);
  }

  size_t after_mark() const {
    size_t first = stack_.size();
    while (first > 0 && stack_[first - 1].kind != Kind::mark) --first;
    if (first == 0) fail("no mark");
    return first;
  }
  void tuple_from_mark() {
    const size_t first = after_mark();
    const size_t count = stack_.size() - first;
    if (count > UINT32_MAX) fail("too many elements");
    const bool is_reference =
        count == kReferenceParts && first >= 2 && stack_[first - 2].kind == Kind::reference_maker;
    const Slot made = is_reference ? reference_parts(first) : joined(first);
    stack_.resize(first - 1);
    push(made);
  }
  void tuple(size_t count) {
    if (stack_.size() < count) fail("a value is missing");
    const size_t first = stack_.size() - count;
    for (size_t i = first; i < stack_.size(); ++i) {
      if (stack_[i].kind == Kind::mark) fail("a value is missing");
    }
    // The arguments of the tag: a dict and its type.
    tag_follows_ = count == 2 && stack_[first].kind == Kind::dict &&
                   stack_[first + 1].kind == Kind::string && text(stack_[first + 1]) == kTag;
    const Slot made = joined(first);
    stack_.resize(first);
    push(made);
  }
  // The tuple of the values from `first` on.
  Slot joined(size_t first) {
    Slot made{.kind = Kind::tuple};
    made.count = static_cast<uint32_t>(stack_.size() - first);
    if (made.count > 0 && stack_[first].kind == Kind::integer) made.number = stack_[first].number;
    for (size_t i = first; i < stack_.size(); ++i) {
      made.weight += stack_[i].weight;
      made.depth = std::max(made.depth, stack_[i].depth);
      if (made.weight > limits_.bytes) fail("a value of more bytes than the limit");
    }
    ++made.depth;
    return made;
  }

  Slot reference_parts(size_t first) {
    int64_t numbers[kReferenceParts - 1];
    for (size_t i = 0; i + 1 < kReferenceParts; ++i) {
      const Slot& part = stack_[first + i];
      if (part.kind != Kind::integer || part.number < 0) fail("no reference");
      numbers[i] = part.number;
    }
    const Slot& type = stack_.back();
    if (type.kind != Kind::string || text(type) != kReferenceType) {
      fail("a reference to an unknown type");
    }
    for (const int worker : {0, 1, 3, 5}) {
      if (numbers[worker] > INT16_MAX) fail("a reference of no worker");
    }
    references_.push_back({numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]});
    return {.kind = Kind::reference_parts, .number = static_cast<int64_t>(references_.size()) - 1};
  }

  // Of the devices' dict, whose items are names.
  void set_items() {
    const size_t first = after_mark();
    if (first < 2 || stack_[first - 2].kind != Kind::dict) fail("items of no dict");
    if ((stack_.size() - first) % 2 != 0) fail("a key without a value");
    for (size_t i = first; i < stack_.size(); ++i) {
      if (stack_[i].kind != Kind::string) fail("a dict of other things than names");
    }
    stack_.resize(first - 1);
  }

  void global() {
    const auto rest = bytes_.substr(place_);
    for (const auto& [name, kind] :
         {std::pair(kTensorMaker, Kind::tensor_maker), std::pair(kTagMaker, Kind::tag_maker),
          std::pair(kReferenceMaker, Kind::reference_maker)}) {
      if (rest.substr(0, name.size()) != name) continue;
      place_ += name.size();
      return push({.kind = kind});
    }
    fail("a name that RPC does not use");
  }

  void reduce() {
    const Slot arguments = pop(), maker = pop();
    if (maker.kind == Kind::tensor_maker) {
      if (arguments.kind != Kind::tuple || arguments.count != 1 || arguments.number < 0 ||
          static_cast<uint64_t>(arguments.number) >= limits_.tensors) {
        fail("a tensor that the message does not have");
      }
      return push({});
    }
    if (maker.kind == Kind::reference_maker && arguments.kind == Kind::reference_parts) {
      shape_.references.push_back(references_[static_cast<size_t>(arguments.number)]);
      return push({});
    }
    if (maker.kind == Kind::tag_maker && arguments.kind == Kind::tuple && tag_follows_) {
      tag_follows_ = false;
      return push({});
    }
    fail("a value that RPC does not use");
  }

  const std::string_view bytes_;
  const PickleLimits limits_;
  size_t place_ = 0;
  std::vector<Slot> stack_, memo_;
  std::vector<CarriedReference> references_;
  bool tag_follows_ = false;
  PickleShape shape_;
};

}  // namespace

PickleShape check_pickle(std::string_view bytes, const PickleLimits& limits) {
  return Scan(bytes, limits).run();
}

}  // namespace lockstep::rpc::detail
