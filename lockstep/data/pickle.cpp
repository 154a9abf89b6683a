#include "lockstep/data/pickle.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <unordered_map>

namespace lockstep {
namespace {

using Kind = PickleValue::Kind;

/// Those of Python's pickle module that its writers use.
enum class Op : uint8_t {
  mark = '(',
  stop = '.',
  pop = '0',
  pop_mark = '1',
  dup = '2',
  bin_bytes = 'B',
  short_bin_bytes = 'C',
  bin_float = 'G',
  bin_int = 'J',
  bin_int1 = 'K',
  bin_int2 = 'M',
  none = 'N',
  bin_pers_id = 'Q',
  reduce = 'R',
  bin_string = 'T',
  short_bin_string = 'U',
  bin_unicode = 'X',
  append = 'a',
  build = 'b',
  global = 'c',
  dict = 'd',
  appends = 'e',
  bin_get = 'h',
  long_bin_get = 'j',
  list = 'l',
  bin_put = 'q',
  long_bin_put = 'r',
  set_item = 's',
  tuple = 't',
  set_items = 'u',
  empty_tuple = ')',
  empty_list = ']',
  empty_dict = '}',
  proto = 0x80,
  new_obj = 0x81,
  tuple1 = 0x85,
  tuple2 = 0x86,
  tuple3 = 0x87,
  new_true = 0x88,
  new_false = 0x89,
  long1 = 0x8a,
  short_bin_unicode = 0x8c,
  bin_unicode8 = 0x8d,
  bin_bytes8 = 0x8e,
  empty_set = 0x8f,
  add_items = 0x90,
  frozen_set = 0x91,
  new_obj_ex = 0x92,
  stack_global = 0x93,
  memoize = 0x94,
  frame = 0x95,
};

/// Its bytes follow their number, of `size` bytes.
struct TextOp {
  Op op;
  Kind kind;
  size_t size;
};
constexpr TextOp kTexts[] = {
    {Op::bin_unicode, Kind::text, 4},      {Op::short_bin_unicode, Kind::text, 1},
    {Op::bin_unicode8, Kind::text, 8},     {Op::bin_string, Kind::text, 4},
    {Op::short_bin_string, Kind::text, 1}, {Op::bin_bytes, Kind::bytes, 4},
    {Op::short_bin_bytes, Kind::bytes, 1}, {Op::bin_bytes8, Kind::bytes, 8}};

class PickleReader {
 public:
  PickleReader(std::string_view bytes,
               const std::function<void(size_t, const std::string&)>& complain)
      : bytes_(bytes), complain_(complain) {}

  Pickle read() {
    while (true) {
      start_ = offset_;
      const auto op = static_cast<Op>(number(1));
      if (op == Op::stop) break;
      if (!read_scalar(op) && !read_container(op) && !read_object(op)) read_memo(op);
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
  /// Little-endian.
  uint64_t number(size_t size) {
    uint64_t value = 0;
    const std::string_view digits = take(size);
    for (size_t i = 0; i < size; ++i)
      value |= static_cast<uint64_t>(static_cast<uint8_t>(digits[i])) << (8 * i);
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

  bool read_scalar(Op op) {
    switch (op) {
      case Op::none:
        push(Kind::none);
        return true;
      case Op::new_true:
      case Op::new_false:
        push(Kind::boolean).integer = op == Op::new_true;
        return true;
      case Op::bin_int1:
      case Op::bin_int2:
        push_integer(static_cast<int64_t>(number(op == Op::bin_int1 ? 1 : 2)));
        return true;
      case Op::bin_int:
        push_integer(static_cast<int32_t>(number(4)));
        return true;
      case Op::long1:
        push_integer(long_number(number(1)));
        return true;
      case Op::bin_float:
        push(Kind::real).real = big_endian_double();
        return true;
      default:
        return read_text(op);
    }
  }

  bool read_text(Op op) {
    const auto found = std::find_if(std::begin(kTexts), std::end(kTexts),
                                    [&](const TextOp& text) { return text.op == op; });
    if (found == std::end(kTexts)) return false;
    push(found->kind).text = take(number(found->size));
    return true;
  }

  int64_t long_number(uint64_t size) {
    if (size > 8) fail("an integer of " + std::to_string(size) + " bytes; expected at most 8");
    if (size == 0) return 0;
    const auto unused = static_cast<int>(64 - 8 * size);
    return static_cast<int64_t>(number(size) << unused) >> unused;
  }
  double big_endian_double() {
    uint64_t bits = 0;
    for (const char byte : take(8)) bits = bits << 8 | static_cast<uint8_t>(byte);
    return std::bit_cast<double>(bits);
  }

  bool read_container(Op op) {
    switch (op) {
      case Op::mark:
        marks_.push_back(stack_.size());
        return true;
      case Op::pop_mark:
        pop_items();
        return true;
      case Op::empty_tuple:
      case Op::empty_list:
      case Op::empty_set:
        push(Kind::sequence);
        return true;
      case Op::empty_dict:
        push(Kind::dict);
        return true;
      case Op::tuple:
      case Op::list:
      case Op::frozen_set:
        push_sequence(pop_items());
        return true;
      case Op::tuple1:
      case Op::tuple2:
      case Op::tuple3:
        push_tuple(static_cast<size_t>(op) - static_cast<size_t>(Op::tuple1) + 1);
        return true;
      case Op::append:
        add_items({pop()});
        return true;
      case Op::appends:
      case Op::add_items:
        add_items(pop_items());
        return true;
      case Op::dict: {
        const auto items = pop_items();
        push(Kind::dict);
        add_entries(items);
        return true;
      }
      case Op::set_item: {
        const PickleValue* const value = pop();
        add_entries({pop(), value});
        return true;
      }
      case Op::set_items:
        add_entries(pop_items());
        return true;
      default:
        return false;
    }
  }

  void push_sequence(std::vector<const PickleValue*> items) {
    push(Kind::sequence).items = std::move(items);
  }
  void push_tuple(size_t size) {
    std::vector<const PickleValue*> items(size);
    for (size_t i = size; i > 0; --i) items[i - 1] = pop();
    push_sequence(std::move(items));
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

  bool read_object(Op op) {
    switch (op) {
      case Op::global: {
        const std::string module(line());
        push(Kind::global).text = module + "." + std::string(line());
        return true;
      }
      case Op::stack_global: {
        const PickleValue* const name = pop();
        const PickleValue* const module = pop();
        push(Kind::global).text = module->text + "." + name->text;
        return true;
      }
      case Op::new_obj_ex:
        pop();
        [[fallthrough]];  // Arguments by name: of no tensor's.
      case Op::reduce:
      case Op::new_obj: {
        const PickleValue* const arguments = pop();
        make_object(*pop(), *arguments);
        return true;
      }
      case Op::bin_pers_id: {
        const PickleValue* const id = pop();
        PickleValue& made = push(Kind::object);
        made.text = "persistent";
        made.items = {id};
        return true;
      }
      case Op::build: {
        const PickleValue* const state = pop();
        top().state = state;
        return true;
      }
      default:
        return false;
    }
  }

  void make_object(const PickleValue& callable, const PickleValue& arguments) {
    if (callable.kind != Kind::global || arguments.kind != Kind::sequence)
      fail("expected a class and its arguments");
    const bool is_dict =
        callable.text == "collections.OrderedDict" || callable.text == "collections.defaultdict";
    PickleValue& made = push(is_dict ? Kind::dict : Kind::object);
    made.text = callable.text;
    if (!is_dict) {
      made.items = arguments.items;
      return;
    }
    if (arguments.items.empty()) return;
    for (const PickleValue* pair : arguments.items[0]->items) {
      if (pair->items.size() == 2) made.entries.emplace_back(pair->items[0], pair->items[1]);
    }
  }

  void read_memo(Op op) {
    switch (op) {
      case Op::proto: {
        const uint64_t protocol = number(1);
        if (protocol < 2 || protocol > 5)
          fail("a pickle of protocol " + std::to_string(protocol) + "; expected 2 to 5");
        return;
      }
      case Op::frame:
        take(8);
        return;
      case Op::pop:
        pop();
        return;
      case Op::dup:
        stack_.push_back(&top());
        return;
      case Op::bin_put:
      case Op::long_bin_put:
        memo_[number(op == Op::bin_put ? 1 : 4)] = &top();
        return;
      case Op::memoize:
        memo_[memo_.size()] = &top();
        return;
      case Op::bin_get:
      case Op::long_bin_get:
        get(number(op == Op::bin_get ? 1 : 4));
        return;
      default:
        fail("an operation of pickle (" + std::to_string(static_cast<int>(op)) +
             ") that no file of tensors needs");
    }
  }
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
