#include "lockstep/amp/precision.h"

#include <ATen/autocast_mode.h>

#include "lockstep/amp/half_support.h"
#include "lockstep/base/error.h"

namespace lockstep {

Autocast::Autocast(c10::DeviceType device, at::ScalarType dtype, bool enabled) : device_(device) {
  if (!at::autocast::is_autocast_available(device)) {
    throw UsageError("autocast: there is none for device " + c10::DeviceTypeName(device, true));
  }
  if (enabled && dtype != at::kBFloat16 && dtype != at::kHalf) {
    throw UsageError(
        "autocast: dtype " + detail::dtype_name(dtype) + " is none that it computes in",
        "take bfloat16 or float16");
  }
  outer_enabled_ = at::autocast::is_autocast_enabled(device);
  outer_dtype_ = at::autocast::get_autocast_dtype(device);
  at::autocast::set_autocast_enabled(device, enabled);
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, outer_enabled_);
  at::autocast::set_autocast_dtype(device_, outer_dtype_);
}

}  // namespace lockstep
