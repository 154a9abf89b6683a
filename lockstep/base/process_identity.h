#pragma once

#include <string>

namespace lockstep {

/// This process to the others of its host: boot, process namespace, process number, start time.
std::string process_identity();

enum class ProcessState {
  unknown,  ///< On another host or in another namespace, or not told.
  alive,
  ended,  ///< Gone, or ended and not yet waited for by its parent.
};

/// What became of the process that `process_identity` named. Never blocks.
ProcessState process_state(const std::string& identity);

/// The process number within an identity; -1 when there is none.
int process_number(const std::string& identity);

/// "rank 1 (process 4711)" for the name "rank 1"; the name alone where the identity holds no
/// number.
std::string with_process(const std::string& name, const std::string& identity);

}  // namespace lockstep
