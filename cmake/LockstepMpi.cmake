# MPI, where it is found: LOCKSTEP_HAS_MPI, the target Lockstep::mpi (its libraries; no header of ours
# needs MPI's), LOCKSTEP_MPI_INCLUDES for the files that do, and LOCKSTEP_MPIRUN for the tests.
set(LOCKSTEP_MPI auto CACHE STRING "The backend mpi: auto (where MPI is found), on or off")
set_property(CACHE LOCKSTEP_MPI PROPERTY STRINGS auto on off)
set(LOCKSTEP_HAS_MPI OFF)
if(NOT LOCKSTEP_MPI STREQUAL "off")
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI QUIET COMPONENTS C)
  set(LOCKSTEP_HAS_MPI ${MPI_C_FOUND})
  if(LOCKSTEP_MPI STREQUAL "on" AND NOT LOCKSTEP_HAS_MPI)
    message(FATAL_ERROR "LOCKSTEP_MPI is on, but no MPI was found: install libopenmpi-dev and "
                        "openmpi-bin, or set MPI_HOME")
  endif()
endif()
if(LOCKSTEP_HAS_MPI)
  set(LOCKSTEP_MPI_INCLUDES ${MPI_C_INCLUDE_DIRS})
  set(LOCKSTEP_MPI_LIBRARIES ${MPI_C_LIBRARIES})
  set(LOCKSTEP_MPIRUN ${MPIEXEC_EXECUTABLE})
  if(NOT TARGET Lockstep::mpi)
    add_library(Lockstep::mpi INTERFACE IMPORTED GLOBAL)
    # As LibTorch's: installed programs find it where it was linked, whatever the loader's cache knows.
    list(TRANSFORM LOCKSTEP_MPI_LIBRARIES REPLACE "(.*)/[^/]*" "-Wl,-rpath,\\1" OUTPUT_VARIABLE
                                                                        LOCKSTEP_MPI_RPATHS)
    list(REMOVE_DUPLICATES LOCKSTEP_MPI_RPATHS)
    set_target_properties(
      Lockstep::mpi PROPERTIES INTERFACE_LINK_LIBRARIES
                               "${LOCKSTEP_MPI_LIBRARIES};${LOCKSTEP_MPI_RPATHS}")
  endif()
  message(STATUS "MPI: ${LOCKSTEP_MPI_LIBRARIES}, mpirun: ${LOCKSTEP_MPIRUN}")
else()
  message(STATUS "MPI: none, the backend mpi will say so")
endif()
