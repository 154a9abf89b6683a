#include "lockstep/launch/start.h"

#include <ATen/Context.h>

#include <mutex>

#include "lockstep/base/random.h"

namespace lockstep {

at::Generator rank_generator(const World& world, std::optional<uint64_t> seed) {
  at::Generator common = at::globalContext().defaultGenerator(world.device());
  const auto copy = [&] {
    const std::lock_guard lock(common.mutex());
    return common.clone();
  };
  at::Generator own = copy();
  // LibTorch's generator of the CPU takes the lower 32 bits. Counted on from one number, those of
  // all ranks differ. The seed is mixed, as the default generator has the seed itself.
  const auto first = static_cast<uint32_t>(KeyedRandom(seed.value_or(own.current_seed())).next());
  own.set_current_seed(first + static_cast<uint32_t>(world.rank()));
  return own;
}

}  // namespace lockstep
