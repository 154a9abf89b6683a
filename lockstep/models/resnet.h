#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/models/models.h"

namespace lockstep {

/// torchvision's resnet18(weights=None, num_classes=...): its layers, names and initial values (He
/// et al. 2015). Takes images [B, 3, H, W] of any size and gives [B, num_classes].
std::shared_ptr<Model> make_resnet18(int64_t num_classes);

}  // namespace lockstep
