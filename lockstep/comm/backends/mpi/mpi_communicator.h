#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace lockstep {

/// An MPI_Comm, without the header of MPI: that is a pointer in Open MPI, and an int in MPICH. It
/// must be of the MPI that Lockstep was built with. The program keeps the communicator, and may go
/// on using it.
class MpiCommunicator {
 public:
  MpiCommunicator() = default;  ///< None.
  template <class Comm>
  requires(std::is_pointer_v<Comm> || std::is_integral_v<Comm>) MpiCommunicator(Comm comm)
      : given_(true) {
    static_assert(sizeof comm <= sizeof bits_);
    std::memcpy(&bits_, &comm, sizeof comm);
  }
  explicit operator bool() const { return given_; }
  /// `Comm`: MPI_Comm.
  template <class Comm>
  Comm get() const {
    Comm comm;
    std::memcpy(&comm, &bits_, sizeof comm);
    return comm;
  }

 private:
  bool given_ = false;
  std::uint64_t bits_ = 0;
};

}  // namespace lockstep
