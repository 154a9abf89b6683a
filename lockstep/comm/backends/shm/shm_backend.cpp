#include "lockstep/comm/backends/shm/shm_backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/backends/shm/shm.h"

namespace lockstep::shm {
namespace {

ShmWork& own(TensorWork& work) {
  return static_cast<ShmWork&>(work);
}

/// Of the ring between two ranks. The longer it is, the less often they wait for each other, which
/// on a machine that others use too costs milliseconds each time. A rank's rings share 4 MB.
size_t ring_bytes(int ranks) {
  constexpr size_t kOfRank = 4 << 20, kLeast = 64 << 10, kMost = 2 << 20;
  return std::clamp(kOfRank / static_cast<size_t>(std::max(1, ranks - 1)), kLeast, kMost);
}

SharedGroupOptions group_options(const BackendOptions& options) {
  SharedGroupOptions group;
  group.rank = options.rank;
  group.size = options.size;
  group.timeout = options.timeout;
  group.group = options.group_name;
  group.look = options.look;
  group.message_bytes = ring_bytes(options.size);
  group.names = options.global_ranks;
  group.judge = [names = options.global_ranks,
                 name = options.group_name](const std::vector<std::string>& encoded) {
    std::vector<CallSignature> calls;
    for (const auto& call : encoded) calls.push_back(decode(call));
    return find_mismatch(calls, names, name)
        .value_or(mismatch_of(
            {},
            "the ranks of group '" + name +
                "' did not reduce the same part of the same symmetric memory\n  hint: symmetric "
                "memory (in C++ ProcessGroup::symmetric_empty gives it) must be used alike on "
                "all ranks"));
  };
  return group;
}

Meeting meeting_over(const c10::intrusive_ptr<c10d::Store>& store, const std::string& key) {
  return {[store, key](const std::string& name) { store->set(key, name); },
          [store, key] { return store->get_to_str(key); }};
}

}  // namespace

ReduceKernel kernel_for(at::ScalarType type, const c10d::ReduceOp& op) {
  using Op = c10d::ReduceOp;
  static_assert(static_cast<DataType>(at::kDouble) == DataType::f64 &&
                static_cast<DataType>(at::kBool) == DataType::boolean &&
                static_cast<DataType>(at::kComplexDouble) == DataType::c128 &&
                static_cast<DataType>(at::kBFloat16) == DataType::bf16 &&
                static_cast<Reduction>(Op::AVG) == Reduction::avg &&
                static_cast<Reduction>(Op::MAX) == Reduction::max &&
                static_cast<Reduction>(Op::BXOR) == Reduction::bxor);
  const auto kernel = reduce_kernel(static_cast<DataType>(type), static_cast<Reduction>(op.op_));
  if (kernel) return kernel;
  throw UsageError(std::string("shared memory has no reductions of dtype ") + c10::toString(type),
                   "convert the tensor first, for instance to float32");
}

ShmBackend::ShmBackend(const BackendOptions& options)
    : TensorBackend(options),
      steps_(options.steps),
      store_(options.store),
      // Where a thread beside each rank's own has a processor as well.
      inline_bytes_(2 * static_cast<size_t>(options.size) <= allowed_processors().size()
                        ? 256 << 10
                        : SIZE_MAX),
      group_(group_options(options), meeting_over(options.store, "shm/meeting")),
      messages_(group_, [names = names()](const Disagreement& met) {
        return judge_messages(met, *names);
      }) {}

ShmBackend::~ShmBackend() {
  shutdown();
}

ShmBackend::OwnWork ShmBackend::make_work(backends::Request request) {
  return c10::make_intrusive<ShmWork>(group_, inline_bytes_, std::move(request), names());
}

void ShmBackend::submit(const OwnWork& work) {
  own(*work).close();
  queue_.submit(work);
}

at::ScalarType ShmBackend::reduction_dtype(at::ScalarType dtype, const c10d::ReduceOp& op) const {
  kernel_for(dtype, op);
  return dtype;
}

void ShmBackend::add_all_reduce(TensorWork& work, const at::Tensor& data,
                                const c10d::ReduceOp& op) {
  const ReduceKernel kernel = kernel_for(data.scalar_type(), op);
  if (work.request().operation == Operation::all_reduce && pays_in_place(group_, data.nbytes())) {
    if (auto found = regions_.find(bytes_of(data), data.nbytes())) {
      own(work).add(all_reduce_plan(group_, *found->region, found->offset, data.nbytes(), kernel));
      return own(work).set_region(std::move(*found));
    }
  }
  own(work).add(all_reduce_plan(group_, bytes_of(data), data.nbytes(), kernel));
}

void ShmBackend::add_broadcast(TensorWork& work, const at::Tensor& data, int root) {
  own(work).add(broadcast_plan(group_, bytes_of(data), data.nbytes(), root));
}

void ShmBackend::add_all_gather(TensorWork& work, const at::Tensor& input, Blocks outputs) {
  own(work).add(all_gather_plan(group_, bytes_of(input), input.nbytes(), std::move(outputs)));
}

void ShmBackend::add_reduce_scatter(TensorWork& work, Blocks inputs, const at::Tensor& output,
                                    const c10d::ReduceOp& op) {
  const ReduceKernel kernel = kernel_for(output.scalar_type(), op);
  const size_t whole = output.nbytes() * inputs.size();
  // Others would read what an output in the region overwrites.
  if (work.request().operation == Operation::reduce_scatter_tensor &&
      pays_in_place(group_, whole) && !regions_.find(bytes_of(output), output.nbytes())) {
    // Its inputs lie one after the other.
    if (auto found = regions_.find(inputs.front(), whole)) {
      own(work).add(reduce_scatter_plan(group_, *found->region, found->offset, bytes_of(output),
                                        output.nbytes(), kernel));
      return own(work).set_region(std::move(*found));
    }
  }
  own(work).add(reduce_scatter_plan(group_, {inputs.begin(), inputs.end()}, bytes_of(output),
                                    output.nbytes(), kernel));
}

void ShmBackend::add_reduce(TensorWork& work, const at::Tensor& data, const c10d::ReduceOp& op,
                            int root) {
  own(work).add(
      reduce_plan(group_, bytes_of(data), data.nbytes(), kernel_for(data.scalar_type(), op), root));
}

// Ranks without outputs take nothing.
void ShmBackend::add_gather(TensorWork& work, const at::Tensor& input, Blocks outputs, int) {
  add_all_gather(work, input, std::move(outputs));
}

void ShmBackend::add_scatter(TensorWork& work, Blocks inputs, const at::Tensor& output, int root) {
  own(work).add(scatter_plan(group_, {inputs.begin(), inputs.end()}, bytes_of(output),
                             output.nbytes(), root));
}

void ShmBackend::add_all_to_all(TensorWork& work, at::ScalarType, Buffers sends, Buffers receives) {
  own(work).add(
      all_to_all_plan(group_, work, std::move(sends), std::move(receives), work.request().timeout));
}

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  if (size < 0 || !options.device().is_cpu())
    throw UsageError("symmetric memory: " + std::to_string(size) + " elements on " +
                     options.device().str() + "; expected 0 or more on the CPU");
  agree(Operation::symmetric_empty, at::empty({1}, options).expand({size}));
  const size_t bytes = static_cast<size_t>(size) * options.dtype().itemsize();
  const auto region = make_region(bytes, "symmetric_empty of " + std::to_string(bytes) + " bytes");
  regions_.add(regions_made_, region);
  return at::from_blob(
      region->mine(), {size}, [region](void*) {}, options);
}

/// Parts of whole pages lie one after the other, so all of them are one memory.
at::Tensor ShmBackend::allocate_common(int64_t numel, at::ScalarType dtype) {
  // Of another shape than symmetric_empty's.
  agree(Operation::symmetric_empty, at::empty({1, 1}, dtype).expand({1, numel}));
  const auto ranks = static_cast<size_t>(getSize());
  const size_t bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  const size_t part = whole_pages(std::max<size_t>(1, (bytes + ranks - 1) / ranks));
  const auto region = make_region(part, "common_empty of " + std::to_string(bytes) + " bytes");
  return at::from_blob(
      region->part(0), {numel}, [region](void*) {}, at::TensorOptions().dtype(dtype));
}

std::shared_ptr<const Region> ShmBackend::make_region(size_t part_bytes, const std::string& what) {
  const size_t number = ++regions_made_;
  const std::string asked =
      what + ", number " + std::to_string(number) + " of group '" + names()->group + "',";
  const std::string key = "shm/region/" + std::to_string(number);
  Meeting meeting = meeting_over(store_, key);
  meeting.ask = [this, key] {
    return store_->check({key}) ? store_->get_to_str(key) : std::string();
  };
  MeetingOptions wish{getRank(), getSize(), timeout(), names()->group, group_.names()};
  wish.look = [&](const std::vector<int>& ranks) { group_.look_after(ranks, asked); };
  return std::make_shared<const Region>(wish, part_bytes, meeting);
}

ShmBackend::WorkPtr ShmBackend::message(Operation operation, const at::Tensor& tensor, int peer,
                                        int tag) {
  backends::Request request = message_request(operation, tensor, peer);
  show(request);
  auto work = c10::make_intrusive<ShmMessageWork>(getRank(), std::move(request), names());
  work->begin(messages_, queue_, tag);
  return work;
}

void ShmBackend::abort() {
  constexpr auto kGaveUp = Failure::Kind::gave_up;
  Failure failure{.kind = kGaveUp,
                  .ranks = {group_.member(getRank(), kGaveUp)},
                  .cause = group_.noted_cause(getRank())};
  if (const auto late = messages_.late(); !failure.cause && !late.empty())
    failure.detail = "; it failed in " + late;
  group_.fail(failure);
  shutdown();
}

void ShmBackend::shutdown() {
  messages_.close();  // First: callbacks of what fails run in the queue's threads.
  queue_.close();
  // After a failure it is not the loop's end.
  group_.leave(steps_ && !group_.failed() ? steps_->load() : 0);
}

BackendInfo info() {
  return {"shm", true, {}, {}, kTraits};
}

MadeBackend make(const BackendOptions& options) {
  return {c10::make_intrusive<ShmBackend>(options), kTraits};
}

}  // namespace lockstep::shm
