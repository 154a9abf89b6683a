"""Rooms include what their CMakeLists.txt says and nothing else: never a room above or beside them.

The rules are those of lockstep_room(... ROOMS ...), which CMake links by and writes to rooms.json.
"""

import json
import pathlib
import re
import unittest

import lockstep_testing as t

ROOMS = json.loads((t.BUILD_DIR / "rooms.json").read_text())
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]((?:lockstep|tools|tests)/[^">]+)[">]', re.M)
ALL_OF_TORCH = re.compile(r"^\s*#\s*include\s*[<\"]torch/(torch|all|extension)\.h", re.M)
SUFFIXES = (".h", ".inc", ".cpp")
# Includes all rooms, and lies in none.
EVERYTHING = "lockstep/lockstep.h"


def library_files():
    for path in sorted((t.SOURCE_DIR / "lockstep").rglob("*")):
        if path.suffix in SUFFIXES:
            yield str(path.relative_to(t.SOURCE_DIR))


def stem(path):
    return str(pathlib.PurePath(path).with_suffix(""))


def room_of_files():
    """A file is of the room that lists it or its source; else of the last room of its folder."""
    listed, by_stem, by_folder = {}, {}, {}
    for room, facts in ROOMS.items():
        for path in facts["sources"] + facts["headers"] + facts["tests"]:
            listed[path] = room
            if path.startswith("lockstep/"):
                by_folder[str(pathlib.PurePath(path).parent)] = room
        for path in facts["sources"]:
            by_stem[stem(path)] = room
    rooms = {}
    for path in library_files():
        folder = str(pathlib.PurePath(path).parent)
        rooms[path] = listed.get(path) or by_stem.get(stem(path)) or by_folder.get(folder)
    return rooms


class Layering(unittest.TestCase):
    maxDiff = None

    def test_every_file_is_of_a_room(self):
        self.assertEqual([path for path, room in room_of_files().items() if not room and path != EVERYTHING], [])

    def test_rooms_have_no_circle(self):
        order = list(ROOMS)
        up = [(room, below) for room in order for below in ROOMS[room]["may_include"]
              if order.index(below) >= order.index(room)]
        self.assertEqual(up, [])

    def test_includes_follow_what_cmake_links(self):
        rooms = room_of_files()
        wrong = []
        for path, room in rooms.items():
            if path == EVERYTHING:
                continue
            test = path in ROOMS[room]["tests"]
            allowed = {room, *ROOMS[room]["may_include"], *(ROOMS[room]["tests_may_include"] if test else [])}
            for included in INCLUDE.findall((t.SOURCE_DIR / path).read_text()):
                if path.endswith("_test.cpp") and included.startswith("tests/support/"):
                    continue
                if rooms.get(included) not in allowed:
                    wrong.append(f"{path} ({room}) includes {included} ({rooms.get(included)})")
        self.assertEqual(wrong, [])

    def test_rooms_write_the_whole_path(self):
        """Else an include may lead to another room and not show it."""
        other = re.compile(r'^\s*#\s*include\s*"((?!(?:lockstep|tests/support)/)[^"]*)"', re.M)
        self.assertEqual([f"{path} includes {included}" for path in library_files()
                          for included in other.findall((t.SOURCE_DIR / path).read_text())], [])

    def test_tools_include_no_tests_and_examples_public_headers_only(self):
        public = {header for facts in ROOMS.values() for header in facts["headers"]} | {EVERYTHING}
        wrong = []
        for folder in ("tools", "examples"):
            for path in sorted(p for p in (t.SOURCE_DIR / folder).rglob("*") if p.suffix in SUFFIXES):
                for included in INCLUDE.findall(path.read_text()):
                    if folder == "examples" and included not in public or (
                            included.startswith("tests/") and not path.stem.endswith("_test")):
                        wrong.append(f"{path.relative_to(t.SOURCE_DIR)} includes {included}")
        self.assertEqual(wrong, [])

    def test_public_headers_include_public_headers_only(self):
        public = {header for facts in ROOMS.values() for header in facts["headers"]} | {EVERYTHING}
        wrong = [f"{header} includes {included}" for header in sorted(public)
                 for included in INCLUDE.findall((t.SOURCE_DIR / header).read_text()) if included not in public]
        self.assertEqual(wrong, [])

    def test_the_page_shows_the_same_rules(self):
        page = (t.SOURCE_DIR / "docs" / "architecture.md").read_text()
        shown = {}
        for folder, name, below in re.findall(r"^\| `([^`]+)`(?: \(`([^`]+)`\))? \|.*\| ([^|]*) \|$", page, re.M):
            shown[name or folder.removeprefix("lockstep/").replace("/backends/", "_").replace("/", "_")] = set(
                re.findall(r"`([^`]+)`", below))
        self.assertEqual(shown, {room: set(facts["may_include"]) for room, facts in ROOMS.items()})

    def test_no_file_includes_all_of_libtorch(self):
        self.assertEqual([p for p in library_files() if ALL_OF_TORCH.search((t.SOURCE_DIR / p).read_text())], [])


if __name__ == "__main__":
    t.main()
