#include <ATen/ATen.h>

#include <algorithm>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/backends/call_queue.h"
#include "lockstep/comm/backends/gloo/gloo.h"
#include "lockstep/comm/backends/hierarchical/hierarchical.h"
#include "lockstep/comm/backends/hierarchical/hierarchy.h"
#include "lockstep/comm/backends/hierarchical/host_collectives.h"
#include "lockstep/comm/backends/shm/shm.h"
#include "lockstep/comm/backends/tensor_backend.h"
#include "lockstep/comm/checks/check_context.h"
#include "lockstep/comm/checks/checked_backend.h"

namespace lockstep::hierarchical {
namespace {

using backends::Blocks;
using backends::bytes_of;
using backends::Tensors;
using backends::TensorWork;
using Body = std::function<void(Hierarchy&)>;

/// A call by the hierarchy, and what it consists of.
class HierarchicalWork final : public TensorWork {
 public:
  HierarchicalWork(Hierarchy& hierarchy, int rank, backends::Request request,
                   std::shared_ptr<const backends::GroupNames> names)
      : TensorWork(rank, std::move(request), std::move(names)), hierarchy_(hierarchy) {}
  void add(Body body) { bodies_.push_back(std::move(body)); }
  bool run_here() override {
    if (request().async) return false;
    run_later();
    return true;
  }
  void run_later() override {
    hierarchy_.run(*this, request().timeout, [this] {
      if (bodies_.empty()) hierarchical::barrier(hierarchy_);
      for (const auto& body : bodies_) body(hierarchy_);
    });
  }

 private:
  Hierarchy& hierarchy_;
  std::vector<Body> bodies_;
};

/// A receive in the flat group, on a copy of a tensor that Gloo does not take. Gloo tells of a
/// message's end only to the one who waits for it, who then writes the result.
class StagedWork final : public TensorWork {
 public:
  using TensorWork::TensorWork;
  void end_with(c10::intrusive_ptr<c10d::Work> inner) { inner_ = std::move(inner); }

  int sourceRank() const override { return inner_->sourceRank(); }
  void abort() override { inner_->abort(); }
  bool wait(std::chrono::milliseconds timeout) override {
    std::exception_ptr error;
    try {
      if (!inner_->wait(timeout)) return false;
    } catch (...) {
      if (!inner_->isCompleted()) throw;
      error = std::current_exception();
    }
    std::call_once(once_, [&] { complete(error); });
    return TensorWork::wait(timeout);
  }

 private:
  c10::intrusive_ptr<c10d::Work> inner_;
  std::once_flag once_;
};

HierarchicalWork& own(TensorWork& work) {
  return static_cast<HierarchicalWork&>(work);
}

/// How tensors like this one are joined. Throws UsageError where the dtype has not that reduction.
Joining joining_of(const at::Tensor& tensor, const c10d::ReduceOp& op, int ranks) {
  const at::ScalarType type = tensor.scalar_type();
  const bool average = op.op_ == c10d::ReduceOp::AVG;
  Joining joining;
  joining.kernel = shm::kernel_for(type, average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op);
  if (average)
    joining.divide = [type, ranks](std::byte* data, size_t bytes) {
      const auto count = static_cast<int64_t>(bytes / c10::elementSize(type));
      backends::divide(at::from_blob(data, {count}, type), ranks);
    };
  return joining;
}

// Through it the flat group's failures are known to the hierarchy and the other way round.
std::shared_ptr<CheckContext> flat_checks(const BackendOptions& options) {
  auto checks =
      std::make_shared<CheckContext>(flat_store(options), options.rank, options.size,
                                     options.global_ranks, options.group_name, options.timeout);
  checks->remember_identities();
  return checks;
}

c10::intrusive_ptr<c10d::Backend> make_flat(const BackendOptions& options,
                                            const std::shared_ptr<CheckContext>& context,
                                            Hierarchy& hierarchy) {
  BackendOptions flat = options;
  flat.store = flat_store(options);
  try {
    const auto made = gloo::make(flat);
    auto checks = checks_of(options, made.traits);
    checks.context = context;
    hierarchy.exchange_over(made.backend);
    return make_checked_backend(made.backend, flat.store, checks);
  } catch (const std::exception&) {
    if (const auto failure = hierarchy.await_failure(kLostPatience))
      throw_failure(context->me() + ": forming group '" + options.group_name + "' failed: ",
                    *failure);
    throw;
  }
}

/// For ranks on several hosts, some of them on one. Collectives go by the hierarchy: through shared
/// memory on each host, and by one leader per host between them. CPU tensors of every dtype that
/// shm takes, contiguous or not. The results have the same bits on every rank and in every run. The
/// ranks' calls are compared at every collective.
///
/// Sends and receives go by a group of all ranks over Gloo. It compares the first messages of each
/// sender, receiver and tag, and gets copies of tensors that are not contiguous.
class HierarchicalBackend final : public backends::TensorBackend {
 public:
  HierarchicalBackend(const BackendOptions& options, const HostLayout& layout)
      : TensorBackend(options),
        checks_(flat_checks(options)),
        hierarchy_(options, layout, checks_),
        flat_(make_flat(options, checks_, hierarchy_)) {}
  ~HierarchicalBackend() override { queue_.close(); }

  const std::string getBackendName() const override { return "hierarchical"; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    TensorBackend::setTimeout(timeout);
    flat_->setTimeout(timeout);
  }
  void abort() override {
    hierarchy_.abort();
    queue_.close();
    hierarchy_.leave();
    flat_->abort();
  }
  void shutdown() override {
    queue_.close();
    hierarchy_.leave();
    flat_->shutdown();
  }

 private:
  OwnWork make_work(backends::Request request) override {
    return c10::make_intrusive<HierarchicalWork>(hierarchy_, getRank(), std::move(request),
                                                 names());
  }
  void submit(const OwnWork& work) override { queue_.submit(work); }
  at::ScalarType reduction_dtype(at::ScalarType dtype, const c10d::ReduceOp& op) const override {
    shm::kernel_for(dtype, op);
    return dtype;
  }
  void add_all_reduce(TensorWork& work, const at::Tensor& data, const c10d::ReduceOp& op) override {
    own(work).add([data, joining = joining_of(data, op, getSize())](Hierarchy& hierarchy) {
      hierarchical::all_reduce(hierarchy, bytes_of(data), data.nbytes(), joining);
    });
  }
  // Tensors travel as one, those of different dtypes each by itself: what is small costs a message
  // between hosts each otherwise.
  void add_all_reduces(TensorWork& work, const Tensors& data, const c10d::ReduceOp& op) override {
    if (!std::ranges::all_of(data, [&](const at::Tensor& tensor) {
          return tensor.scalar_type() == data[0].scalar_type();
        }))
      return TensorBackend::add_all_reduces(work, data, op);
    if (data.empty()) return;
    own(work).add([data, joining = joining_of(data[0], op, getSize())](Hierarchy& hierarchy) {
      size_t bytes = 0;
      for (const auto& tensor : data) bytes += tensor.nbytes();
      const auto flat = std::make_unique_for_overwrite<std::byte[]>(bytes);
      std::byte* at = flat.get();
      for (const auto& tensor : data) at = std::copy_n(bytes_of(tensor), tensor.nbytes(), at);
      hierarchical::all_reduce(hierarchy, flat.get(), bytes, joining);
      at = flat.get();
      for (const auto& tensor : data) {
        std::copy_n(at, tensor.nbytes(), bytes_of(tensor));
        at += tensor.nbytes();
      }
    });
  }
  void add_broadcast(TensorWork& work, const at::Tensor& data, int root) override {
    own(work).add([data, root](Hierarchy& hierarchy) {
      hierarchical::broadcast(hierarchy, bytes_of(data), data.nbytes(), root);
    });
  }
  void add_all_gather(TensorWork& work, const at::Tensor& input, Blocks outputs) override {
    own(work).add([input, outputs = std::move(outputs)](Hierarchy& hierarchy) {
      hierarchical::all_gather(hierarchy, bytes_of(input), input.nbytes(), outputs);
    });
  }
  void add_reduce_scatter(TensorWork& work, Blocks inputs, const at::Tensor& output,
                          const c10d::ReduceOp& op) override {
    own(work).add([sources = std::vector<const std::byte*>(inputs.begin(), inputs.end()), output,
                   joining = joining_of(output, op, getSize())](Hierarchy& hierarchy) {
      hierarchical::reduce_scatter(hierarchy, sources, bytes_of(output), output.nbytes(), joining);
    });
  }
  // As all_reduce, which is what all but the root throw away.
  void add_reduce(TensorWork& work, const at::Tensor& data, const c10d::ReduceOp& op,
                  int root) override {
    own(work).add([data, is_root = getRank() == root,
                   joining = joining_of(data, op, getSize())](Hierarchy& hierarchy) {
      if (is_root)
        return hierarchical::all_reduce(hierarchy, bytes_of(data), data.nbytes(), joining);
      const auto copy = std::make_unique_for_overwrite<std::byte[]>(data.nbytes());
      std::copy_n(bytes_of(data), data.nbytes(), copy.get());
      hierarchical::all_reduce(hierarchy, copy.get(), data.nbytes(), joining);
    });
  }
  void add_gather(TensorWork& work, const at::Tensor& input, Blocks outputs, int root) override {
    own(work).add([this, input, outputs = std::move(outputs), root](Hierarchy& hierarchy) {
      hierarchical::gather(hierarchy, *flat_, bytes_of(input), input.nbytes(), outputs, root);
    });
  }
  void add_scatter(TensorWork& work, Blocks inputs, const at::Tensor& output, int root) override {
    own(work).add([this, inputs = std::move(inputs), output, root](Hierarchy& hierarchy) {
      hierarchical::scatter(hierarchy, *flat_, inputs, bytes_of(output), output.nbytes(), root);
    });
  }
  void add_all_to_all(TensorWork& work, at::ScalarType, backends::Buffers sends,
                      backends::Buffers receives) override {
    own(work).add(
        [this, sends = std::move(sends), receives = std::move(receives)](Hierarchy& hierarchy) {
          hierarchical::all_to_all(hierarchy, *flat_, sends, receives);
        });
  }
  WorkPtr message(Operation operation, const at::Tensor& tensor, int peer, int tag) override {
    // Outside of autograd.
    const auto plain = [](const at::Tensor& one) {
      return Tensors{one.requires_grad() ? one.detach() : one};
    };
    auto work = c10::make_intrusive<StagedWork>(getRank(), message_request(operation, tensor, peer),
                                                names());
    if (operation == Operation::send) {
      Tensors data = plain(work->given(tensor));
      return flat_->send(data, peer, tag);
    }
    const at::Tensor memory = work->taken(tensor, false);
    Tensors data = plain(memory);
    auto inner = operation == Operation::recv ? flat_->recv(data, peer, tag)
                                              : flat_->recvAnysource(data, tag);
    if (memory.is_same(tensor)) return inner;
    work->end_with(std::move(inner));
    return work;
  }

  const std::shared_ptr<CheckContext> checks_;  ///< Of the flat group.
  Hierarchy hierarchy_;
  backends::CallQueue queue_;
  /// All ranks, over Gloo: for messages, and between leaders.
  c10::intrusive_ptr<c10d::Backend> flat_;
};

}  // namespace

BackendInfo info() {
  BackendInfo info = shm::info();
  info.name = "hierarchical";
  info.traits = kTraits;
  return info;
}

MadeBackend make(const BackendOptions& options) {
  const HostLayout layout = HostLayout::of(meet(options), options.rank);
  if (layout.one_host()) return shm::make(options);
  if (layout.one_rank_a_host()) return gloo::make(options);
  return {c10::make_intrusive<HierarchicalBackend>(options, layout), kTraits};
}

}  // namespace lockstep::hierarchical
