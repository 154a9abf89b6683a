#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/rpc/future.h"
#include "lockstep/rpc/rref.h"
#include "lockstep/rpc/value.h"

namespace lockstep::rpc {

namespace detail {

/// What a handler gave: a value, or a state that will have one.
struct HandlerResult {
  at::IValue value;
  std::shared_ptr<CallState> later;
};
/// Runs a function on arguments as they came.
using Handler = std::function<HandlerResult(std::vector<at::IValue>& arguments)>;

/// A function as both ends know it.
struct Signature {
  std::string name;
  std::string types;  ///< "(Tensor, int64) -> Tensor"
  int64_t hash = 0;   ///< Of the types.
};
Signature make_signature(std::string name, std::string types);

/// Makes the function known to this process. Throws UsageError for a name that is taken or empty.
void register_function(const Signature& signature, Handler handler);

template <class T>
using Plain = std::remove_cvref_t<T>;

/// The result of a function as the caller sees it: of a Future what it will hold; of an object that
/// cannot travel, and of a pointer to one, nothing but an RRef.
template <class R>
struct ResultOf {
  using type = R;
};
template <class T>
struct ResultOf<Future<T>> {
  using type = T;
};

template <class R>
std::string result_type() {
  using Result = ResultOf<R>::type;
  if constexpr (std::is_void_v<Result>)
    return "None";
  else if constexpr (Sendable<Result>)
    return Value<Result>::type();
  else
    return "object";
}

template <class R, class... A>
std::string types_text() {
  return "(" + type_names<A...>() + ") -> " + result_type<R>();
}

template <class R, class F>
HandlerResult result_of(F&& run) {
  if constexpr (!std::is_same_v<R, typename ResultOf<R>::type>) {  // A Future.
    return {{}, run().state()};
  } else if constexpr (std::is_void_v<R>) {
    run();
    return {};
  } else if constexpr (Sendable<R>) {
    return {Value<R>::to(run()), nullptr};
  } else {
    return {object_value(run()), nullptr};
  }
}

template <class R, class... A, class F, size_t... I>
HandlerResult run_handler(const F& function, std::vector<at::IValue>& arguments,
                          std::index_sequence<I...>) {
  if (arguments.size() != sizeof...(A)) {
    throw_other_kind(std::to_string(sizeof...(A)) + " arguments", make_tuple(arguments));
  }
  return result_of<R>(
      [&]() -> R { return std::invoke(function, Value<A>::from(arguments[I])...); });
}

}  // namespace detail

/// A function that workers can call, by its name and its types. Made by `rpc::function`.
template <class Types>
class Function;

template <class R, class... A>
class Function<R(A...)> {
 public:
  using Result = detail::ResultOf<R>::type;

  /// One that is registered at the worker that will be called, though not here.
  explicit Function(std::string name)
      : signature_(std::make_shared<detail::Signature>(
            detail::make_signature(std::move(name), detail::types_text<R, A...>()))) {}

  const std::string& name() const { return signature_->name; }
  /// "(Tensor, int64) -> Tensor"
  const std::string& types() const { return signature_->types; }
  const detail::Signature& signature() const { return *signature_; }

  /// The arguments as they travel. Converts them to the function's types as a plain call would.
  static std::vector<at::IValue> pack(A... arguments) {
    std::vector<at::IValue> packed;
    packed.reserve(sizeof...(A));
    (packed.push_back(Value<A>::to(std::move(arguments))), ...);
    return packed;
  }

 private:
  std::shared_ptr<detail::Signature> signature_;
};

namespace detail {

template <class R, class... A>
struct Registrar {
  template <class F>
  static Function<R(Plain<A>...)> add(std::string name, F function) {
    static_assert(std::is_invocable_v<const F&, Plain<A>...>,
                  "the function must be callable by several threads at once (no mutable lambda), "
                  "and take its arguments by value or by const reference");
    static_assert((Sendable<Plain<A>> && ...),
                  "an argument's type cannot travel: give the struct a function rpc_fields");
    Function<R(Plain<A>...)> handle(std::move(name));
    register_function(
        handle.signature(), [function = std::move(function)](std::vector<at::IValue>& arguments) {
          return run_handler<R, Plain<A>...>(function, arguments, std::index_sequence_for<A...>());
        });
    return handle;
  }
};

/// The types of a function, function pointer, lambda or other object with one call operator.
template <class R, class... A>
Registrar<R, A...> registrar_of(const std::function<R(A...)>*);

}  // namespace detail

/// Registers a function under a name that is the same on all workers, and gives the handle by which
/// it is called. Its types are deduced: a plain function, a lambda or another object with one call
/// operator. It runs on several threads at once. Usually at namespace scope, so that each process
/// of the program has it:
///
///     const auto add = rpc::function("add", [](at::Tensor a, at::Tensor b) { return a + b; });
///
/// - Arguments and result are of the types of value.h. References are to values of the call's own.
/// - A function that returns a Future answers when the Future is done, and frees its thread at
///   once.
/// - One that returns a std::shared_ptr to, or an object of, any other class is for `remote` only.
/// - Functions may call other workers' functions, nested to any depth.
///
/// Throws UsageError when the name is taken.
template <class F>
auto function(std::string name, F function) {
  using Standard = decltype(std::function(function));
  using Registrar = decltype(detail::registrar_of(static_cast<const Standard*>(nullptr)));
  return Registrar::add(std::move(name), std::move(function));
}

/// Registers a member function: the first argument is then an RRef to the object, and it runs where
/// the object is. `rref.rpc_sync(handle, arguments...)` calls it.
template <class C, class R, class... A>
Function<R(RRef<C>, detail::Plain<A>...)> method(std::string name, R (C::*member)(A...)) {
  return detail::Registrar<R, RRef<C>, A...>::add(
      std::move(name), [member](const RRef<C>& object, detail::Plain<A>... arguments) -> R {
        return (object.local_value().*member)(std::move(arguments)...);
      });
}
template <class C, class R, class... A>
Function<R(RRef<C>, detail::Plain<A>...)> method(std::string name, R (C::*member)(A...) const) {
  return detail::Registrar<R, RRef<C>, A...>::add(
      std::move(name), [member](const RRef<C>& object, detail::Plain<A>... arguments) -> R {
        return (object.local_value().*member)(std::move(arguments)...);
      });
}

struct BatchOptions {
  /// The most requests in a batch. The number of callers is a good choice: more never arrive
  /// together. Callers that stop while others go on leave batches short: each then takes `delay`.
  int64_t size = 16;
  /// The first request of a batch waits no longer than this for others. The default is several
  /// times the duration of a call, so that slower callers are included.
  std::chrono::milliseconds delay{10};
};

namespace detail {

/// Runs a task on one of the worker's handler threads after a while. When the worker leaves before,
/// the task is dropped.
void run_later(std::chrono::milliseconds delay, std::function<void()> task);

/// Throws UsageError for sizes and delays out of range.
void check_batch_options(const std::string& name, const BatchOptions& options);

/// Gathers requests until they are enough or late. Any thread.
template <class A, class R>
class Batcher : public std::enable_shared_from_this<Batcher<A, R>> {
 public:
  using Run = std::function<std::vector<R>(std::vector<A>)>;
  Batcher(Run run, const BatchOptions& options) : run_(std::move(run)), options_(options) {}

  Future<R> add(A request) {
    const Promise<R> promise;
    Batch full;
    bool first = false;
    int64_t number = 0;
    {
      const std::lock_guard lock(mutex_);
      first = batch_.requests.empty();
      number = number_;
      batch_.requests.push_back(std::move(request));
      batch_.promises.push_back(promise);
      if (static_cast<int64_t>(batch_.requests.size()) >= options_.size) full = take();
    }
    if (!full.requests.empty()) {
      answer(std::move(full));
    } else if (first) {
      run_later(options_.delay, [self = this->shared_from_this(), number] { self->late(number); });
    }
    return promise.future();
  }

 private:
  struct Batch {
    std::vector<A> requests;
    std::vector<Promise<R>> promises;
  };

  Batch take() {
    ++number_;
    return std::exchange(batch_, Batch());
  }

  void late(int64_t number) {
    Batch waiting;
    {
      const std::lock_guard lock(mutex_);
      if (number != number_) return;  // That batch was full in time.
      waiting = take();
    }
    answer(std::move(waiting));
  }

  void answer(Batch batch) const {
    try {
      const size_t size = batch.requests.size();
      std::vector<R> results = run_(std::move(batch.requests));
      if (results.size() != size) {
        throw UsageError("rpc: a batch of " + std::to_string(size) + " requests got " +
                         std::to_string(results.size()) + " results");
      }
      for (size_t i = 0; i < size; ++i) batch.promises[i].set_value(std::move(results[i]));
    } catch (...) {
      for (const auto& promise : batch.promises) promise.set_exception(std::current_exception());
    }
  }

  const Run run_;
  const BatchOptions options_;
  std::mutex mutex_;
  Batch batch_;
  int64_t number_ = 0;  ///< Of the batch that is being gathered.
};

/// `List`: std::vector<A>, by value or by const reference.
template <class R, class List>
auto add_batched(std::string name, std::function<std::vector<R>(List)> run,
                 const BatchOptions& options) {
  using A = std::remove_cvref_t<List>::value_type;
  check_batch_options(name, options);
  auto batcher = std::make_shared<Batcher<A, R>>(std::move(run), options);
  return function(std::move(name),
                  [batcher](A request) { return batcher->add(std::move(request)); });
}

}  // namespace detail

/// Registers a function of a list of requests, which gives their results in the same order. Callers
/// call it with one request each and get its result. Requests that arrive together are answered
/// together, which is faster where one large operation takes the place of many small ones:
///
///     const auto select_action = rpc::batched(
///         "select_action",
///         [](std::vector<at::Tensor> states) { return policy(at::stack(states)).unbind(); },
///         {.size = 8});
///
/// No thread waits while requests are gathered. Batches do not belong to the callers' autograd
/// contexts. An exception fails all requests of its batch. Several batches may run at once.
template <class F>
auto batched(std::string name, F function, const BatchOptions& options = {}) {
  return detail::add_batched(std::move(name), std::function(std::move(function)), options);
}

}  // namespace lockstep::rpc
