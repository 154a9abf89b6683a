"""What bad input to `lockstep train` and `eval` gets: an error that names the thing and what to do; no hang."""

import fcntl
import gzip
import http.server
import itertools
import os
import pathlib
import pty
import re
import shutil
import socket
import struct
import subprocess
import termios
import threading
import time
import unittest

import lockstep_testing as t
import run_testing
from run_testing import OtherProgram

TIMEOUT = 60
LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")


class BadInput(unittest.TestCase):

    def refuse(self, command, code, *messages, env=None):
        """Checks the exit code, that each message is said, and that the error comes once."""
        result = t.run(t.LOCKSTEP, *command, check=False, timeout=TIMEOUT, env=env)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        for message in messages:
            self.assertIn(message, result.stderr)
        self.assertNotIn("test accuracy", result.stdout)
        return result

    def temporary(self):
        context = t.temporary_folder()
        folder = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return folder


class Words(BadInput):

    def test_mistyped_words_get_the_nearest_one(self):
        for flags, message in (
            (("--accum", 3), "did you mean '--accumulate-grad-batches'?"),
            (("--gpus", 2), "did you mean '--devices'?"),
            (("--gradient_accumulation_steps", 2), "did you mean '--accumulate-grad-batches'?"),
            (("--max-grad-norm", 2), "did you mean '--gradient-clip-val'?"),
            (("--bs", 2), "did you mean '--batch-size'?"),
            (("--nproc_per_node=2",), "did you mean '--devices'?"),
            (("-np", 2), "did you mean '--devices'?"),
            (("--dataset", "mnits"), "did you mean 'mnist'?"),
            (("--accelerator", "cudda"), "did you mean 'cuda'?"),
            # The tests of the parts that these go through have more of their kind.
            *LONG * [
                (("--modle", "mlp"), "did you mean '--model'?"),
                (("--max_epoch", 3), "did you mean '--max-epochs'?"),
                (("--epochs", 3), "did you mean '--max-epochs'?"),
                (("-lr", 3), "did you mean '--lr'?"),
                (("--ngpus", 2), "did you mean '--devices'?"),
                (("--model", "convnt"), "did you mean 'convnet'?"),
                (("--optimizer", "adm"), "did you mean 'adam'?"),
                (("--schedule", "cosin"), "did you mean 'cosine'?"),
                (("--backend", "glo"), "did you mean 'gloo'?"),
                (("--on-nan", "stp"), "did you mean 'stop'?"),
                (("--memory-format", "channel-last"), "did you mean 'channels-last'?"),
            ],
        ):
            self.refuse(("train", *flags), 2, message)

    def test_every_command_suggests(self):
        for command, message in (
            (("trian",), "did you mean 'train'?"),
            (("ev",), "did you mean 'eval'?"),
            (("help", "trian"), "did you mean 'train'?"),
            (("eval", "--load", "x"), "did you mean '--load-weights'?"),
            (("run", "--nproc", 2, "true"), "did you mean '--nproc-per-node'?"),
            (("bench", "step", "--roun", 2), "did you mean '--rounds'?"),
            (("bench", "stepp"), "did you mean 'step'?"),
            (("env", "--jsno"), "did you mean '--json'?"),
        ):
            self.refuse(command, 2, message)

    def test_an_unknown_value_has_one_wording(self):
        for command, message in (
            (("train", "--backend", "glo"), "--backend: unknown value 'glo'; expected one of auto, gloo, hierarchical, mpi, nccl, shm"),
            (("eval", "--model", "mpl"), "--model: unknown value 'mpl'; expected one of mlp, "),
            (("train", "--dataset", "imagenet"),
             "--dataset: unknown value 'imagenet'; expected one of mnist, fashion-mnist, cifar10, digits, random, file:PATH, text:PATH, folder:PATH"),
            (("bench", "step", "--backend", "glo"), "--backend: unknown value 'glo'; expected one of "),
            (("bench", "step", "--model", "mpl"), "--model: unknown value 'mpl'; expected one of mlp, "),
            (("run", "--rdzv-backend", "stati", "true"), "--rdzv-backend: unknown value 'stati'; expected one of "),
        ):
            self.refuse(command, 2, message)

    def test_help_of_every_command(self):
        pages = {}
        for words in (["train"], ["eval"], ["run"], ["env"], ["bench"], ["bench", "step"], ["bench", "allreduce"],
                      ["bench", "loader"], ["bench", "launch"], ["bench", "train"], ["bench", "targets"]):
            page = t.run(t.LOCKSTEP, *words, "--help").stdout
            self.assertIn(f"Usage: lockstep {' '.join(words)}", page)
            pages[tuple(words)] = page
        self.assertEqual(len(set(pages.values())), 11, "each has a page of its own")
        self.assertEqual(t.run(t.LOCKSTEP, "help", "bench", "step").stdout, pages["bench", "step"])
        files = t.run(t.LOCKSTEP, "help", "train", "files").stdout
        self.assertIn("--checkpoint-dir", files)
        self.assertNotIn("--max-epochs", files)
        data = t.run(t.LOCKSTEP, "help", "train", "data").stdout
        self.assertIn("--num-workers", data)
        self.assertNotIn("--checkpoint-dir", data)
        everything = t.run(t.LOCKSTEP, "help", "train", "--help-all").stdout
        for page in (files, data):
            self.assertIn(page, everything)
        self.assertNotIn("--sizes", pages["bench", "step"])
        self.refuse(("bench", "step", "--sizes", 4), 2, "unknown flag '--sizes'")

    def test_help_follows_the_terminals_width(self):
        pages = ([], ["train"], ["eval"], ["run"], ["env"], ["bench"], ["bench", "step"])
        for columns, of in ((40, pages), (57, pages[1:2]), (72, pages[:1]), (100, pages if LONG else pages[:2])):
            for words in of:
                text = self.help_on_terminal(columns, *words)
                longest = max(text.splitlines(), key=len)
                self.assertLessEqual(len(longest), columns, longest)
                self.assertGreater(len(longest), columns - 12, "the width is made use of")

    def test_help_of_train_is_one_screen(self):
        for columns in (80, 100)[:1 + LONG]:
            lines = self.help_on_terminal(columns, "train").splitlines()
            self.assertLess(len(lines), 24, "the prompt has the last line")
            self.assertGreater(sum(line.startswith("  --") for line in lines), 12)

    def test_man_pages(self):
        """Without a warning by who reads them, where one is installed; and with every flag."""
        pages = {}
        commands = re.findall(r"^  ([a-z-]+) ", t.run(t.LOCKSTEP, "--help").stdout.split("Examples:")[0], re.M)
        self.assertIn("train", commands)
        for command in ([], *([name] for name in commands)):
            page = t.run(t.LOCKSTEP, *command, "--man-page=1.2,2026-01-31").stdout
            pages[*command,] = page
            self.assertTrue(page.startswith(f'.TH {"-".join(["lockstep", *command]).upper()} 1 2026-01-31 "lockstep 1.2"'), page[:99])
            for reader in (["mandoc", "-T", "lint", "-W", "warning"], ["groff", "-man", "-ww", "-z", "-Tutf8"]):
                if shutil.which(reader[0]):
                    said = subprocess.run(reader, input=page, capture_output=True, text=True, timeout=60)
                    self.assertEqual(said.stdout + said.stderr, "", command)
        self.assertIn("\\-\\-max\\-epochs N", pages["train",])

    def help_on_terminal(self, columns, *words):
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        with subprocess.Popen([t.LOCKSTEP, *words, "--help"], stdout=follower, env=t.clean_environment()) as process:
            os.close(follower)
            text = b""
            try:
                while piece := os.read(leader, 1 << 16):
                    text += piece
            except OSError:  # the last holder of the other end is gone
                pass
        os.close(leader)
        self.assertEqual(process.returncode, 0)
        return text.decode()

    def test_a_full_disk_behind_standard_output_is_no_success(self):
        if not pathlib.Path("/dev/full").exists():
            self.skipTest("this system has no /dev/full")
        for command in (("--help",), ("--version",), ("train", "--help"), ("run", "--help"),
                        ("env", "--json"), ("train", "--max-epochs", 0), *LONG * [("env",)]):
            with open("/dev/full", "w") as full:
                result = subprocess.run([t.LOCKSTEP, *map(str, command)], stdout=full, stderr=subprocess.PIPE,
                                        text=True, env=t.clean_environment(), timeout=TIMEOUT, check=False)
            self.assertEqual(result.returncode, 1, command)
            self.assertEqual(result.stderr.count("cannot write standard output: No space left on device"), 1,
                             result.stderr)

    def test_numbers_out_of_range_name_the_flag(self):
        for flags, message in (
            (("--devices", "two"), "--devices: 'two' is neither auto nor a whole number"),
            (("--batch-size", 0), "--batch-size"),
            (("--lr", "fast"), "--lr: 'fast' is not a number"),
            (("--lr", "nan"), "--lr"),
            (("--timeout", "1e10"), "--timeout: '1e10' is not a number from 0.001 to 1000000"),
            (("--lr",), "--lr needs a value"),
            *LONG * [
                (("--devices", 0), "--devices"),
                (("--max-epochs", -1), "--max-epochs"),
                (("--lr", -1), "--lr"),
                (("--limit-train-batches", 0), "--limit-train-batches"),
                (("--timeout", 0), "--timeout: '0' is not a number from 0.001 to 1000000"),
                (("--timeout", "inf"), "--timeout: 'inf' is not a number from 0.001 to 1000000"),
            ],
        ):
            self.refuse(("train", *flags), 2, message)

    def test_other_strategies_will_come(self):
        self.refuse(("train", "--strategy", "ddpp"), 2, "did you mean 'ddp'")

    def test_combinations(self):
        self.refuse(("train", "--resume", "auto"), 2, "--resume auto needs --checkpoint-dir")
        self.refuse(("eval",), 2, "--load-weights is missing")


class Configuration(BadInput):

    def write(self, text):
        path = self.temporary() / "run.toml"
        path.write_text(text)
        return path

    def test_unknown_keys_and_wrong_values(self):
        path = self.write("model = 'mlp'\nmax-epoch = 3\n")
        self.refuse(("train", "--config", path), 2, f"{path}, line 2: unknown flag '--max-epoch'; did you mean '--max-epochs'?")
        self.refuse(("train", "--config", self.write("lr = 'x'")), 2, "line 1: --lr: 'x' is not a number")
        path = self.write("lr = 1\nmodel = 'mpl'")
        self.refuse(("train", "--config", path), 2, f"{path}, line 2: --model: unknown value 'mpl'; expected one of mlp",
                    "did you mean 'mlp'?")
        path = self.write("\nbatch-size = 0")
        self.refuse(("train", "--config", path), 2, f"{path}, line 2: --batch-size: '0' is not a whole number of at least 1")
        path = self.write("lr = = 2")
        self.refuse(("train", "--config", path), 2, f"{path}, line 1: this is no TOML", "hint:")
        self.refuse(("train", "--config", "/none.toml"), 2, "--config /none.toml: ", "No such file", "hint:")


class Devices(BadInput):

    def test_an_accelerator_that_is_not_there(self):
        if pathlib.Path("/dev/nvidia0").exists():
            self.skipTest("this machine has a CUDA device")
        for devices in (1, 2):
            self.refuse(("train", "--accelerator", "cuda", "--devices", devices), 2, "there is no CUDA device here",
                        "--accelerator cpu")

    def test_a_backend_that_cannot_work_on_the_accelerator(self):
        self.refuse(("train", "--accelerator", "cpu", "--backend", "nccl"), 2, "--backend nccl needs CUDA")
        self.refuse(("train", "--accelerator", "cuda", "--backend", "gloo"), 2, "computes on the CPU")


class Surroundings(BadInput):
    """What a shell or a scheduler has set for us."""

    SHORT = ("--quiet", "--limit-train-batches", 3, "--max-epochs", 1)

    def limited(self, limits, *command, check=False, **env):
        """With `ulimit` set so."""
        start = time.monotonic()
        result = t.run("sh", "-c", f'{limits}; exec "$0" "$@"', t.LOCKSTEP, *command, check=check, timeout=TIMEOUT,
                       env=t.clean_environment(**env))
        return result, time.monotonic() - start

    def test_too_few_descriptors_are_told_before_anything_is_started(self):
        train = ("train", *self.SHORT, "--timeout", 60)
        for limit, ranks, command in ((20, 4, (*train, "--devices", 4)), (32, 8, (*train, "--devices", 8)),
                                      (20, 4, ("run", "--nproc-per-node", 4, t.LOCKSTEP, *train))):
            with self.subTest(limit=limit, command=command[0]):
                result, seconds = self.limited(f"ulimit -n {limit}", *command)
                self.assertEqual(result.returncode, 1, result.stderr)
                self.assertRegex(result.stderr, rf"\Alockstep {command[0]}: error: cannot start {ranks} ranks: \d+ open files and "
                                 rf"sockets are needed in one process, but `ulimit -n` allows {limit} \(hard limit {limit}\)\n"
                                 r"  hint: .*`ulimit -n \d+`.*\n\Z")
                self.assertLess(seconds, 30)

    def test_as_many_descriptors_as_are_asked_for_suffice(self):
        run = ("run", "--nproc-per-node", 4, "--tee", 3, "--log-dir", self.temporary(), t.LOCKSTEP)
        for backend, command in (("shm", run), ("gloo", ()), *LONG * [("shm", ()), ("gloo", run)]):
            words = (*command, "train", *self.SHORT, "--backend", backend, *(() if command else ("--devices", 4)))
            refused, _ = self.limited("ulimit -n 20", *words)
            enough = int(re.search(r"ranks: (\d+) open files", refused.stderr)[1])
            result, _ = self.limited(f"ulimit -n {enough}", *words)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertNotIn("error", result.stderr)

    def test_a_rank_that_no_launcher_of_ours_started_tells_it_too(self):
        result, seconds = self.limited("ulimit -n 20", "train", *self.SHORT, RANK=1, WORLD_SIZE=64,
                                       MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("rank 1 of 64: ", result.stderr)
        self.assertIn("`ulimit -n` allows 20", result.stderr)
        self.assertLess(seconds, 10)

    def test_a_soft_limit_is_raised(self):
        result, _ = self.limited("ulimit -S -n 20", "train", *self.SHORT, "--devices", 4)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr, "")

    def test_a_limit_of_files_sizes_is_named(self):
        """In blocks of 512 bytes. It counts for shared memory too, so `auto` takes Gloo."""
        train = ("train", *self.SHORT, "--devices", 2)
        result, _ = self.limited("ulimit -f 1000", *train)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        for limit, words in ((1000, ("--backend", "shm")), (100, ("--checkpoint-dir", self.temporary()))):
            result, _ = self.limited(f"ulimit -f {limit}", *train, *words)
            self.assertEqual(result.returncode, 1, result.stderr)
            self.assertIn("`ulimit -f` allows", result.stderr)
            self.assertIn(" KB", result.stderr)
        result, _ = self.limited("ulimit -f 100", "train", *self.SHORT, "--checkpoint-dir", self.temporary())
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("`ulimit -f` allows", result.stderr)

    def test_a_rank_that_waits_for_others_says_how_many_have_come(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env = t.clean_environment(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with subprocess.Popen([t.LOCKSTEP, "train"], stderr=subprocess.PIPE, text=True, env=env) as rank:
            killer = threading.Timer(TIMEOUT, rank.kill)
            killer.start()
            try:
                self.assertEqual(rank.stderr.readline(), "waiting for the ranks: 1 of 2 have come\n")
            finally:
                killer.cancel()
                rank.kill()

    def test_a_variable_that_is_wrong_is_named_once_and_nothing_starts(self):
        commands = itertools.cycle((("train", *self.SHORT, "--devices", 3), ("run", "--nproc-per-node", 3, t.LOCKSTEP, "train")))
        for name, value, says in (("LOCKSTEP_TIMEOUT", "soon", "LOCKSTEP_TIMEOUT='soon': expected a number from 0.001"),
                                  *LONG * [("LOCKSTEP_TIMEOUT", "1e10", "from 0.001 to 1000000 seconds"),
                                           ("LOCKSTEP_TIMEOUT", "inf", "from 0.001 to 1000000 seconds")],
                                  ("LOCKSTEP_DEBUG", "detial", "LOCKSTEP_DEBUG: unknown level 'detial'"),
                                  ("LOCKSTEP_LOG_LEVEL", "warn", "LOCKSTEP_LOG_LEVEL: unknown level 'warn'")):
            result = self.refuse(next(commands), 2, f"lockstep: error: environment variable {name}", says,
                                 env=t.clean_environment(**{name: value}))
            self.assertEqual(result.stderr.count(name), 1, result.stderr)
            self.assertNotIn("rank", result.stderr)
        t.run(t.LOCKSTEP, "--help", env=t.clean_environment(LOCKSTEP_TIMEOUT="soon"))
        t.run(t.LOCKSTEP, "env", env=t.clean_environment(LOCKSTEP_TIMEOUT="soon"))

    def test_a_temporary_folder_that_is_not_there_is_replaced(self):
        for command in (("train", *self.SHORT, "--devices", 2), ("run", "--nproc-per-node", 2, "true")):
            t.run(t.LOCKSTEP, *command, env=t.clean_environment(TMPDIR="/nowhere"))

    def test_a_folder_that_was_deleted_is_told(self):
        folder = self.temporary() / "gone"
        for command in (("train", *self.SHORT), ("run", "true")):
            folder.mkdir()
            result = t.run("sh", "-c", f'cd "{folder}" && rmdir "{folder}" && exec "$0" "$@"', t.LOCKSTEP, *command, check=False)
            self.assertEqual(result.returncode, 1, result.stderr)
            self.assertIn("cannot tell the working folder: No such file or directory", result.stderr)
            self.assertIn("cd to another one", result.stderr)
            self.assertEqual(len(result.stderr.splitlines()), 2)


class Data(BadInput):

    def test_files_that_are_missing(self):
        folder = self.temporary()
        for devices in (1, 2):
            self.refuse(("train", "--dataset", "mnist", "--data-dir", folder, "--devices", devices), 1, str(folder),
                        "train-images-idx3-ubyte")

    @unittest.skipUnless(t.data_dir(), t.NO_DATA)
    def test_files_that_are_empty_truncated_or_foreign(self):
        good = t.data_dir() / "mnist"
        name = "train-labels-idx1-ubyte.gz"
        packed = (good / name).read_bytes()
        for content, what in ((b"", "empty"), (packed[:2000], "truncated"), (b"\x89PNG\r\n" + bytes(5000), "foreign"),
                              (gzip.compress(b"\x00\x00\x08\x01\x00\x00\xea\x60" + bytes(100)), "short")):
            with self.subTest(what):
                folder = self.temporary()
                for path in good.glob("*.gz"):
                    (folder / path.name).symlink_to(path.resolve())
                (folder / name).unlink()
                (folder / name).write_bytes(content)
                self.refuse(("train", "--dataset", "mnist", "--data-dir", folder, "--devices", 2), 1, name, "hint:")

    def test_a_batch_larger_than_the_data(self):
        self.refuse(("train", "--batch-size", 5001, "--devices", 2), 2,
                    "--batch-size 5001 is larger than the 5000 samples that each of 2 ranks has",
                    "give at most --batch-size 5000")

    def test_a_model_and_data_that_do_not_fit(self):
        self.refuse(("train", "--model", "linear", "--dataset", "digits"), 2, "model linear and dataset digits",
                    "the model takes 20 numbers a sample, the dataset's samples have 784")
        self.refuse(("train", "--model", "mlp", "--dataset", "random", "--devices", 2), 2,
                    "the model takes 784 numbers a sample, the dataset's samples have 20")


class FailingDownload(BadInput):

    def test_it_is_tried_once_before_ranks_start(self):
        asked = []  # With so many processes there.

        class Nothing(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(len(run_testing.processes_with(mark)))
                self.send_error(404)

            def log_message(self, *_):
                pass

        env, mark = run_testing.marked_environment()
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nothing)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            for first in ("mnist", "cifar10"):
                variable = f"LOCKSTEP_{first.upper()}_URL"
                self.refuse(("train", "--dataset", first, "--data-dir", self.temporary(), "--download", "--devices", 3), 1, variable,
                            env={**env, variable: f"http://127.0.0.1:{server.server_address[1]}/"})
                self.assertEqual(asked, [1])
                asked.clear()
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class Weights(BadInput):

    def test_missing_foreign_and_of_another_model(self):
        folder = self.temporary()
        weights = folder / "mlp.safetensors"
        t.run(t.LOCKSTEP, "train", "--max-epochs", 0, "--save-weights", weights)
        self.refuse(("eval", "--load-weights", folder / "none", "--devices", 2), 1, str(folder / "none"), "hint:")
        text = folder / "text"
        text.write_text("these are no weights, though the file is long enough for a header")
        self.refuse(("eval", "--load-weights", text), 1, str(text))
        cut = folder / "cut.safetensors"
        cut.write_bytes(weights.read_bytes()[:-100])
        size = weights.stat().st_size
        self.refuse(("eval", "--load-weights", cut, "--devices", 2), 1, str(cut),
                    f"truncated: the header says {size} bytes, the file has {size - 100}")
        result = self.refuse(("eval", "--model", "wide", "--load-weights", weights), 1,
                             f"{weights} does not fit the model; tensors: 8 missing (",
                             "of another shape (layers.0.weight [128, 784] in place of [784, 784]")
        self.assertLess(max(map(len, result.stderr.splitlines())), 700)

    def test_folders(self):
        folder = self.temporary()
        self.refuse(("eval", "--load-weights", folder), 1, f"folder {folder} holds no weights", "hint:")
        saved = folder / "run"
        trained = t.run(t.LOCKSTEP, "train", "--model", "wide", "--limit-train-batches", 3, "--max-epochs", 2,
                        "--checkpoint-dir", saved, "--save-weights", folder / "w.safetensors")
        # The model is that of config.toml.
        for flags in ((saved,), (saved / "latest", "--devices", 2), (f"{saved}/step-00000006/",),
                      (folder / "w.safetensors", "--config", saved / "config.toml")):
            result = t.run(t.LOCKSTEP, "eval", "--load-weights", *flags)
            self.assertEqual(result.stdout.splitlines()[-1], trained.stdout.splitlines()[-1])
        self.refuse(("eval", "--load-weights", saved, "--model", "mlp"), 1, "does not fit the model")


class Places(BadInput):
    """Files and folders that are mistyped are named before anything is loaded, with one rank and with two in turn."""

    devices = itertools.cycle((2, 1))

    def refuse_early(self, flags, code, *messages):
        result = self.refuse(("train", *flags, "--devices", next(self.devices)), code, *messages, "hint:")
        self.assertEqual(result.stdout, "")
        self.assertNotIn("it reported", result.stderr, "no process was started for it")

    def test_what_is_written(self):
        file = self.temporary() / "file"
        file.write_text("x")
        for flag in ("--save-weights", "--save-best", "--metrics-file"):
            self.refuse_early((flag, "/proc/x/y"), 2, f"{flag} /proc/x/y: there is no folder /proc/x")
            self.refuse_early((flag, file.parent), 2, f"{flag} {file.parent}: this is a folder",
                              "metrics.jsonl" if flag == "--metrics-file" else ".safetensors")
        for flag in ("--save-weights", "--save-best")[:1 + LONG]:
            self.refuse_early((flag, "/dev/null"), 2, f"{flag} /dev/null: cannot write /dev/null: it is there and is no ")
        self.refuse_early(("--save-weights", file, "--save-best", file), 2,
                          f"--save-weights and --save-best name the same file, {file}")
        for flag in ("--save-best", "--save-weights")[:1 + LONG]:
            self.refuse_early((flag, file.parent / "m.onnx"), 2, "weights are written as safetensors or .pt, not as onnx",
                              f"name the file {file.parent / 'm.safetensors'}")
        self.assertEqual(file.read_text(), "x")
        self.refuse_early(("--checkpoint-dir", "/proc/x"), 2,
                          "--checkpoint-dir /proc/x: cannot make this folder: No such file or directory")
        self.refuse_early(("--checkpoint-dir", file), 2, f"--checkpoint-dir {file}: cannot make this folder")

    def test_what_is_resumed(self):
        folder = self.temporary()
        self.refuse_early(("--resume", "atuo", "--checkpoint-dir", folder / "a"), 2,
                          "--resume atuo: there is no such folder", "did you mean 'auto'?")
        self.assertFalse((folder / "a").exists())
        self.refuse_early(("--resume", folder / "none"), 2, f"--resume {folder / 'none'}: there is no such folder")
        (folder / "file").write_text("x")
        self.refuse_early(("--resume", folder / "file"), 2, "this is a file")

    def test_what_is_loaded(self):
        self.refuse_early(("--load-weights", "/none.st"), 1, "no weights at /none.st")

    def test_what_has_no_end_is_not_read_for_ever(self):
        self.refuse_early(("--config", "/dev/zero"), 2, "--config /dev/zero: ", "more than 1048576 bytes")
        self.refuse(("eval", "--load-weights", "/dev/zero"), 1, "/dev/zero is no file; expected a regular file", "hint:")

    def test_data_of_no_name_and_a_file_for_a_folder(self):
        self.refuse_early(("--dataset", "file:"), 2, "--dataset file: names no file")
        file = self.temporary() / "file"
        file.write_text("x")
        self.refuse(("train", "--dataset", "mnist", "--data-dir", file), 1, f"mnist not found in {file}", "--data-dir")

    def test_schedules_are_told_in_flags(self):
        self.refuse(("train", "--schedule", "cosine", "--warmup-steps", 500, "--max-epochs", 1), 2,
                    "--warmup-steps 500 leaves nothing for --schedule cosine: the run has 157 steps", "hint:")


class Numbers(BadInput):
    """A loss that is NaN or infinite: the step and the rank are named, and no rank hangs."""

    def data_with_a_nan(self, folder):
        import numpy

        rng = numpy.random.default_rng(5)
        data = rng.random((400, 784), dtype="float32")
        targets = rng.integers(0, 10, 400)
        # Of two ranks one has this sample in an epoch.
        data[123, 45] = float("nan")
        numpy.savez(folder / "bad.npz", data=data, targets=targets, test_data=data[:50], test_targets=targets[:50])
        return f"file:{folder / 'bad.npz'}"

    def test_stops_with_step_and_rank(self):
        result = self.refuse(("train", "--dataset", self.data_with_a_nan(self.temporary()), "--batch-size", 16,
                              "--devices", 2), 1, "the loss is", "nan on rank ", "(epoch 1)", "--on-nan skip",
                             "--on-nan proceed")
        self.assertRegex(result.stderr, r"nan on rank [01] at step ([1-9]|1[0-3]) \(epoch 1\)")

    def test_goes_on_by_flag(self):
        dataset = self.data_with_a_nan(self.temporary())
        for devices in (2, 1)[:1 + LONG]:
            result = t.run(t.LOCKSTEP, "train", "--dataset", dataset, "--batch-size", 16, "--devices", devices,
                           "--max-epochs", 2, "--on-nan", "skip", timeout=TIMEOUT)
            self.assertEqual(result.stderr.count("the step is skipped on all ranks"), 2, result.stderr)

    def test_batch_norm_has_seen_nothing_of_a_skipped_step(self):
        dataset = self.data_with_a_nan(self.temporary())
        for devices in (2, 1)[:1 + LONG]:
            result = t.run(t.LOCKSTEP, "train", "--dataset", dataset, "--model", "convnet", "--batch-size", 16,
                           "--devices", devices, "--max-epochs", 1, "--on-nan", "skip", timeout=TIMEOUT)
            self.assertIn("the step is skipped on all ranks", result.stderr)
            self.assertRegex(result.stdout.splitlines()[-1], r"test accuracy 0\.\d+ loss \d")

    def test_skipping_everything_is_no_success(self):
        import numpy

        folder = self.temporary()
        data = numpy.full((400, 784), numpy.nan, dtype="float32")
        targets = numpy.zeros(400, dtype="int64")
        numpy.savez(folder / "bad.npz", data=data, targets=targets, test_data=data[:50], test_targets=targets[:50])
        for devices in (2, 1)[:1 + LONG]:
            result = self.refuse(("train", "--dataset", f"file:{folder / 'bad.npz'}", "--batch-size", 4, "--on-nan",
                                  "skip", "--devices", devices), 1, "every step of epoch 1 was skipped", "hint:")
            self.assertIn("at step 3 ", result.stderr)
            self.assertNotIn("at step 4 ", result.stderr, "the warnings have an end")
            self.assertNotIn("-nan", result.stdout + result.stderr)

    def test_a_run_that_diverges(self):
        self.refuse(("train", "--lr", "1e30", "--devices", 2), 1, "the loss is", "at step ")


class Launchers(BadInput):

    def test_ranks_out_of_range_and_mixed_or_missing_variables(self):
        base = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "0"}
        for change, message in (({"RANK": "2"}, "RANK"), ({"RANK": "-1"}, "RANK"), ({"RANK": "one"}, "RANK"),
                                ({"MASTER_PORT": "70000"}, "MASTER_PORT")):
            self.refuse(("train",), 2, message, "hint:", env=t.clean_environment(**{**base, **change}))

    def test_a_rank_whose_launcher_does_not_say_enough_trains_nothing_alone(self):
        for variables, name in (({"PMIX_RANK": 1}, "pmix"), ({"PMI_RANK": 0, "PMI_SIZE": 2}, "mpich"),
                                ({"SLURM_PROCID": 1, "SLURM_STEP_ID": 0}, "slurm")):
            self.refuse(("train",), 2, name, "hint:", env=t.clean_environment(**variables))

    def test_the_variable_of_a_kubernetes_service_named_master_does_not_count_on_one_host(self):
        env = t.clean_environment(MASTER_PORT="tcp://10.0.0.1:80")
        result = t.run(t.LOCKSTEP, "train", "--model", "mlp", "--dataset", "digits", "--max-epochs", 1, "--limit-train-batches", 2,
                       "--devices", 2, env=env)
        self.assertIn("2 ranks", result.stdout)

    def test_another_program_at_rank_0s_port_is_told(self):
        with OtherProgram(b"SSH-2.0-OpenSSH_9.2p1\r\n") as server:
            env = t.clean_environment(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=server.port)
            self.refuse(("train", "--timeout", 5), 1, "SSH-2.0-OpenSSH_9.2p1", env=env)

    def test_a_peer_that_never_comes(self):
        import socket

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env = t.clean_environment(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2",
                                  MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        self.refuse(("train", "--timeout", 2), 1, "127.0.0.1", str(port), env=env)


if __name__ == "__main__":
    t.main()
