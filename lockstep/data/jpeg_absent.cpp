#include "lockstep/base/error.h"
#include "lockstep/data/rgb_image.h"

namespace lockstep {

RgbImage decode_jpeg(std::string_view, const std::string& name) {
  throw DataError(name + " is a JPEG, and Lockstep was built without libjpeg",
                  "install libjpeg62-turbo-dev (or what your system calls it), and build Lockstep "
                  "again");
}

}  // namespace lockstep
