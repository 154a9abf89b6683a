# libjpeg(-turbo) and libpng, where they are found: LOCKSTEP_HAS_JPEG and the target Lockstep::jpeg,
# LOCKSTEP_HAS_PNG and Lockstep::png. No header of ours needs theirs.
set(LOCKSTEP_IMAGES auto CACHE STRING
                               "Images by libjpeg and libpng: auto (what is found), on (both) or off")
set_property(CACHE LOCKSTEP_IMAGES PROPERTY STRINGS auto on off)
function(lockstep_find_image_library name header library package)
  string(TOLOWER ${name} target)
  set(found OFF)
  if(NOT LOCKSTEP_IMAGES STREQUAL "off")
    find_path(LOCKSTEP_${name}_INCLUDE ${header})
    find_library(LOCKSTEP_${name}_LIBRARY ${library})
    if(LOCKSTEP_${name}_INCLUDE AND LOCKSTEP_${name}_LIBRARY)
      set(found ON)
    elseif(LOCKSTEP_IMAGES STREQUAL "on")
      message(FATAL_ERROR "LOCKSTEP_IMAGES is on, but lib${library} was not found: install ${package}")
    endif()
  endif()
  if(found AND NOT TARGET Lockstep::${target})
    add_library(Lockstep::${target} INTERFACE IMPORTED GLOBAL)
    set_target_properties(
      Lockstep::${target}
      PROPERTIES INTERFACE_LINK_LIBRARIES "${LOCKSTEP_${name}_LIBRARY}"
                 INTERFACE_INCLUDE_DIRECTORIES "${LOCKSTEP_${name}_INCLUDE}")
  endif()
  if(found)
    message(STATUS "${target}: ${LOCKSTEP_${name}_LIBRARY}")
  else()
    message(STATUS "${target}: none, image folders cannot have such files")
  endif()
  set(LOCKSTEP_HAS_${name} ${found} PARENT_SCOPE)
endfunction()
lockstep_find_image_library(JPEG jpeglib.h jpeg libjpeg62-turbo-dev)
lockstep_find_image_library(PNG png.h png libpng-dev)
