#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace lockstep::launch {

enum class ProgramKind {
  guess,       ///< An executable as it is; a *.py that is none by Python.
  executable,  ///< As it is, whatever its name (--no-python).
  module,      ///< A Python module's name (-m).
  path,        ///< What Python's runpy.run_path takes: a script, a folder or an archive.
};

struct Program {
  std::string file;               ///< The path that is executed.
  std::vector<std::string> argv;  ///< argv[0] included.
};

/// How `words` (the program and its arguments, which stay untouched) are executed. A name without a
/// slash is looked up as a shell would, in PATH, and else in the current folder. Python is
/// PYTHON_EXEC, else the python3 of PATH. Throws UsageError naming the program: it does not exist,
/// is a folder, or cannot be executed.
Program find_program(const std::vector<std::string>& words, ProgramKind kind);

}  // namespace lockstep::launch
