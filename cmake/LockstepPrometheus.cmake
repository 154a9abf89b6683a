# prometheus-cpp, where it is found: LOCKSTEP_HAS_PROMETHEUS and the target Lockstep::prometheus. No
# header of ours needs its headers.
set(LOCKSTEP_PROMETHEUS auto CACHE STRING "The logger prometheus: auto (where prometheus-cpp is found), on or off")
set_property(CACHE LOCKSTEP_PROMETHEUS PROPERTY STRINGS auto on off)
set(LOCKSTEP_HAS_PROMETHEUS OFF)
if(NOT LOCKSTEP_PROMETHEUS STREQUAL "off")
  find_path(LOCKSTEP_PROMETHEUS_INCLUDE prometheus/exposer.h)
  find_library(LOCKSTEP_PROMETHEUS_CORE prometheus-cpp-core)
  find_library(LOCKSTEP_PROMETHEUS_PULL prometheus-cpp-pull)
  if(LOCKSTEP_PROMETHEUS_INCLUDE AND LOCKSTEP_PROMETHEUS_CORE AND LOCKSTEP_PROMETHEUS_PULL)
    set(LOCKSTEP_HAS_PROMETHEUS ON)
  elseif(LOCKSTEP_PROMETHEUS STREQUAL "on")
    message(FATAL_ERROR "LOCKSTEP_PROMETHEUS is on, but prometheus-cpp was not found: install prometheus-cpp-dev")
  endif()
endif()
if(LOCKSTEP_HAS_PROMETHEUS)
  if(NOT TARGET Lockstep::prometheus)
    add_library(Lockstep::prometheus INTERFACE IMPORTED GLOBAL)
    set_target_properties(
      Lockstep::prometheus
      PROPERTIES INTERFACE_LINK_LIBRARIES "${LOCKSTEP_PROMETHEUS_PULL};${LOCKSTEP_PROMETHEUS_CORE}"
                 INTERFACE_INCLUDE_DIRECTORIES "${LOCKSTEP_PROMETHEUS_INCLUDE}")
  endif()
  message(STATUS "Prometheus: ${LOCKSTEP_PROMETHEUS_PULL}")
else()
  message(STATUS "Prometheus: none, the logger prometheus will say so")
endif()
