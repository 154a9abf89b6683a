#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/optim/optim.h"

namespace torch::nn {
class Module;
}

namespace lockstep::detail {

/// Stands for a value of any type but Self and its bases. As an rvalue it prefers a constructor of
/// the other type to its own conversion, which keeps std::optional's unambiguous.
template <class Self>
struct AnyField {
  template <class T>
  requires(!std::is_base_of_v<T, Self>) operator T() const&;  // NOLINT(google-explicit-constructor)
};
/// The same for a reference, which a value cannot initialize.
template <class Self>
struct AnyReference {
  template <class T>
  requires(!std::is_base_of_v<T, Self>) operator T&()
      const&;  // NOLINT(google-explicit-constructor)
};

template <class T, size_t>
using FieldAt = AnyField<T>;

template <class T, class... Last, size_t... I>
constexpr bool takes_fields(std::index_sequence<I...>) {
  return requires {
    T(FieldAt<T, I>{}..., Last{}...);
  };
}
template <class T, size_t... I>
constexpr bool takes_values(std::index_sequence<I...>) {
  return requires {
    T{FieldAt<T, I>{}...};
  };
}

inline constexpr size_t kMostFields = 12;

/// The largest number from 1 to one above kMostFields for which `fits` holds, or 0.
template <class Fits>
constexpr size_t largest_number(Fits fits) {
  size_t largest = 0;
  const auto look = [&]<size_t... I>(std::index_sequence<I...>) {
    ((fits(std::make_index_sequence<I + 1>()) ? largest = I + 1 : 0), ...);
  };
  look(std::make_index_sequence<kMostFields + 1>());
  return largest;
}

/// How many fields T has, where it is a simple aggregate: a struct whose fields a structured
/// binding gives. 0 for all else: more than kMostFields, a base class, an array or an lvalue
/// reference among them. The counting is that of Boost.PFR (A. Polukhin), by what T can be made of.
/// It takes C++20's initialization in parentheses: without it no type is simple.
template <class T>
constexpr size_t count_fields() {
  if constexpr (!std::is_aggregate_v<T> || std::is_array_v<T> || std::is_union_v<T>) {
    return 0;
  } else {
    // Braces may be left out around the values of an inner array, parentheses may not.
    constexpr size_t fields = largest_number([](auto number) { return takes_fields<T>(number); });
    constexpr size_t values = largest_number([](auto number) { return takes_values<T>(number); });
    constexpr bool goes_on = takes_fields<T, AnyReference<T>>(std::make_index_sequence<fields>());
    return fields == values && fields <= kMostFields && !goes_on ? fields : 0;
  }
}

/// References to all fields.
template <class T>
auto tie_fields(T& t) {
  constexpr size_t n = count_fields<T>();
  if constexpr (n == 1) {
    auto& [a] = t;
    return std::tie(a);
  } else if constexpr (n == 2) {
    auto& [a, b] = t;
    return std::tie(a, b);
  } else if constexpr (n == 3) {
    auto& [a, b, c] = t;
    return std::tie(a, b, c);
  } else if constexpr (n == 4) {
    auto& [a, b, c, d] = t;
    return std::tie(a, b, c, d);
  } else if constexpr (n == 5) {
    auto& [a, b, c, d, e] = t;
    return std::tie(a, b, c, d, e);
  } else if constexpr (n == 6) {
    auto& [a, b, c, d, e, f] = t;
    return std::tie(a, b, c, d, e, f);
  } else if constexpr (n == 7) {
    auto& [a, b, c, d, e, f, g] = t;
    return std::tie(a, b, c, d, e, f, g);
  } else if constexpr (n == 8) {
    auto& [a, b, c, d, e, f, g, h] = t;
    return std::tie(a, b, c, d, e, f, g, h);
  } else if constexpr (n == 9) {
    auto& [a, b, c, d, e, f, g, h, i] = t;
    return std::tie(a, b, c, d, e, f, g, h, i);
  } else if constexpr (n == 10) {
    auto& [a, b, c, d, e, f, g, h, i, j] = t;
    return std::tie(a, b, c, d, e, f, g, h, i, j);
  } else if constexpr (n == 11) {
    auto& [a, b, c, d, e, f, g, h, i, j, k] = t;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k);
  } else if constexpr (n == 12) {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l] = t;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l);
  } else {
    return std::tuple<>();
  }
}

}  // namespace lockstep::detail

namespace lockstep {

/// How DistributedDataParallel finds the tensors in what a module's forward returns. `visit` calls
/// `f` with a reference to each tensor, always in the same order. `f` may replace it.
///
/// A simple struct needs nothing: up to 12 fields, each with tensors to be found in, a number, an
/// enumeration or a std::string, and no base class, array or bit-field. Specialise for any other
/// type:
///
///     template <> struct lockstep::OutputTensors<MyOutput> {
///       template <class F> static void visit(MyOutput& output, F&& f) {
///         lockstep::visit_tensors(output.logits, f);
///         lockstep::visit_tensors(output.hidden, f);
///       }
///     };
template <class T>
struct OutputTensors;

/// Whether there are tensors to be found in a T: it is a tensor, one of the containers below of
/// such, a simple struct with such, or a type for which OutputTensors is specialised.
template <class T>
concept CarriesTensors = requires {
  sizeof(OutputTensors<T>);
};

template <class T, class F>
void visit_tensors(T& output, F&& f) {
  OutputTensors<T>::visit(output, f);
}

namespace detail {

/// None of a value without tensors.
template <class T>
std::vector<at::Tensor> collect_tensors(T& value) {
  std::vector<at::Tensor> tensors;
  if constexpr (CarriesTensors<T>)
    visit_tensors(value, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// Puts in others for those that collect_tensors gives.
template <class T>
void replace_tensors(T& value, const std::vector<at::Tensor>& others) {
  if constexpr (CarriesTensors<T>) {
    visit_tensors(value,
                  [&, next = size_t{0}](at::Tensor& tensor) mutable { tensor = others[next++]; });
  }
}

/// Of a container.
struct EachItem {
  template <class T, class F>
  static void visit(T& output, F&& f) {
    for (auto& item : output) visit_tensors(item, f);
  }
};

/// Of a tuple. Elements without tensors are passed over.
struct EachElement {
  template <class T, class F>
  static void visit(T&& output, F&& f) {
    const auto visit_one = [&]<class Element>(Element& element) {
      if constexpr (CarriesTensors<Element>) visit_tensors(element, f);
    };
    std::apply([&](auto&... elements) { (visit_one(elements), ...); }, output);
  }
};

}  // namespace detail

template <>
struct OutputTensors<at::Tensor> {
  template <class F>
  static void visit(at::Tensor& output, F&& f) {
    if (output.defined()) f(output);
  }
};

template <CarriesTensors T>
struct OutputTensors<std::optional<T>> {
  template <class F>
  static void visit(std::optional<T>& output, F&& f) {
    if (output) visit_tensors(*output, f);
  }
};

template <CarriesTensors T>
struct OutputTensors<std::vector<T>> : detail::EachItem {};

template <class K, CarriesTensors T>
struct OutputTensors<std::map<K, T>> : detail::EachItem {};

/// In the order of the keys where they have one: two maps of the same keys need not hold them in
/// the same order.
template <class K, CarriesTensors T>
struct OutputTensors<std::unordered_map<K, T>> {
  template <class F>
  static void visit(std::unordered_map<K, T>& output, F&& f) {
    std::vector<std::pair<const K, T>*> items;
    for (auto& item : output) items.push_back(&item);
    if constexpr (std::totally_ordered<K>) {
      std::sort(items.begin(), items.end(),
                [](const auto* a, const auto* b) { return a->first < b->first; });
    }
    for (auto* item : items) visit_tensors(item->second, f);
  }
};

template <CarriesTensors T, size_t N>
struct OutputTensors<std::array<T, N>> : detail::EachElement {};

template <class... Ts>
requires(CarriesTensors<Ts> || ...) struct OutputTensors<std::tuple<Ts...>> : detail::EachElement {
};

template <class A, class B>
requires(CarriesTensors<A> || CarriesTensors<B>) struct OutputTensors<std::pair<A, B>>
    : detail::EachElement {
};

namespace detail {

/// Of a std::shared_ptr or of LibTorch's ModuleHolder.
template <class ModulePtr>
std::shared_ptr<torch::nn::Module> module_pointer(const ModulePtr& module) {
  if constexpr (requires { module.ptr(); }) {
    return module.ptr();
  } else {
    return module;
  }
}

/// Surely holds no tensor.
template <class T>
concept HoldsNoTensor =
    std::is_arithmetic_v<T> || std::is_enum_v<T> || std::same_as<T, std::string>;

/// `T...` are the fields of a simple struct, of which each can be judged.
template <class... Ts>
constexpr bool fields_carry_tensors(std::type_identity<std::tuple<Ts&...>>) {
  return (CarriesTensors<Ts> || ...) && ((CarriesTensors<Ts> || HoldsNoTensor<Ts>)&&...);
}

template <class T>
concept SimpleStruct = count_fields<T>()
> 0 && fields_carry_tensors(std::type_identity<decltype(tie_fields(std::declval<T&>()))>());

/// The error of a forward that returns a type in which tensors must be found and cannot.
[[noreturn]] void throw_unknown_output(const std::string& type);

}  // namespace detail

/// In the order of the fields.
template <detail::SimpleStruct T>
struct OutputTensors<T> {
  template <class F>
  static void visit(T& output, F&& f) {
    detail::EachElement::visit(detail::tie_fields(output), f);
  }
};

/// While it lives, gradients are not synchronized between ranks.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(bool& synchronizing)
      : synchronizing_(synchronizing), before_(std::exchange(synchronizing, false)) {}
  ~NoSync() { synchronizing_ = before_; }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  bool& synchronizing_;
  bool before_;
};

/// What DistributedDataParallel and FullyShardedDataParallel share: a module with something to do
/// before and after its forward. `Core` does that. It has before_forward(), wants_outputs(),
/// after_forward(outputs), synchronizing(), group() and statistics().
template <class ModulePtr, class Core>
class WrappedModule {
  static_assert(
      !std::is_pointer_v<ModulePtr>,
      "the wrapper keeps its module: give it a std::shared_ptr or a module holder, no raw "
      "pointer. For a module on the stack take lockstep::GradientAverager(model, group)");
  static_assert(!std::is_base_of_v<torch::nn::Module, ModulePtr>,
                "the wrapper keeps its module: give it a std::shared_ptr or a module holder, no "
                "module. For a module on the stack take lockstep::GradientAverager(model, group)");

 public:
  template <class... Args>
  auto forward(Args&&... args) {
    core_->before_forward();
    auto output = module_->forward(std::forward<Args>(args)...);
    if (core_->wants_outputs()) {
      pass(output);
    } else {
      std::vector<at::Tensor> none;
      core_->after_forward(none);
    }
    return output;
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// While the guard lives, backward only adds gradients up on this rank. The first backward after
  /// it averages the sum. The forward must be inside too.
  NoSync no_sync() { return NoSync(core_->synchronizing()); }

  /// Of the module: its mode and its parameters, for an optimizer. A weight that several layers
  /// share is there once.
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }
  std::vector<at::Tensor> parameters() const { return unique_parameters(module_->parameters()); }

  /// The wrapped module: what to save, without any prefix in its names.
  auto& module() { return *module_; }
  const auto& module() const { return *module_; }
  const ProcessGroup& group() const { return core_->group(); }
  auto statistics() const { return core_->statistics(); }

 protected:
  WrappedModule(ModulePtr module, std::unique_ptr<Core> core)
      : module_(std::move(module)), core_(std::move(core)) {}

  ModulePtr module_;
  std::unique_ptr<Core> core_;

 private:
  /// Hands the tensors in `output` to the core, which may replace them.
  template <class Output>
  void pass(Output& output) {
    if constexpr (CarriesTensors<Output>) {
      std::vector<at::Tensor> tensors = detail::collect_tensors(output);
      core_->after_forward(tensors);
      detail::replace_tensors(output, tensors);
    } else {
      detail::throw_unknown_output(c10::demangle(typeid(Output).name()));
    }
  }
};

}  // namespace lockstep
