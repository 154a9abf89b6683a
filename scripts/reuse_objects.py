"""A compiler's launcher: `reuse_objects.py BUILD compiler flags...`

Where the build folder BUILD has compiled the same file by the same command, that result is linked in place of
compiling it again. All else is compiled. BUILD must be up to date. For a folder that is used once: what is
linked knows nothing of the headers that it came from."""

import json
import os
import pathlib
import re
import shlex
import sys

build, command = pathlib.Path(sys.argv[1]), sys.argv[2:]


def key(words, project):
    """A command without the places of results. `project`: the folder of Lockstep's own targets."""
    text = re.sub(r" -(?:o|MF|MT) \S+| -MD\b", "", " ".join(words))
    return text.replace(str(project), "BUILD")


def made_before():
    """The result of the same command on a file of the same text: CMake makes those of unity builds."""
    if "-c" not in command:
        return None
    source = pathlib.Path(command[command.index("-c") + 1]).absolute()
    here = pathlib.Path.cwd()
    project = here / "lockstep" if (here / "lockstep" / "rooms.json").exists() else here
    wanted, theirs = key(command, project), build / source.relative_to(project) if project in source.parents else source
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if entry["file"] != str(theirs) or key(shlex.split(entry["command"]), build) != wanted:
            continue
        result = build / re.search(r" -o (\S+)", entry["command"])[1]
        return result if result.exists() and source.read_bytes() == theirs.read_bytes() else None
    return None


found = made_before()
if not found:
    os.execvp(command[0], command)
result, dependencies = (command[command.index(flag) + 1] if flag in command else None for flag in ("-o", "-MF"))
if os.path.lexists(result):
    os.remove(result)
os.symlink(found, result)
if dependencies:
    pathlib.Path(dependencies).write_text(f"{result}:\n")
