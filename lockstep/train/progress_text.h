#pragma once

#include <string>

#include "lockstep/train/callback.h"

// The words of lines about progress.
namespace lockstep {

/// "0.9731": four digits after the point; "nan", whatever its sign, "inf" and "-inf".
std::string four_digits(double value);

/// "epoch 2/5".
std::string epoch_text(int64_t epoch, int64_t max_epochs);

/// "12345 samples/s".
std::string speed_text(double samples_per_s);

}  // namespace lockstep
