// The calls of MpiBackend in which each two ranks exchange something of their own.
#include "lockstep/base/error.h"
#include "lockstep/comm/backends/mpi/mpi_backend.h"

namespace lockstep::mpi {
namespace {

/// One side of MPI_Ialltoallw: where the part of each rank lies, as types of absolute addresses, so
/// that parts of any tensors, of any size, need no copy.
struct Parts {
  std::vector<int> counts;
  std::vector<int> zeros;
  std::vector<MPI_Datatype> types;
};

/// Runs on the MPI thread, as all that calls MPI. `work` frees the types.
int make_parts(MpiWork& work, const Shares& shares, size_t element, MPI_Datatype type,
               Parts& parts) {
  parts.zeros.assign(shares.size(), 0);
  for (const auto& share : shares) {
    MPI_Datatype part = MPI_BYTE;
    if (share.bytes > 0) {
      int length = static_cast<int>(share.bytes / element);
      MPI_Aint address = 0;
      int code = MPI_Get_address(share.data, &address);
      if (code == MPI_SUCCESS) code = MPI_Type_create_hindexed(1, &length, &address, type, &part);
      if (code != MPI_SUCCESS) return code;
      work.free_at_end(part);
      if (code = MPI_Type_commit(&part); code != MPI_SUCCESS) return code;
    }
    parts.counts.push_back(share.bytes > 0 ? 1 : 0);
    parts.types.push_back(part);
  }
  return MPI_SUCCESS;
}

}  // namespace

// As every rank knows only its own splits, all must take the same call whatever they are.
void MpiBackend::add_all_to_all(TensorWork& all, at::ScalarType dtype, Shares sends,
                                Shares receives) {
  auto& work = static_cast<MpiWork&>(all);
  const MPI_Datatype type = moved_type(dtype);
  const size_t element = c10::elementSize(dtype);
  for (const auto* shares : {&sends, &receives})
    for (const auto& share : *shares)
      count_of(work.request().operation, static_cast<int64_t>(share.bytes / element));
  auto sent = std::make_shared<Parts>(), received = std::make_shared<Parts>();
  work.add("MPI_Ialltoallw", [=, &work](MPI_Comm comm, MPI_Request* request) {
    int code = make_parts(work, sends, element, type, *sent);
    if (code == MPI_SUCCESS) code = make_parts(work, receives, element, type, *received);
    if (code != MPI_SUCCESS) return code;
    return MPI_Ialltoallw(MPI_BOTTOM, sent->counts.data(), sent->zeros.data(), sent->types.data(),
                          MPI_BOTTOM, received->counts.data(), received->zeros.data(),
                          received->types.data(), comm, request);
  });
  // MPI reads the lists until it is done.
  work.afterwards([sent, received] {});
}

MpiBackend::WorkPtr MpiBackend::message(Operation operation, const at::Tensor& tensor, int peer,
                                        int tag) {
  if (tag < 0 || tag > engine_->largest_tag())
    throw UsageError(std::string(operation_name(operation)) + ": the tag " + std::to_string(tag) +
                     " is not from 0 to " + std::to_string(engine_->largest_tag()));
  const int count = count_of(operation, tensor.numel());
  const MPI_Datatype type = moved_type(tensor.scalar_type());
  const bool sends = operation == Operation::send;
  const auto made = make_work(message_request(operation, tensor, peer));
  auto& work = static_cast<MpiWork&>(*made);
  record(work);
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

}  // namespace lockstep::mpi
