#include "lockstep/data/pickle.h"

#include <bit>
#include <cstdlib>
#include <unordered_map>

namespace lockstep {
namespace {

using Kind = PickleValue::Kind;

class PickleReader {
 public:
  PickleReader(std::string_view bytes,
               const std::function<void(size_t, const std::string&)>& complain)
      : bytes_(bytes), complain_(complain) {}

  Pickle read() {
    while (true) {
      start_ = offset_;
      const auto op = static_cast<uint8_t>(number(1));
      if (op == '.') break;  // STOP
      run(op);
      if (stack_.size() > kMost || pickle_.values.size() > kMost)
        fail("more than 20 million values");
    }
    pickle_.root = pop();
    return std::move(pickle_);
  }

 private:
  static constexpr size_t kMost = 20'000'000;

  [[noreturn]] void fail(const std::string& complaint) const {
    complain_(start_, complaint);
    std::abort();
  }

  std::string_view take(uint64_t size) {
    if (size > bytes_.size() - offset_)
      fail("expected " + std::to_string(size) + " more bytes, there are " +
           std::to_string(bytes_.size() - offset_));
    offset_ += size;
    return bytes_.substr(offset_ - size, size);
  }
  uint64_t number(size_t size) {
    uint64_t value = 0;
    take(size).copy(reinterpret_cast<char*>(&value), size);
    return value;
  }
  std::string_view line() {
    const size_t end = bytes_.find('\n', offset_);
    if (end == std::string_view::npos) fail("expected the end of a line");
    const std::string_view text = take(end - offset_);
    take(1);
    return text;
  }

  PickleValue& push(Kind kind) {
    PickleValue& value = pickle_.values.emplace_back();
    value.kind = kind;
    stack_.push_back(&value);
    return value;
  }
  void push_integer(int64_t integer) { push(Kind::integer).integer = integer; }
  PickleValue* pop() {
    if (stack_.size() <= floor()) fail("expected a value on the stack");
    PickleValue* const value = stack_.back();
    stack_.pop_back();
    return value;
  }
  PickleValue& top() {
    if (stack_.size() <= floor()) fail("expected a value on the stack");
    return *stack_.back();
  }
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  /// What lies above the last mark, which goes.
  std::vector<const PickleValue*> pop_items() {
    if (marks_.empty()) fail("expected a mark on the stack");
    const auto first = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<const PickleValue*> items(first, stack_.end());
    stack_.erase(first, stack_.end());
    marks_.pop_back();
    return items;
  }

  std::vector<const PickleValue*> pop_several(size_t size) {
    std::vector<const PickleValue*> items(size);
    for (size_t i = size; i > 0; --i) items[i - 1] = pop();
    return items;
  }

  void run(uint8_t op) {
    switch (op) {
      case 'N':  // NONE
        return push_text(Kind::none, 0);
      case 0x88:  // NEWTRUE
      case 0x89:  // NEWFALSE
        push(Kind::boolean).integer = op == 0x88;
        return;
      case 'K':  // BININT1
        return push_integer(static_cast<int64_t>(number(1)));
      case 'M':  // BININT2
        return push_integer(static_cast<int64_t>(number(2)));
      case 'J':  // BININT
        return push_long(take(4));
      case 0x8a:  // LONG1
        return push_long(take(number(1)));
      case 0x8b:  // LONG4
        return push_long(take(number(4)));
      case 'G':  // BINFLOAT
        push(Kind::real).real = big_endian_double();
        return;
      case 'X':  // BINUNICODE
        return push_text(Kind::text, 4);
      case 0x8c:  // SHORT_BINUNICODE
        return push_text(Kind::text, 1);
      case 0x8d:  // BINUNICODE8
        return push_text(Kind::text, 8);
      case 'B':  // BINBYTES
        return push_text(Kind::bytes, 4);
      case 'C':  // SHORT_BINBYTES
        return push_text(Kind::bytes, 1);
      case 0x8e:  // BINBYTES8
      case 0x96:  // BYTEARRAY8
        return push_text(Kind::bytes, 8);
      case '(':  // MARK
        marks_.push_back(stack_.size());
        return;
      case '1':  // POP_MARK
        pop_items();
        return;
      case ')':   // EMPTY_TUPLE
      case ']':   // EMPTY_LIST
      case 0x8f:  // EMPTY_SET
        return push_text(Kind::sequence, 0);
      case '}':  // EMPTY_DICT
        return push_text(Kind::dict, 0);
      case 't':   // TUPLE
      case 0x91:  // FROZENSET
        return push_sequence(pop_items());
      case 0x85:  // TUPLE1
      case 0x86:  // TUPLE2
      case 0x87:  // TUPLE3
        return push_sequence(pop_several(op - 0x84u));
      case 'a':  // APPEND
        return add_items({pop()});
      case 'e':   // APPENDS
      case 0x90:  // ADDITEMS
        return add_items(pop_items());
      case 's':  // SETITEM
        return add_entries(pop_several(2));
      case 'u':  // SETITEMS
        return add_entries(pop_items());
      default:
        return run_object(op);
    }
  }

  void run_object(uint8_t op) {
    switch (op) {
      case 'c': {  // GLOBAL
        const std::string module(line());
        return push_global(module, line());
      }
      case 0x93: {  // STACK_GLOBAL
        const auto names = pop_several(2);
        return push_global(names[0]->text, names[1]->text);
      }
      case 'R':   // REDUCE
      case 0x81:  // NEWOBJ
        return make_object(pop_several(2));
      case 0x92:  // NEWOBJ_EX
        return make_object(pop_several(3));
      case 'Q': {  // BINPERSID
        const PickleValue* const id = pop();
        PickleValue& made = push(Kind::object);
        made.text = "persistent";
        made.items = {id};
        return;
      }
      case 'b': {  // BUILD
        const PickleValue* const state = pop();
        top().state = state;
        return;
      }
      case 0x80: {  // PROTO
        const uint64_t protocol = number(1);
        if (protocol < 2 || protocol > 5)
          fail("a pickle of protocol " + std::to_string(protocol) + "; expected 2 to 5");
        return;
      }
      case 0x95:  // FRAME
        take(8);
        return;
      case '0':  // POP
        pop();
        return;
      case 'q':  // BINPUT
        return put(number(1));
      case 'r':  // LONG_BINPUT
        return put(number(4));
      case 0x94:  // MEMOIZE
        return put(memo_.size());
      case 'h':  // BINGET
        return get(number(1));
      case 'j':  // LONG_BINGET
        return get(number(4));
      default:
        fail("an operation of pickle (" + std::to_string(op) + ") that no file of tensors needs");
    }
  }

  /// A value whose bytes, if any, follow their number of `size` bytes.
  void push_text(Kind kind, size_t size) {
    const std::string_view text = take(number(size));
    push(kind).text = text;
  }
  /// In two's complement, little-endian. What int64 cannot hold is rounded to a double.
  void push_long(std::string_view bytes) {
    const bool is_negative = !bytes.empty() && static_cast<int8_t>(bytes.back()) < 0;
    uint64_t low = is_negative ? ~uint64_t{0} : 0;
    double real = is_negative ? -1 : 0;
    for (auto byte = bytes.rbegin(); byte != bytes.rend(); ++byte) {
      low = low << 8 | static_cast<uint8_t>(*byte);
      real = (real * 256) + static_cast<uint8_t>(*byte);
    }
    if (bytes.size() <= 8) return push_integer(static_cast<int64_t>(low));
    push(Kind::real).real = real;
  }
  double big_endian_double() {
    uint64_t bits = 0;
    for (const char byte : take(8)) bits = bits << 8 | static_cast<uint8_t>(byte);
    return std::bit_cast<double>(bits);
  }

  void push_sequence(std::vector<const PickleValue*> items) {
    push(Kind::sequence).items = std::move(items);
  }
  void add_items(const std::vector<const PickleValue*>& items) {
    PickleValue& to = top();
    if (to.kind != Kind::sequence && to.kind != Kind::object) fail("expected a list to add to");
    to.items.insert(to.items.end(), items.begin(), items.end());
  }
  void add_entries(const std::vector<const PickleValue*>& items) {
    PickleValue& to = top();
    if (to.kind != Kind::dict && to.kind != Kind::object) fail("expected a dict to add to");
    if (items.size() % 2 != 0) fail("expected a value for each key");
    for (size_t i = 0; i < items.size(); i += 2) to.entries.emplace_back(items[i], items[i + 1]);
  }

  void push_global(std::string_view module, std::string_view name) {
    push(Kind::global).text = std::string(module) + "." + std::string(name);
  }
  /// A class, its arguments, and those that have names, if there are any.
  void make_object(const std::vector<const PickleValue*>& parts) {
    const PickleValue &callable = *parts[0], &arguments = *parts[1];
    if (callable.kind != Kind::global || arguments.kind != Kind::sequence)
      fail("expected a class and its arguments");
    const bool is_dict =
        callable.text == "collections.OrderedDict" || callable.text == "collections.defaultdict";
    PickleValue& made = push(is_dict ? Kind::dict : Kind::object);
    made.text = callable.text;
    if (!is_dict) {
      made.items = arguments.items;
    } else if (!arguments.items.empty()) {
      for (const PickleValue* pair : arguments.items[0]->items)
        if (pair->items.size() == 2) made.entries.emplace_back(pair->items[0], pair->items[1]);
    }
    if (parts.size() == 3) made.entries = parts[2]->entries;
  }

  void put(uint64_t index) { memo_[index] = &top(); }
  void get(uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) fail("nothing was noted as number " + std::to_string(index));
    stack_.push_back(found->second);
  }

  std::string_view bytes_;
  const std::function<void(size_t, const std::string&)>& complain_;
  size_t offset_ = 0;
  size_t start_ = 0;  ///< Of the present operation.
  Pickle pickle_;
  std::vector<PickleValue*> stack_;
  std::vector<size_t> marks_;  ///< Sizes of the stack.
  std::unordered_map<uint64_t, PickleValue*> memo_;
};

}  // namespace

Pickle read_pickle(std::string_view bytes,
                   const std::function<void(size_t, const std::string&)>& fail) {
  return PickleReader(bytes, fail).read();
}

}  // namespace lockstep
