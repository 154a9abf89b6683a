"""`lockstep completion`: bash, zsh and fish complete the commands, their flags, choices and file names."""

import os
import pty
import select
import shutil
import subprocess
import time
import unittest

import lockstep_testing as t

# What is typed before TAB, and the words that it becomes.
LINES = {
    "est": ["estimate-memory"],
    "deb": ["debug"],
    "rep": ["report"],
    "train --log-d": ["train", "--log-dir"],
    "train --checkpoint-d": ["train", "--checkpoint-dir"],
    "train --optimizer adamw": ["train", "--optimizer", "adamw"],
    "train --optimizer rmsp": ["train", "--optimizer", "rmsprop"],
    "run --nproc-per": ["run", "--nproc-per-node"],
    "run --bind-to cor": ["run", "--bind-to", "core"],
    "bench scal": ["bench", "scaling"],
    "bench pipeline --plo": ["bench", "pipeline", "--plot"],
    "train --config some-f": ["train", "--config", "some-file.toml"],
    "run ./some-p": ["run", "./some-program"],
    "completion fi": ["completion", "fish"],
    "checkpoint insp": ["checkpoint", "inspect"],
    "checkpoint convert --t": ["checkpoint", "convert", "--to"],
    "run --rdzv-backend c1": ["run", "--rdzv-backend", "c10d"],
    "hel": ["help"],
    "help est": ["help", "estimate-memory"],
}
BEGIN = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}


def script(shell):
    return t.run(t.LOCKSTEP, "completion", shell).stdout


class Terminal:
    """A shell that believes it talks to a person."""

    def __init__(self, words, folder):
        self.process, self.fd = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            os.environ.update(TERM="dumb", HOME=str(folder), PS1="$ ", HISTFILE="")
            os.execvp(words[0], words)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.kill(self.process, 9)
        os.waitpid(self.process, 0)
        os.close(self.fd)

    def type(self, text, until, timeout=30):
        os.write(self.fd, text.encode())
        shown, end = "", time.monotonic() + timeout
        while until not in shown:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.fd], [], [], left)[0]:
                raise AssertionError(f"after {text!r} no {until!r} came: {shown!r}")
            shown += os.read(self.fd, 4096).decode(errors="replace")
        return shown


class Completion(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(t.temporary_folder())
        for name in ("some-file.toml", "some-program"):
            (self.folder / name).touch(0o755)

    def expect_lines(self, shell):
        if not shutil.which(shell):
            self.skipTest(f"{shell} is not installed")
        (self.folder / "completion").write_text(script(shell))
        show = f'lockstep() {{ [ "$2" = words ] && {t.LOCKSTEP} "$@" || {{ printf "[%s]" "$@"; echo ".""end"; }}; }}'
        start = "autoload -U compinit && compinit -u -D; " if shell == "zsh" else ""
        with Terminal(BEGIN[shell], self.folder) as terminal:
            terminal.type(f"{start}source ./completion; {show}; echo rea''dy\n", "ready")
            for typed, words in LINES.items():
                with self.subTest(typed):
                    shown = terminal.type(f"lockstep {typed}\t\n", ".end")
                    self.assertIn("".join(f"[{word}]" for word in words) + ".end", shown)

    def test_bash(self):
        self.expect_lines("bash")

    def test_zsh(self):
        self.expect_lines("zsh")

    def test_fish(self):
        if not shutil.which("fish"):
            self.skipTest("fish is not installed")
        (self.folder / "completion.fish").write_text(script("fish"))
        environment = t.clean_environment(HOME=self.folder, PATH=f"{os.path.dirname(t.LOCKSTEP)}:{os.environ['PATH']}")
        for typed, words in LINES.items():
            with self.subTest(typed):
                found = subprocess.run(
                    ["fish", "--no-config", "-c", f"source completion.fish; complete -C 'lockstep {typed}'"],
                    cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60)
                self.assertIn(words[-1], [line.split("\t")[0] for line in found.stdout.splitlines()], found.stderr)

    def test_every_flag_of_the_help_is_there(self):
        for command in ("train", "run", "eval", "env", "bench step"):
            text = t.run(t.LOCKSTEP, "completion", "words", *command.split(), "-").stdout
            page = t.run(t.LOCKSTEP, *command.split(), "--help-all" if command == "train" else "--help").stdout
            rows = [line for line in page.splitlines() if line.startswith("  -")]
            self.assertGreater(len(rows), 1, command)
            for name in (row.split()[0].strip(",") for row in rows):
                self.assertIn(f"{name}\t", text, command)


if __name__ == "__main__":
    t.main()
