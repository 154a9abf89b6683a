# `make package`: what `cmake --install` gives, as a .deb and a tar.gz. LibTorch is in neither: docs/install.md.
set(CPACK_GENERATOR DEB TGZ)
set(CPACK_PACKAGE_NAME lockstep)
set(CPACK_PACKAGE_FILE_NAME lockstep-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR})
set(CPACK_PACKAGE_CONTACT "The Lockstep developers <lockstep@localhost>")
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${LibTorch_ROOT}/lib)
# What programs of one's own need to link the static library. The binary does without.
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS
    "cmake, g++, libcurl4-openssl-dev, libisal-dev, libjpeg-dev, libopenmpi-dev, libpng-dev, libssl-dev, nlohmann-json3-dev")
include(CPack)
