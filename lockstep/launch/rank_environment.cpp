#include "lockstep/launch/rank_environment.h"

#include <sys/random.h>

#include <cstdlib>

#include "lockstep/base/env.h"
#include "lockstep/launch/variables.h"

namespace lockstep::launch {

std::vector<std::pair<std::string, std::string>> rank_environment(const RankLayout& layout,
                                                                  int local_rank,
                                                                  const std::string& error_file) {
  const auto rank = std::to_string(layout.first_rank + local_rank);
  const auto world = std::to_string(layout.world_size);
  std::vector<std::pair<std::string, std::string>> env = {
      {"RANK", rank},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"WORLD_SIZE", world},
      {"LOCAL_WORLD_SIZE", std::to_string(layout.local_size)},
      {"GROUP_RANK", std::to_string(layout.node_rank)},
      {"GROUP_WORLD_SIZE", std::to_string(layout.nodes)},
      {"ROLE_RANK", rank},
      {"ROLE_NAME", layout.role},
      {"ROLE_WORLD_SIZE", world},
      {"MASTER_ADDR", layout.master_addr},
      {"MASTER_PORT", std::to_string(layout.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {"TORCHELASTIC_MAX_RESTARTS", "0"},
      {"TORCHELASTIC_RUN_ID", layout.run_id},
      {"TORCHELASTIC_USE_AGENT_STORE", layout.agent_store ? "True" : "False"},
      {kErrorFileVariable, error_file},
      {kTokenVariable, layout.token},
  };
  if (!env_string("TORCH_NCCL_ASYNC_ERROR_HANDLING")) {
    env.emplace_back("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
  }
  if (layout.local_size > 1 && !std::getenv("OMP_NUM_THREADS")) {
    env.emplace_back("OMP_NUM_THREADS", "1");
    env.emplace_back(kThreadsByLauncherVariable, "1");
  }
  return env;
}

std::string random_hex(size_t bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  while (text.size() < 2 * bytes) {
    unsigned char byte = 0;
    if (getrandom(&byte, 1, 0) != 1) continue;
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace lockstep::launch
