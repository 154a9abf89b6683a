"""Lower rooms never include upper ones; headers never include all of LibTorch."""

import re
import unittest

import lockstep_testing as t

# What each room may include beside itself; docs/architecture.md shows the same picture.
MAY_INCLUDE = {
    "base": set(),
    "comm": {"base"},
    "data": {"base", "comm"},
    "models": {"base"},
    "optim": {"base", "comm"},
    "launch": {"base", "comm"},
    "parallel": {"base", "comm", "optim"},
    "checkpoint": {"base", "comm", "data"},
    "train": {"base", "comm", "data", "models", "optim", "launch", "parallel", "checkpoint"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]lockstep/([a-z]+)/', re.M)
ALL_OF_TORCH = re.compile(r"^\s*#\s*include\s*[<\"]torch/(torch|all|extension)\.h", re.M)


def files(*patterns):
    for pattern in patterns:
        yield from sorted((t.SOURCE_DIR / "lockstep").rglob(pattern))


class Layering(unittest.TestCase):
    def test_rooms_are_known(self):
        rooms = {p.name for p in (t.SOURCE_DIR / "lockstep").iterdir() if p.is_dir()}
        self.assertEqual(rooms, set(MAY_INCLUDE))

    def test_lower_rooms_do_not_include_upper_ones(self):
        wrong = []
        for path in files("*.h", "*.cpp"):
            room = path.relative_to(t.SOURCE_DIR / "lockstep").parts[0]
            if room.endswith(".h"):
                continue  # lockstep/lockstep.h includes all rooms
            allowed = MAY_INCLUDE[room] | {room}
            for included in INCLUDE.findall(path.read_text()):
                if included not in allowed:
                    wrong.append(f"{path.relative_to(t.SOURCE_DIR)} includes lockstep/{included}")
        self.assertEqual(wrong, [])

    def test_no_file_includes_all_of_libtorch(self):
        wrong = [str(p.relative_to(t.SOURCE_DIR)) for p in files("*.h", "*.cpp") if ALL_OF_TORCH.search(p.read_text())]
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    t.main()
