// The extension `lockstep._C`: makes a backend of comm for a process group of Python's
// torch.distributed.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/exception.h>
#include <algorithm>
#include <numeric>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/host_address.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/gloo/gloo.h"
#include "lockstep/comm/backends/hierarchical/hierarchical.h"
#include "lockstep/comm/backends/hierarchical/host_layout.h"
#include "lockstep/comm/backends/shm/shm.h"
#include "lockstep/comm/backends/tensor_backend.h"
#include "lockstep/comm/checks/checked_backend.h"
#include "lockstep/comm/shared_memory/host_key.h"

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace py = pybind11;

namespace lockstep {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// PyTorch's own tests look for the word, between spaces.
std::string with_the_word_timeout(std::string text) {
  constexpr std::string_view kOurs = "(timed out)";
  const size_t at = text.find(kOurs);
  return at == std::string::npos ? text
                                 : text.replace(at, kOurs.size(), "(the timeout has passed)");
}

/// What torch.distributed's programs catch, with our text.
std::exception_ptr as_torch_error(std::exception_ptr error) {
  const auto of = [](auto type, const std::exception& what) {
    using Type = typename decltype(type)::type;
    return std::make_exception_ptr(Type({__func__, __FILE__, __LINE__}, what.what()));
  };
  try {
    std::rethrow_exception(error);
  } catch (const TimeoutError& timeout) {
    return of(std::type_identity<c10d::TimeoutError>(),
              std::runtime_error(with_the_word_timeout(timeout.what())));
  } catch (const UsageError& usage) {
    return of(std::type_identity<c10::ValueError>(), usage);
  } catch (const Error& other) {
    return of(std::type_identity<c10::DistBackendError>(), other);
  } catch (...) {
    return error;
  }
}

/// What a rank tells the others before they choose a backend.
struct Member {
  std::string host_key;  ///< See host_key.h.
  std::string identity;  ///< Of its process.
};

/// A group of Python's while it forms.
class Forming {
 public:
  explicit Forming(BackendOptions options) : options_(std::move(options)) {}

  /// Blocks until all ranks have told where they are. Throws TimeoutError naming those that have
  /// not.
  void meet() {
    options_.store->set(key(options_.rank),
                        hierarchical::host_key_of(options_) + "\n" + process_identity());
    std::vector<std::string> keys;
    for (int rank = 0; rank < options_.size; ++rank) keys.push_back(key(rank));
    try {
      options_.store->wait(keys, options_.timeout);
    } catch (const c10::Error&) {
      throw_missing(keys);
      throw;
    }
    for (const auto& value : options_.store->multiGet(keys)) {
      const auto lines = split(std::string(value.begin(), value.end()), '\n');
      members_.push_back({lines.at(0), lines.at(1)});
    }
  }

  std::vector<std::string> host_keys() const {
    std::vector<std::string> host_keys;
    for (const auto& member : members_) host_keys.push_back(member.host_key);
    return host_keys;
  }

  /// BackendOptions::look.
  void look(const std::vector<int>& missing) const {
    for (const int rank : missing) {
      const auto& identity = members_.at(static_cast<size_t>(rank)).identity;
      if (process_state(identity) == ProcessState::ended)
        throw PeerLostError(what() + ": " + with_process(name(rank), identity) + " has ended");
    }
  }

 private:
  static std::string key(int rank) { return "member/" + std::to_string(rank); }
  std::string name(int rank) const {
    return "rank " + std::to_string(options_.global_ranks.at(static_cast<size_t>(rank)));
  }
  std::string what() const {
    return name(options_.rank) + ": forming the group '" + options_.group_name + "' of " +
           std::to_string(options_.size) + " ranks failed";
  }
  void throw_missing(const std::vector<std::string>& keys) const {
    std::vector<int> missing;
    for (size_t i = 0; i < keys.size(); ++i)
      if (!options_.store->check({keys[i]})) missing.push_back(options_.global_ranks.at(i));
    if (missing.empty()) return;
    throw_late(what() + ": ", missing, options_.timeout,
               "did every rank start, and make the same groups in the same order?");
  }

  const BackendOptions options_;
  std::vector<Member> members_;
};

/// What was chosen for a group, and why.
struct Choice {
  std::string name;
  std::string reason;
};

Choice choose(const std::vector<std::string>& host_keys) {
  const std::string ranks = std::to_string(host_keys.size()) + " ranks";
  const std::string name = hierarchical::backend_for(host_keys);
  if (host_keys.size() == 1) return {name, "the group has one rank"};
  if (name == "shm") return {name, "all " + ranks + " share one host"};
  const auto hosts = hierarchical::HostLayout::of(host_keys, 0).hosts.size();
  return {name, ranks + " on " + std::to_string(hosts) + " hosts"};
}

MadeBackend make(const std::string& name, const BackendOptions& options) {
  if (name == "shm") return shm::make(options);
  if (name == "hierarchical") return hierarchical::make(options);
  return gloo::make(options);
}

c10::intrusive_ptr<c10d::Backend> with_checks(MadeBackend made, const BackendOptions& options) {
  CheckedBackendOptions checks = checks_of(options, made.traits);
  checks.convert = as_torch_error;
  checks.recorded = true;
  return make_checked_backend(std::move(made.backend), options.store, std::move(checks));
}

struct Made {
  c10::intrusive_ptr<c10d::Backend> backend;
  Choice choice;
};

/// Before anything is told to the others.
void check(const BackendOptions& options) {
  if (options.rank < 0 || options.rank >= options.size) {
    throw UsageError("rank=" + std::to_string(options.rank) + " is out of range: a group of " +
                     std::to_string(options.size) + " ranks has 0 to " +
                     std::to_string(options.size - 1));
  }
  constexpr std::chrono::hours kLongest{24 * 365 * 100};
  if (options.timeout <= std::chrono::milliseconds::zero() || options.timeout > kLongest) {
    throw UsageError("timeout: expected more than 0 ms and at most 100 years, got " +
                         std::to_string(options.timeout.count()) + " ms",
                     "timedelta.max counts as less than 0");
  }
}

Made form(BackendOptions options) {
  check(options);
  if (options.global_ranks.empty()) {  // Python's way to say: the default group.
    options.global_ranks.resize(static_cast<size_t>(options.size));
    std::iota(options.global_ranks.begin(), options.global_ranks.end(), 0);
  }
  // A group that is destroyed and made again finds the old one's keys in the store.
  const int64_t times = options.store->add("lockstep/made/" + std::to_string(options.rank), 1);
  options.store =
      c10::make_intrusive<c10d::PrefixStore>("lockstep/" + std::to_string(times), options.store);
  options.interface = env_string("GLOO_SOCKET_IFNAME").value_or("");
  options.address = reachable_address(env_string("MASTER_ADDR").value_or(""));
  options.debug = debug_level();
  const auto forming = std::make_shared<Forming>(options);
  forming->meet();
  options.look = [forming](const std::vector<int>& missing) { forming->look(missing); };
  Choice choice = choose(forming->host_keys());
  announce_checks(*options.store, options.rank, options.group_name, options.debug);
  MadeBackend made = make(choice.name, options);
  // Programs look for the name that they gave.
  if (auto* ours = dynamic_cast<backends::TensorBackend*>(made.backend.get()))
    ours->record_as("lockstep");
  return {with_checks(std::move(made), options), std::move(choice)};
}

Made make_backend(const StorePtr& store, int rank, int size, std::chrono::milliseconds timeout,
                  const std::string& group_name, const std::vector<int>& global_ranks) {
  const py::gil_scoped_release others_run;
  BackendOptions options;
  options.store = store;
  options.rank = rank;
  options.size = size;
  options.timeout = timeout;
  options.group_name = group_name;
  options.global_ranks = global_ranks;
  try {
    return form(std::move(options));
  } catch (...) {
    std::rethrow_exception(as_torch_error(std::current_exception()));
  }
}

}  // namespace
}  // namespace lockstep

PYBIND11_MODULE(_C, module) {
  using lockstep::Made;
  py::module_::import("torch.distributed");  // Has the types of stores and backends.
  py::class_<Made>(module, "Made", "A group's backend.")
      .def_readonly("backend", &Made::backend, "What torch.distributed calls.")
      .def_property_readonly("name", [](const Made& made) { return made.choice.name; })
      .def_property_readonly("reason", [](const Made& made) { return made.choice.reason; });
  module.def("make_backend", &lockstep::make_backend, py::arg("store"), py::arg("rank"),
             py::arg("size"), py::arg("timeout"), py::arg("group_name"), py::arg("global_ranks"),
             "Forms a group. All its ranks call it, and it returns when all have come.");
}
