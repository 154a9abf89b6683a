"""A compiler's launcher: `reuse_object.py INDEX compiler flags...`

INDEX is a JSON file: for a path of a result the one that the same command has made elsewhere. That one is
linked in place of compiling it again. All else is compiled."""

import json
import os
import sys

index, command = sys.argv[1], sys.argv[2:]


def after(flag):
    return command[command.index(flag) + 1] if flag in command else None


result, dependencies = after("-o"), after("-MF")
with open(index) as file:
    made = json.load(file).get(os.path.abspath(result or ""))
if not made:
    os.execvp(command[0], command)
if os.path.lexists(result):
    os.remove(result)
os.symlink(made, result)
if dependencies:
    with open(dependencies, "w") as file:
        file.write(f"{result}:\n")
