#include "tools/lockstep/bench/mpirun.h"

#include <unistd.h>

#include <filesystem>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep::tool {
namespace {

bool in_path(const std::string& program) {
  for (const auto& folder : split(env_string("PATH").value_or("/usr/bin:/bin"), ':')) {
    if (::access((std::filesystem::path(folder) / program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

}  // namespace

std::vector<std::string> under_mpirun(int64_t ranks, const std::vector<std::string>& command) {
  if (!in_path("mpirun")) {
    throw UsageError("--backend mpi: mpirun is not in PATH, which starts the ranks",
                     "install openmpi-bin, or add the folder of your MPI's mpirun to PATH");
  }
  std::vector<std::string> words = {"mpirun",          "-np",       std::to_string(ranks),
                                    "--oversubscribe", "--bind-to", "none"};
  if (::geteuid() == 0) words.push_back("--allow-run-as-root");
  words.insert(words.end(), command.begin(), command.end());
  return words;
}

void refuse_under_mpirun() {
  if (env_int("OMPI_COMM_WORLD_SIZE").value_or(1) == 1) return;
  throw UsageError("lockstep bench starts its ranks itself, and with --backend mpi by mpirun",
                   "run it without mpirun: lockstep bench allreduce --backend mpi --devices " +
                       *env_string("OMPI_COMM_WORLD_SIZE"));
}

}  // namespace lockstep::tool
