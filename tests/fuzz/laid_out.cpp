#include "tests/fuzz/laid_out.h"

#include <ATen/ATen.h>

#include <array>
#include <cstring>

namespace lockstep::fuzz {
namespace {

constexpr std::array<const char*, 8> kNames = {"contiguous", "offset",        "strided",
                                               "transposed", "channels_last", "expanded",
                                               "conjugated", "negated"};
static_assert(kNames.size() == static_cast<size_t>(Layout::negated) + 1);

bool possible(Layout layout, const at::Tensor& values, const LayoutChoice& choice) {
  const bool complex = at::isComplexType(values.scalar_type());
  const bool signed_numbers = complex || at::isFloatingType(values.scalar_type());
  switch (layout) {
    case Layout::contiguous:
    case Layout::offset:
      return true;
    case Layout::strided:
      return !choice.plain_only;
    case Layout::transposed:
      return !choice.plain_only && values.dim() >= 2;
    case Layout::channels_last:
      return !choice.plain_only && values.dim() == 4;
    case Layout::expanded:
      return !choice.plain_only && choice.is_input && choice.repeated;
    case Layout::conjugated:
      return !choice.plain_only && complex;
    case Layout::negated:
      return !choice.plain_only && signed_numbers;
  }
  return false;
}

std::vector<int64_t> base_shape(Layout layout, std::vector<int64_t> shape) {
  switch (layout) {
    case Layout::offset:
      return {c10::multiply_integers(shape) + 3};
    case Layout::strided:
      shape.push_back(2);
      return shape;
    case Layout::transposed:
      return {shape.rbegin(), shape.rend()};
    case Layout::channels_last:
      return {shape[0], shape[2], shape[3], shape[1]};
    case Layout::expanded:
      shape[0] = std::min<int64_t>(shape[0], 1);
      return shape;
    default:
      return shape;
  }
}

at::Tensor view_of(const at::Tensor& base, Layout layout, const std::vector<int64_t>& shape) {
  switch (layout) {
    case Layout::offset:
      return base.narrow(0, 1, base.numel() - 3).view(shape);
    case Layout::strided:
      return base.select(-1, 1);
    case Layout::transposed: {
      std::vector<int64_t> order;
      for (auto i = static_cast<int64_t>(shape.size()); i > 0; --i) order.push_back(i - 1);
      return base.permute(order);
    }
    case Layout::channels_last:
      return base.permute({0, 3, 1, 2});
    case Layout::expanded:
      return base.expand(shape);
    case Layout::conjugated:
      return base.conj();
    case Layout::negated:
      return at::_neg_view(base);
    default:
      return base;
  }
}

/// Writes to an expanded tensor, whose elements share memory, go to one of them.
void write(const at::Tensor& base, Layout layout, const std::vector<int64_t>& shape,
           const at::Tensor& values) {
  if (layout == Layout::expanded) {
    base.copy_(values.narrow(0, 0, base.size(0)));
  } else {
    view_of(base, layout, shape).copy_(values);
  }
}

std::string element(const at::Tensor& flat, int64_t index) {
  return c10::str(flat[index].item());
}

/// Empty when both have the same bits or are NaN together; else where they differ first.
std::string difference(const at::Tensor& actual, const at::Tensor& wanted) {
  const at::Tensor a = actual.contiguous().flatten(), b = wanted.contiguous().flatten();
  if (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0)
    return {};
  const at::Tensor differs = a.ne(b).logical_and(a.eq(a).logical_or(b.eq(b)));
  const at::Tensor where = differs.nonzero();
  if (where.numel() == 0) return {};  // 0 and -0, and NaNs of other bits.
  const auto first = where[0].item<int64_t>();
  return "element " + std::to_string(first) + " is " + element(a, first) + ", expected " +
         element(b, first) + "; " + std::to_string(where.size(0)) + " of " +
         std::to_string(a.numel()) + " differ";
}

void fill(LaidOut& tensor, const at::Tensor& memory, const at::Tensor& values) {
  tensor.base = memory;
  tensor.base.fill_(1);  // What lies around the tensor must stay as it is.
  write(tensor.base, tensor.layout, tensor.shape, values);
  tensor.before = tensor.base.clone();
  tensor.view = view_of(tensor.base, tensor.layout, tensor.shape);
}

}  // namespace

std::string LaidOut::text() const {
  return std::string(kNames[static_cast<size_t>(layout)]) + (view.requires_grad() ? " leaf" : "");
}

LaidOut lay_out(const at::Tensor& values, KeyedRandom& random, const LayoutChoice& choice) {
  LaidOut result;
  result.shape = values.sizes().vec();
  if (random.below(3) != 0) {
    do {
      result.layout = static_cast<Layout>(random.below(kNames.size()));
    } while (!possible(result.layout, values, choice));
  }
  fill(result, at::empty(base_shape(result.layout, result.shape), values.options()), values);
  const bool differentiable =
      at::isFloatingType(values.scalar_type()) || at::isComplexType(values.scalar_type());
  if (differentiable && random.below(6) == 0) result.view = result.view.detach().requires_grad_();
  return result;
}

LaidOut lay_out_in(const at::Tensor& memory, const at::Tensor& values) {
  LaidOut result;
  result.layout = Layout::offset;
  result.shape = values.sizes().vec();
  fill(result, memory, values);
  return result;
}

std::string difference(const LaidOut& tensor, const at::Tensor& values) {
  at::Tensor wanted = tensor.before;
  if (values.defined()) {
    wanted = wanted.clone();
    write(wanted, tensor.layout, tensor.shape, values);
  }
  const std::string found = difference(tensor.base, wanted);
  if (found.empty()) return {};
  const at::Tensor now = view_of(tensor.base, tensor.layout, tensor.shape);
  const at::Tensor meant = view_of(wanted, tensor.layout, tensor.shape);
  const std::string within =
      difference(now.resolve_conj().resolve_neg(), meant.resolve_conj().resolve_neg());
  return tensor.text() + " tensor: " + (within.empty() ? "around it, " + found : within);
}

}  // namespace lockstep::fuzz
