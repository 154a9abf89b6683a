#include "lockstep/launch/program.h"

#include <unistd.h>

#include <fstream>
#include <optional>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep::launch {
namespace {

namespace fs = std::filesystem;

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

bool is_executable(const fs::path& path) {
  return is_file(path) && access(path.c_str(), X_OK) == 0;
}

std::optional<std::string> in_path(const std::string& name) {
  if (name.find('/') != std::string::npos) return std::nullopt;
  for (const auto& folder :
       split(env_string("PATH").value_or("/usr/local/bin:/usr/bin:/bin"), ':')) {
    const auto path = fs::path(folder.empty() ? "." : folder) / name;
    if (is_executable(path)) return path.string();
  }
  return std::nullopt;
}

std::string python() {
  const auto name = env_string("PYTHON_EXEC").value_or("python3");
  if (is_executable(name)) return name;
  if (const auto found = in_path(name)) return *found;
  throw UsageError("no Python: '" + name + "' is not in PATH",
                   "set PYTHON_EXEC to the interpreter, or activate its environment");
}

constexpr const char* kRunPath =
    "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')";

/// `flags` stand before the words.
Program with_python(const std::vector<std::string>& words, const std::vector<std::string>& flags) {
  Program program{python(), {}};
  program.argv = {program.file, "-u"};
  program.argv.insert(program.argv.end(), flags.begin(), flags.end());
  program.argv.insert(program.argv.end(), words.begin(), words.end());
  return program;
}

bool is_python_source(const fs::path& path) {
  return path.extension() == ".py";
}

/// On some file systems every file is executable; only the first line tells.
bool names_its_interpreter(const fs::path& path) {
  char start[2] = {};
  std::ifstream(path).read(start, 2);
  return start[0] == '#' && start[1] == '!';
}

[[noreturn]] void cannot_execute(const std::string& name) {
  std::error_code ignored;
  if (fs::is_directory(name, ignored)) throw UsageError("program '" + name + "' is a folder");
  if (!fs::exists(name, ignored)) {
    throw UsageError("program '" + name + "' does not exist" +
                     (name.find('/') == std::string::npos ? " here or in PATH" : ""));
  }
  throw UsageError("program '" + name + "' is not executable",
                   "chmod +x " + name + ", or name its interpreter: bash " + name);
}

}  // namespace

Program find_program(const std::vector<std::string>& words, ProgramKind kind) {
  const std::string& name = words.at(0);
  if (kind == ProgramKind::module) return with_python(words, {"-m"});
  if (kind == ProgramKind::path) {
    std::error_code ignored;
    if (!fs::exists(name, ignored)) throw UsageError("program '" + name + "' does not exist");
    return with_python(words, {"-c", kRunPath});
  }
  if (kind == ProgramKind::guess && is_python_source(name) && is_file(name) &&
      !(is_executable(name) && names_its_interpreter(name))) {
    return with_python(words, {});
  }
  Program program{"", words};
  // NOLINTNEXTLINE(bugprone-branch-clone): the order of the conditions counts.
  if (const auto found = in_path(name); found && !is_python_source(name)) {
    program.file = *found;
  } else if (is_executable(name)) {
    program.file = name;
  } else if (found) {
    program.file = *found;
  } else {
    cannot_execute(name);
  }
  return program;
}

}  // namespace lockstep::launch
