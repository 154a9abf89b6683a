#include "lockstep/base/error.h"
#include "lockstep/data/rgb_image.h"

namespace lockstep {

RgbImage decode_png(std::string_view, const std::string& name) {
  throw DataError(name + " is a PNG, and Lockstep was built without libpng",
                  "install libpng-dev (or what your system calls it), and build Lockstep again");
}

}  // namespace lockstep
