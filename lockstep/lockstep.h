// All that a program needs of Lockstep. Each header can be included by itself too; none of them
// includes all of LibTorch: add the headers of the modules and losses that you use, such as
// <torch/nn/modules/linear.h>.
#pragma once

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/random.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/store.h"
#include "lockstep/comm/work.h"
#include "lockstep/comm/world.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/safetensors.h"
#include "lockstep/data/sampler.h"
#include "lockstep/data/transforms.h"
#include "lockstep/launch/spawn.h"
#include "lockstep/models/models.h"
#include "lockstep/models/norm_pool.h"
#include "lockstep/optim/backward.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/train/callbacks.h"
#include "lockstep/train/step_profiler.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/weights.h"
