#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/mpi/mpi.h"
#include "lockstep/comm/backends/mpi/mpi_engine.h"
#include "lockstep/comm/backends/mpi/mpi_work.h"
#include "lockstep/comm/backends/tensor_backend.h"

namespace lockstep::mpi {
namespace {

using backends::Blocks;
using backends::Buffers;
using backends::TensorWork;

constexpr std::chrono::milliseconds kAbortPatience{300};
/// Larger all-reduces, reduces and broadcasts are cut into pieces of so many elements. MPI counts
/// in ints. Its algorithms also take a buffer of the piece's size, which for a large piece costs
/// more than the messages do. 64 MB whole took three times as long as in pieces of 4 MB.
constexpr int64_t kPiece = int64_t{1} << 20;

MpiWork& own(TensorWork& work) {
  return static_cast<MpiWork&>(work);
}

using Op = c10d::ReduceOp;

MPI_Datatype reduced_type(at::ScalarType dtype) {
  static const std::pair<at::ScalarType, MPI_Datatype> kTypes[] = {
      {at::kFloat, MPI_FLOAT},
      {at::kDouble, MPI_DOUBLE},
      {at::kByte, MPI_UINT8_T},
      {at::kChar, MPI_INT8_T},
      {at::kShort, MPI_INT16_T},
      {at::kInt, MPI_INT32_T},
      {at::kLong, MPI_INT64_T},
      {at::kBool, MPI_C_BOOL},
      {at::kComplexFloat, MPI_C_FLOAT_COMPLEX},
      {at::kComplexDouble, MPI_C_DOUBLE_COMPLEX}};
  for (const auto& [theirs, mpis] : kTypes)
    if (theirs == dtype) return mpis;
  throw UsageError(
      std::string("the backend mpi has no reductions of dtype ") + c10::toString(dtype),
      "convert the tensor first, for instance to float32");
}

/// The sum of small integers. Open MPI's own with AVX saturates in a part of the elements; this one
/// wraps round, as all other backends' do.
template <class Integer>
void add_to(void* from, void* to, int* count, MPI_Datatype*) {
  const auto* values = static_cast<const Integer*>(from);
  auto* sums = static_cast<Integer*>(to);
  for (int i = 0; i < *count; ++i) sums[i] = static_cast<Integer>(sums[i] + values[i]);
}

struct SmallSum {
  at::ScalarType dtype;
  MPI_User_function* add;
  MPI_Op op = MPI_OP_NULL;
};
/// Made when MPI starts. They live as long as MPI does.
std::array<SmallSum, 3> small_sums{
    {{at::kChar, add_to<int8_t>}, {at::kByte, add_to<uint8_t>}, {at::kShort, add_to<int16_t>}}};

/// The MPI operations in c10d's order.
using MpiOps = std::array<MPI_Op, 8>;
static_assert(MpiOps().size() == size_t{Op::BXOR} + 1);

MPI_Op op_for(at::ScalarType dtype, Op::RedOpType op) {
  static const MpiOps logical{MPI_LOR, MPI_OP_NULL, MPI_LAND, MPI_LAND,
                              MPI_LOR, MPI_LAND,    MPI_LOR,  MPI_LXOR};
  static const MpiOps arithmetic{MPI_SUM, MPI_SUM,  MPI_PROD, MPI_MIN,
                                 MPI_MAX, MPI_BAND, MPI_BOR,  MPI_BXOR};
  const auto index = static_cast<size_t>(op);
  for (const auto& sum : small_sums)
    if (sum.dtype == dtype && arithmetic[index] == MPI_SUM) return sum.op;
  return (dtype == at::kBool ? logical : arithmetic)[index];
}

/// Once, on the MPI thread.
void make_small_sums() {
  for (auto& sum : small_sums)
    if (sum.op == MPI_OP_NULL)
      check(MPI_Op_create(sum.add, /*commute=*/1, &sum.op), "MPI_Op_create");
}

/// How one reduction of one dtype is done by MPI.
struct Reduction {
  at::ScalarType dtype;  ///< In which it is done: float32 for float16 and bfloat16, which MPI has
                         ///< not; sums are then rounded once, whatever their order.
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op op = MPI_OP_NULL;
};

/// bool sums are "or", products "and", as shm's.
Reduction reduction_of(at::ScalarType dtype, const c10d::ReduceOp& op) {
  Reduction reduction;
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  reduction.dtype = half ? at::kFloat : dtype;
  reduction.type = reduced_type(reduction.dtype);
  reduction.op = op_for(dtype, op.op_);
  return reduction;
}

/// The MPI type of an element that is only moved.
MPI_Datatype moved_type(at::ScalarType dtype) {
  switch (c10::elementSize(dtype)) {
    case 1:
      return MPI_BYTE;
    case 2:
      return MPI_INT16_T;
    case 4:
      return MPI_INT32_T;
    case 8:
      return MPI_INT64_T;
    case 16:
      return MPI_C_DOUBLE_COMPLEX;
    default:
      throw UsageError(std::string("the backend mpi cannot send elements of dtype ") +
                       c10::toString(dtype));
  }
}

/// `elements` as MPI's count, an int. Throws UsageError naming the operation when they are more.
int count_of(Operation operation, int64_t elements) {
  if (elements <= INT32_MAX) return static_cast<int>(elements);
  throw UsageError(std::string(operation_name(operation)) + ": " + std::to_string(elements) +
                       " elements for one rank; MPI counts to " + std::to_string(INT32_MAX),
                   "cut the tensor into several calls");
}

std::shared_ptr<Engine> engine_for(const BackendOptions& options, const RankNames& ranks) {
  return Engine::get(ranks[static_cast<size_t>(options.rank)],
                     *std::max_element(ranks.begin(), ranks.end()) + 1);
}

/// The same number on all ranks, so that groups formed at once do not mix.
int tag_of(const std::string& name) {
  return static_cast<int>(fnv1a(name) % 32768);
}

void make_communicator(MPI_Comm world, Group& group) {
  MPI_Group all = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  check(MPI_Comm_group(world, &all), "MPI_Comm_group");
  check(MPI_Group_incl(all, group.size, group.world_ranks.data(), &members), "MPI_Group_incl");
  check(MPI_Comm_create_group(world, members, tag_of(group.name), &group.communicator),
        "MPI_Comm_create_group");
  check(MPI_Comm_set_errhandler(group.communicator, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Group_free(&members);
  MPI_Group_free(&all);
}

/// All members meet in the store first: there they can be missed, and named, while MPI would wait
/// for ever. What remains for MPI takes no time.
std::shared_ptr<Group> form(const BackendOptions& options, const RankNames& ranks, Engine& engine) {
  auto group = std::make_shared<Group>();
  group->name = options.group_name;
  group->rank = options.rank;
  group->size = options.size;
  group->world_ranks = ranks;
  const auto keys = numbered_keys("mpi/here/", options.size);
  if (options.size > 1) {
    options.store->set(keys[static_cast<size_t>(options.rank)], process_identity());
    options.store->wait(keys, options.timeout);
    for (const auto& key : keys) group->identities.push_back(options.store->get_to_str(key));
  }
  const auto task = [group, world = engine.world()] {
    make_small_sums();
    make_communicator(world, *group);
  };
  engine.run(task, options.timeout, "making the communicator of group '" + group->name + "'");
  return group;
}

/// Whether the blocks, of `other`'s size, lie one after the other and outside of it: MPI's buffers
/// must not overlap.
bool adjoin_apart_from(const at::Tensor& other, const Blocks& blocks) {
  const size_t bytes = other.nbytes();
  const auto* start = static_cast<const std::byte*>(other.data_ptr());
  if (start + bytes > blocks.at(0) && start < blocks.back() + bytes) return false;
  for (size_t i = 1; i < blocks.size(); ++i)
    if (blocks[i] != blocks[i - 1] + bytes) return false;
  return true;
}

/// Memory for one block of a tensor's size a rank, one after the other.
at::Tensor fresh(MpiWork& work, const at::Tensor& one, int size) {
  return work.keep(at::empty({size, one.numel()}, one.options()));
}

/// What the blocks, of `one`'s size, hold, one after the other: where they lie if they adjoin.
const void* joined(MpiWork& work, const Blocks& blocks, const at::Tensor& one) {
  if (adjoin_apart_from(one, blocks)) return blocks.at(0);
  const at::Tensor all = fresh(work, one, static_cast<int>(blocks.size()));
  auto* to = static_cast<std::byte*>(all.data_ptr());
  for (const auto* block : blocks) to = std::copy_n(block, one.nbytes(), to);
  return all.data_ptr();
}

/// Memory for what MPI puts one after the other; at the end each block gets its part.
void* apart(MpiWork& work, const Blocks& blocks, const at::Tensor& one) {
  if (adjoin_apart_from(one, blocks)) return blocks.at(0);
  const at::Tensor all = fresh(work, one, static_cast<int>(blocks.size()));
  work.afterwards([all, blocks, bytes = one.nbytes()] {
    const auto* from = static_cast<const std::byte*>(all.data_ptr());
    for (auto* block : blocks) {
      std::memcpy(block, from, bytes);
      from += bytes;
    }
  });
  return all.data_ptr();
}

/// Once the sum is there.
void average_at_end(MpiWork& work, const at::Tensor& sum, const c10d::ReduceOp& op, int size) {
  if (op.op_ == c10d::ReduceOp::AVG) work.afterwards([=] { backends::divide(sum, size); });
}

/// See mpi.h. Sums are MPI's: the same bits in every run with as many ranks, but in an order that
/// MPI chooses by size.
class MpiBackend final : public backends::TensorBackend {
 public:
  explicit MpiBackend(const BackendOptions& options)
      : TensorBackend(options),
        engine_(engine_for(options, names()->ranks)),
        group_(form(options, names()->ranks, *engine_)) {}
  ~MpiBackend() override { close(/*abort=*/false); }

  const std::string getBackendName() const override { return "mpi"; }
  void abort() override { close(/*abort=*/true); }
  void shutdown() override { close(/*abort=*/false); }

 private:
  void close(bool abort) {
    if (closed_.exchange(true)) return;
    try {
      engine_->retire(group_, abort, abort ? kAbortPatience : timeout() + kAbortPatience);
    } catch (const std::exception&) {
      // MPI has ended before, or does not return: there is nothing left to free.
    }
  }

  OwnWork make_work(backends::Request request) override {
    if (closed_)
      throw CommError(std::string(operation_name(request.operation)) + ": group '" + group_->name +
                      "' is closed");
    return c10::make_intrusive<MpiWork>(engine_, group_, std::move(request), names());
  }

  void submit(const OwnWork& work) override {
    engine_->submit(c10::static_intrusive_pointer_cast<MpiWork>(work));
  }

  at::ScalarType reduction_dtype(at::ScalarType dtype, const c10d::ReduceOp& op) const override {
    return reduction_of(dtype, op).dtype;
  }

  template <class Start>
  void add_pieces(TensorWork& work, const char* call, const at::Tensor& data, Start start) {
    for (int64_t at = 0; at < data.numel(); at += kPiece) {
      auto* piece = static_cast<char*>(data.data_ptr()) + at * data.element_size();
      const int count = static_cast<int>(std::min(kPiece, data.numel() - at));
      own(work).add(call, [=](MPI_Comm comm, MPI_Request* request) {
        return start(piece, count, comm, request);
      });
    }
  }

  void add_barrier(TensorWork& work) override {
    own(work).add("MPI_Ibarrier",
                  [](MPI_Comm comm, MPI_Request* request) { return MPI_Ibarrier(comm, request); });
  }

  void add_broadcast(TensorWork& work, const at::Tensor& data, int root) override {
    add_pieces(work, "MPI_Ibcast", data,
               [root, type = moved_type(data.scalar_type())](void* piece, int count, MPI_Comm comm,
                                                             MPI_Request* request) {
                 return MPI_Ibcast(piece, count, type, root, comm, request);
               });
  }

  void add_all_reduce(TensorWork& work, const at::Tensor& data, const c10d::ReduceOp& op) override {
    add_pieces(work, "MPI_Iallreduce", data,
               [how = reduction_of(data.scalar_type(), op)](void* piece, int count, MPI_Comm comm,
                                                            MPI_Request* request) {
                 return MPI_Iallreduce(MPI_IN_PLACE, piece, count, how.type, how.op, comm, request);
               });
    average_at_end(own(work), data, op, getSize());
  }

  void add_reduce(TensorWork& work, const at::Tensor& data, const c10d::ReduceOp& op,
                  int root) override {
    const bool is_root = getRank() == root;
    add_pieces(work, "MPI_Ireduce", data,
               [=, how = reduction_of(data.scalar_type(), op)](
                   void* piece, int count, MPI_Comm comm, MPI_Request* request) {
                 return MPI_Ireduce(is_root ? MPI_IN_PLACE : piece, piece, count, how.type, how.op,
                                    root, comm, request);
               });
    if (is_root) average_at_end(own(work), data, op, getSize());
  }

  void add_all_gather(TensorWork& work, const at::Tensor& input, Blocks outputs) override {
    const int count = count_of(work.request().operation, input.numel());
    if (count == 0) return;
    own(work).add("MPI_Iallgather",
                  [=, type = moved_type(input.scalar_type()), from = input.data_ptr(),
                   to = apart(own(work), outputs, input)](MPI_Comm comm, MPI_Request* request) {
                    return MPI_Iallgather(from, count, type, to, count, type, comm, request);
                  });
  }

  void add_gather(TensorWork& work, const at::Tensor& input, Blocks outputs, int root) override {
    const int count = count_of(Operation::gather, input.numel());
    if (count == 0) return;
    void* to = outputs.empty() ? nullptr : apart(own(work), outputs, input);
    own(work).add("MPI_Igather", [=, type = moved_type(input.scalar_type()),
                                  from = input.data_ptr()](MPI_Comm comm, MPI_Request* request) {
      return MPI_Igather(from, count, type, to, count, type, root, comm, request);
    });
  }

  void add_scatter(TensorWork& work, Blocks inputs, const at::Tensor& output, int root) override {
    const int count = count_of(Operation::scatter, output.numel());
    if (count == 0) return;
    const void* from = inputs.empty() ? nullptr : joined(own(work), inputs, output);
    own(work).add("MPI_Iscatter", [=, type = moved_type(output.scalar_type()),
                                   to = output.data_ptr()](MPI_Comm comm, MPI_Request* request) {
      return MPI_Iscatter(from, count, type, to, count, type, root, comm, request);
    });
  }

  void add_reduce_scatter(TensorWork& work, Blocks inputs, const at::Tensor& output,
                          const c10d::ReduceOp& op) override {
    const Reduction how = reduction_of(output.scalar_type(), op);
    // Within MPI the whole is counted by an int as well.
    count_of(work.request().operation, output.numel() * getSize());
    const int count = static_cast<int>(output.numel());
    if (count == 0) return;
    const void* from = joined(own(work), inputs, output);
    own(work).add("MPI_Ireduce_scatter_block", [=, to = output.data_ptr()](MPI_Comm comm,
                                                                           MPI_Request* request) {
      return MPI_Ireduce_scatter_block(from, to, count, how.type, how.op, comm, request);
    });
    average_at_end(own(work), output, op, getSize());
  }

  // By messages, as every rank knows only its own splits. MPI's own call of this kind does the
  // same.
  void add_all_to_all(TensorWork& all, at::ScalarType dtype, Buffers sends,
                      Buffers receives) override {
    const size_t element = c10::elementSize(dtype);
    for (const auto* buffers : {&sends, &receives})
      for (const auto& buffer : *buffers)
        count_of(all.request().operation, static_cast<int64_t>(buffer.size() / element));
    const auto exchange = [=, type = moved_type(dtype), tag = engine_->largest_tag()](
                              MPI_Comm comm, std::vector<MPI_Request>& requests) {
      int code = MPI_SUCCESS;
      const auto start = [&](auto call, const auto& buffers) {
        for (size_t peer = 0; peer < buffers.size() && code == MPI_SUCCESS; ++peer)
          code = call(buffers[peer].data(), static_cast<int>(buffers[peer].size() / element), type,
                      static_cast<int>(peer), tag, comm, &requests.emplace_back(MPI_REQUEST_NULL));
      };
      start(MPI_Irecv, receives);
      start(MPI_Isend, sends);
      return code;
    };
    static_cast<MpiWork&>(all).add_several("MPI_Isend", exchange);
  }

  WorkPtr message(Operation operation, const at::Tensor& tensor, int peer, int tag) override {
    const int largest = engine_->largest_tag() - 1;  // That one is all_to_all's.
    if (tag < 0 || tag > largest)
      throw UsageError(std::string(operation_name(operation)) + ": the tag " + std::to_string(tag) +
                       " is not from 0 to " + std::to_string(largest));
    const int count = count_of(operation, tensor.numel());
    const MPI_Datatype type = moved_type(tensor.scalar_type());
    const bool sends = operation == Operation::send;
    backends::Request request = message_request(operation, tensor, peer);
    show(request);
    const auto made = make_work(std::move(request));
    auto& work = static_cast<MpiWork&>(*made);
    if (sends) {
      work.add("MPI_Isend",
               [=, from = work.given(tensor).data_ptr()](MPI_Comm comm, MPI_Request* request) {
                 return MPI_Isend(from, count, type, peer, tag, comm, request);
               });
    } else {
      const int source = peer == kAnyRank ? MPI_ANY_SOURCE : peer;
      work.expect(count, type);
      work.add("MPI_Irecv",
               [=, to = work.taken(tensor, false).data_ptr()](MPI_Comm comm, MPI_Request* request) {
                 return MPI_Irecv(to, count, type, source, tag, comm, request);
               });
    }
    submit(made);
    return made;
  }

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Group> group_;
  std::atomic<bool> closed_{false};
};

}  // namespace

MadeBackend make(const BackendOptions& options) {
  return {c10::make_intrusive<MpiBackend>(options), kTraits};
}

}  // namespace lockstep::mpi
