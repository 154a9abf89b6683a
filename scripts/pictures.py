#!/usr/bin/env python3
"""pictures.py record: runs README's command in a terminal (tmux) and writes what it shows to docs/images/run.txt.
pictures.py draw [FOLDER]: draws docs/images/run.svg from that, and docs/images/speed.svg and README's table of speed from
docs/images/targets.json, which `lockstep bench targets --output` writes. In FOLDER in place of docs/images, and then README
is left as it is."""

import html
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs/images"
COMMAND = "lockstep train --model mlp --dataset digits --devices 2 --max-epochs 3"
COLUMNS = 108
# Of README's table: the name in targets.json, and what a reader is told.
SHOWN = {
    "of Python's DDP": {
        "MLP step, 1 rank: of Python's time": "step of the MLP, batch 32, 1 rank",
        "MLP step, 2 ranks over Gloo: of Python's time": "the same, 2 ranks over Gloo",
        "MLP step, 2 ranks over shared memory: of Python's time": "the same, 2 ranks",
        "linear step, 2 ranks over shared memory: of Python's time": "step of Linear(20, 1), 2 ranks",
        "ConvNet step, batch 100, 2 ranks: of Python's time": "step of the ConvNet, batch 100, 2 ranks",
        "step of 6 x Linear(784, 784), 2 ranks: of Python's time": "step of 6 x Linear(784, 784), 2 ranks",
    },
    "of a whole Python program": {
        "lockstep train, MLP, 3 epochs, 2 ranks over Gloo, whole process: of Python's time":
            "MNIST, MLP, 3 epochs, 2 ranks over Gloo",
        "lockstep train, MLP, 3 epochs, 2 ranks, whole process: of Python's time":
            "the same, ours over shared memory",
        "its peak memory of a rank: of Python's": "peak memory of one of its ranks",
    },
    "of Gloo, called from C++": {
        "all-reduce of 437 KB, 2 ranks over shared memory: of Gloo's time": "all-reduce of 437 KB, 2 ranks",
        "all-reduce of 16 MB, 2 ranks over shared memory: of Gloo's time": "all-reduce of 16 MB, 2 ranks",
    },
    "of torchrun with Python ranks": {
        "lockstep run, 2 ranks to the first all-reduce and out: of torchrun's time":
            "`lockstep run`, 2 ranks to an all-reduce over Gloo",
    },
    "of our own with 1 rank": {
        "MLP step, 2 ranks over shared memory: of its own with 1 rank": "step of the MLP, 2 ranks",
    },
}
STYLE = """<style>
svg{--back:#fff;--text:#24292f;--dim:#57606a;--bar:#2f81f7;--line:#d0d7de}
@media(prefers-color-scheme:dark){svg{--back:#0d1117;--text:#e6edf3;--dim:#8b949e;--bar:#58a6ff;--line:#30363d}}
text{fill:var(--text);font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre}
.sans{font-family:system-ui,sans-serif}.dim{fill:var(--dim)}.back{fill:var(--back);stroke:var(--line)}
.bar{fill:var(--bar)}.mark{stroke:var(--text);stroke-width:2}.one{stroke:var(--line)}
</style>"""


def tmux(socket, *words):
    return subprocess.run(["tmux", "-L", socket, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def record():
    """The last screen of the command, without the empty lines below."""
    with tempfile.TemporaryDirectory() as folder:
        done = pathlib.Path(folder) / "done"
        socket = pathlib.Path(folder).name
        line = COMMAND.replace("lockstep", shlex.quote(str(ROOT / "build/bin/lockstep")), 1)
        tmux(socket, "new-session", "-d", "-x", str(COLUMNS), "-y", "30", f"{line}; tmux wait-for -S ran; read -r _")
        try:
            tmux(socket, "wait-for", "ran")
            shown = tmux(socket, "capture-pane", "-p").rstrip()
        finally:
            tmux(socket, "kill-server")
    (IMAGES / "run.txt").write_text(f"$ {COMMAND}\n{shown}\n")


def svg(width, height, parts):
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
            f"\n{STYLE}\n" + "\n".join(parts) + "\n</svg>\n")


def terminal(text):
    lines = text.rstrip("\n").split("\n")
    width, height = 8 * max(len(line) for line in lines) + 24, 18 * len(lines) + 28
    parts = [f'<rect class="back" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>']
    for i, line in enumerate(lines):
        shade = "" if line.startswith("$") or i == len(lines) - 1 else ' class="dim"'
        if line:
            parts.append(f'<text x="12" y="{26 + 18 * i}"{shade} textLength="{8 * len(line)}">{html.escape(line)}</text>')
    return svg(width, height, parts)


def number(value):
    """Two digits that count."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def rows_of(targets):
    """Headings as one text, figures as (text, bound, measured, met). What was not measured is left out."""
    found = {row["target"]: row for row in targets["results"]}
    for heading, figures in SHOWN.items():
        rows = [(text, found[name]["bound"], found[name]["measured"], found[name]["met"])
                for name, text in figures.items() if name in found]
        yield from [heading, *rows] if rows else []


def table(targets):
    lines = ["| our time or size as a fraction of the other's (below 1 is better) | target | measured |", "|---|---|---|"]
    for row in rows_of(targets):
        if isinstance(row, str):
            lines.append(f"| **{row}:** | | |")
        else:
            text, bound, measured, met = row
            lines.append(f"| {text} | {number(bound)} | {number(measured)}{'' if met else ' (missed)'} |")
    return "\n".join(lines) + "\n"


def chart(targets):
    """A bar for each figure, from 0 to the other's time or size, and a mark at the target."""
    rows = list(rows_of(targets))
    left, scale, height = 345, 300, 22 * len(rows) + 34
    largest = max(max(row[1:3]) for row in rows if not isinstance(row, str))
    width = int(left + scale * max(largest, 1) + 130)
    parts = [f'<rect class="back" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
             f'<line class="one" x1="{left + scale}" y1="12" x2="{left + scale}" y2="{height - 24}"/>',
             f'<text class="sans dim" x="{left + scale}" y="{height - 8}" text-anchor="middle">1: as the other</text>',
             f'<text class="sans dim" x="{left}" y="{height - 8}">bar: measured, mark: target</text>']
    for i, row in enumerate(rows):
        y = 10 + 22 * i
        if isinstance(row, str):
            heading = html.escape(row.replace("`", ""))
            parts.append(f'<text class="sans" font-weight="bold" x="12" y="{y + 16}">{heading}</text>')
            continue
        text, bound, measured, _ = row
        parts += [f'<text class="sans dim" x="20" y="{y + 16}">{html.escape(text.replace("`", ""))}</text>',
                  f'<rect class="bar" x="{left}" y="{y + 5}" width="{scale * measured:.1f}" height="13"/>',
                  f'<line class="mark" x1="{left + scale * bound:.1f}" y1="{y + 3}" x2="{left + scale * bound:.1f}" y2="{y + 20}"/>',
                  f'<text class="sans" x="{left + scale * max(measured, bound) + 6:.1f}" y="{y + 16}">'
                  f"{number(measured)} (target {number(bound)})</text>"]
    return svg(width, height, parts)


def readme_with(text):
    """README with this table between its marks."""
    page = (ROOT / "README.md").read_text()
    return re.sub(r"(?<=<!-- scripts/pictures.py draw -->\n).*?(?=<!-- end -->)", lambda _: text, page, flags=re.S)


def draw(folder):
    targets = json.loads((IMAGES / "targets.json").read_text())
    (folder / "run.svg").write_text(terminal((IMAGES / "run.txt").read_text()))
    (folder / "speed.svg").write_text(chart(targets))
    if folder == IMAGES:
        (ROOT / "README.md").write_text(readme_with(table(targets)))


if __name__ == "__main__":
    if sys.argv[1:] == ["record"]:
        record()
    elif sys.argv[1:2] == ["draw"] and len(sys.argv) <= 3:
        draw(pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else IMAGES)
    else:
        sys.exit(__doc__)
