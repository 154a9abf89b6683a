"""`lockstep run`: variables, programs, output, several hosts, and what a mistyped flag gets."""

import json
import os
import pathlib
import pty
import select
import socket
import stat
import subprocess
import sys
import unittest

from lockstep_testing import LOCKSTEP, clean_environment, main, run, temporary_folder
from run_testing import CPP_RANK, MARK, TORCHRUN, Launched, lockstep_run
import torch_forks

LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
DUMP = """
import json, os, sys
with open(os.path.join(os.environ["OUT"], os.environ["LOCAL_RANK"]), "w") as f:
    json.dump({"env": dict(os.environ), "argv": sys.argv[1:], "stdin": sys.stdin.read()}, f)
"""

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(t)
print("sum", int(t.item()), "of", dist.get_world_size())
dist.destroy_process_group()
"""


# Takes the terminal on its standard input as its controlling one, then becomes the program.
CONTROLLING = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def script(folder, text, name="script.py", executable=False):
    path = pathlib.Path(folder) / name
    path.write_text(text)
    if executable:
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def dumped(folder, ranks):
    return [json.loads((pathlib.Path(folder) / str(rank)).read_text()) for rank in range(ranks)]


def torchrun():
    return (*torch_forks.python(), "-m", "torch.distributed.run")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Variables(unittest.TestCase):
    # Set by Python itself or by the shell, not by the launcher.
    FOREIGN = {"LC_CTYPE", "_", "OLDPWD", "SHLVL", "OUT", MARK}

    def compare(self, flags, same):
        """Both launchers with the same flags give the same variables; `same` names those whose
        values must agree although they could differ between two runs."""
        if not TORCHRUN.exists():
            self.skipTest(f"no torchrun at {TORCHRUN}")
        with temporary_folder() as folder:
            program = script(folder, DUMP)
            theirs, ours = folder / "torchrun", folder / "lockstep"
            theirs.mkdir(), ours.mkdir()
            env = clean_environment(OUT=theirs, PYTHON_EXEC=sys.executable)
            env.pop("OMP_NUM_THREADS")
            run(*torchrun(), *flags, program, env=env)
            result = run(LOCKSTEP, "run", *flags, program, env={**env, "OUT": str(ours)})
            self.assertNotIn("OMP_NUM_THREADS", result.stderr, "said on a terminal only")
            for left, right in zip(dumped(theirs, 2), dumped(ours, 2)):
                left, right = left["env"], right["env"]
                free = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"} - same
                for name in set(left) - self.FOREIGN:
                    self.assertIn(name, right)
                    if name not in free:
                        self.assertEqual(left[name], right[name], name)
                # How OpenMP's threads wait is chosen where nobody has.
                extra = {n for n in set(right) - set(left) - self.FOREIGN - {"GOMP_SPINCOUNT"} if not n.startswith("LOCKSTEP_")}
                self.assertEqual(extra, set())
                self.assertEqual(socket.gethostbyname(left["MASTER_ADDR"]), socket.gethostbyname(right["MASTER_ADDR"]))
                self.assertGreater(int(right["MASTER_PORT"]), 0)
                self.assertTrue(right["TORCHELASTIC_RUN_ID"])
                self.assertTrue(right["TORCHELASTIC_ERROR_FILE"].endswith("error.json"))
                self.assertEqual(right["OMP_NUM_THREADS"], "1")

    def test_on_one_host_they_are_torchruns(self):
        self.compare(["--standalone", "--nproc-per-node=2", "--role", "trainer"], set())

    def test_with_an_address_they_are_torchruns(self):
        port = free_port()
        self.compare(["--nnodes", "1", "--node_rank", "0", "--nproc_per_node", "2", "--master_addr=127.0.0.1",
                      f"--master_port={port}", "--rdzv_id", "job7"],
                     {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"})

    def test_the_users_number_of_threads_stays(self):
        code, out, err = lockstep_run("--nproc-per-node", 2, "sh", "-c", "echo $OMP_NUM_THREADS",
                                      env={"OMP_NUM_THREADS": "3"})
        self.assertEqual((code, sorted(out.split("\n"))), (0, ["", "[rank0]: 3", "[rank1]: 3"]), err)
        self.assertEqual(err, "")

    def test_schedulers_variables_are_defaults(self):
        code, out, _ = lockstep_run("--nproc-per-node", 1, "sh", "-c", "echo $WORLD_SIZE $ROLE_NAME",
                                    env={"PET_NPROC_PER_NODE": "3", "PET_ROLE": "x"})
        self.assertEqual((code, out), (0, "[rank0]: 1 x\n"), "a flag wins over the environment")

    def test_number_of_processes_by_name(self):
        code, out, _ = lockstep_run("--nproc-per-node", "cpu", "--local-ranks-filter", 0, "sh", "-c",
                                    "echo $WORLD_SIZE")
        self.assertEqual((code, out), (0, f"[rank0]: {len(os.sched_getaffinity(0))}\n"))


class Programs(unittest.TestCase):
    def test_arguments_are_untouched_and_standard_input_is_empty(self):
        with temporary_folder() as folder:
            words = ["--nproc-per-node", "7", "-m", "--", "--tee=3", "", "a b", "${local_rank}", "--help"]
            code, _, err = lockstep_run("--nproc-per-node", 2, script(folder, DUMP), *words, env={"OUT": str(folder)})
            self.assertEqual(code, 0, err)
            for rank in dumped(folder, 2):
                self.assertEqual(rank["argv"], words)
                self.assertEqual(rank["stdin"], "")

    def test_a_module(self):
        with temporary_folder() as folder:
            script(folder, DUMP, "mod.py")
            code, _, err = lockstep_run("-m", "mod", "-x", env={"OUT": str(folder)}, cwd=folder)
            self.assertEqual((code, dumped(folder, 1)[0]["argv"]), (0, ["-x"]), err)

    def test_an_executable_script_is_run_by_its_interpreter(self):
        with temporary_folder() as folder:
            path = script(folder, "#!/bin/sh\necho shell $1\n", "odd.py", executable=True)
            self.assertEqual(lockstep_run(path, "-m")[:2], (0, "[rank0]: shell -m\n"))
            self.assertEqual(lockstep_run("--no-python", path, "-m")[:2], (0, "[rank0]: shell -m\n"))

    def test_python_is_that_of_the_path_or_the_users(self):
        with temporary_folder() as folder:
            python = script(folder, "#!/bin/sh\necho mine $1 $3\n", "mypython", executable=True)
            code, out, _ = lockstep_run(script(folder, ""), "x", env={"PYTHON_EXEC": str(python)})
            self.assertEqual((code, out), (0, "[rank0]: mine -u x\n"))

    def test_a_python_program_with_torch_distributed(self):
        with temporary_folder() as folder:
            code, out, err = lockstep_run("--nproc-per-node", 2, script(folder, ALL_REDUCE), timeout=120,
                                          env={"PYTHON_EXEC": sys.executable})
            if "No module named 'torch'" in err:
                self.skipTest("this Python has no torch")
            self.assertEqual((code, sorted(out.split("\n"))),
                             (0, ["", "[rank0]: sum 3 of 2", "[rank1]: sum 3 of 2"]), err)

    def test_a_cpp_program(self):
        if not CPP_RANK.exists():
            self.skipTest(f"{CPP_RANK} is not built")
        code, out, err = lockstep_run("--nproc-per-node", 2, CPP_RANK, "init")
        self.assertEqual(code, 0, err)
        sums = [json.loads(line.split(": ", 1)[1])["sum"] for line in out.splitlines()]
        self.assertEqual(len(sums), 2)
        self.assertEqual(sums[0], sums[1])


class Output(unittest.TestCase):
    def test_lines_of_ranks_stay_whole(self):
        # Written in odd pieces, so that lines arrive cut anywhere; some are longer than a pipe holds.
        text = """
import os, sys
rank = os.environ["RANK"]
sizes = [1, 100, 5000, 70000, 0, 300]
data = "".join(f"{i}:{rank * sizes[i % 6]}:end\\n" for i in range(300)).encode()
for start in range(0, len(data), 7919):
    os.write(1 + (start // 7919) % 1, data[start:start + 7919])
"""
        with temporary_folder() as folder:
            code, out, err = lockstep_run("--nproc-per-node", 3, script(folder, text))
        self.assertEqual((code, err.count("\n")), (0, 0), err)
        seen = {rank: [] for rank in "012"}
        for line in out.splitlines():
            prefix, rest = line[:9], line[9:]
            self.assertRegex(prefix, r"^\[rank[012]\]: $")
            self.assertEqual(set(rest.split(":")[1]) - {prefix[5]}, set())
            self.assertTrue(rest.endswith(":end"))
            seen[prefix[5]].append(int(rest.split(":")[0]))
        self.assertEqual(seen, {rank: list(range(300)) for rank in "012"})

    def test_both_streams_keep_apart_and_last_lines_are_ended(self):
        code, out, err = lockstep_run("sh", "-c", "printf out; printf err >&2")
        self.assertEqual((code, out, err), (0, "[rank0]: out\n", "[rank0]: err\n"))

    def test_bytes_that_are_no_text_pass(self):
        data = bytes(range(256)).replace(b"\n", b"") * 100
        with temporary_folder() as folder:
            (folder / "data").write_bytes(data)
            with Launched("cat", folder / "data") as launched:
                out, _ = launched.process.communicate(timeout=30)
        self.assertEqual(out, b"[rank0]: " + data + b"\n")

    def test_a_template_for_the_prefix(self):
        out = lockstep_run("--role", "r", "sh", "-c", "echo x",
                           env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank} ${local_rank}> "})[1]
        self.assertEqual(out, "<r 0 0> x\n")

    def test_closed_descriptors_are_no_reason_to_fail(self):
        result = subprocess.run(["sh", "-c", f"exec '{LOCKSTEP}' run sh -c 'echo x' 0<&- 2>&-"],
                                stdout=subprocess.PIPE, env=clean_environment(), timeout=30, check=False)
        self.assertEqual((result.returncode, result.stdout), (0, b"[rank0]: x\n"))

    def logs(self, folder, *flags):
        """Runs two ranks that write to both streams; what was shown and what is in the files."""
        code, out, err = lockstep_run("--nproc-per-node", 2, "--log-dir", folder / "logs", "--rdzv-id", "job", *flags,
                                      "sh", "-c", "echo out$RANK; echo err$RANK >&2")
        self.assertEqual(code, 0, err)
        runs = list((folder / "logs").iterdir())
        self.assertEqual(len(runs), 1)
        self.assertTrue(runs[0].name.startswith("job_"))
        said = f"lockstep run: logs are in {runs[0]}\n"
        self.assertEqual(err.count(said), 1, err)
        err = err.replace(said, "")
        files = {str(path.relative_to(runs[0])): path.read_text() for path in runs[0].rglob("*") if path.is_file()}
        return sorted(out.split()), sorted(err.split()), files

    def test_redirects(self):
        with temporary_folder() as folder:
            out, err, files = self.logs(folder, "--redirects", "3")
            self.assertEqual((out, err), ([], []))
            self.assertEqual(files, {f"attempt_0/{rank}/std{name}.log": f"{name}{rank}\n"
                                     for rank in (0, 1) for name in ("out", "err")})

    def test_redirects_by_rank(self):
        with temporary_folder() as folder:
            out, err, files = self.logs(folder, "-r", "0:1,1:2")
            self.assertEqual((out, err), (["[rank1]:", "out1"], ["[rank0]:", "err0"]))
            self.assertEqual(files, {"attempt_0/0/stdout.log": "out0\n", "attempt_0/1/stderr.log": "err1\n"})

    def test_tee(self):
        with temporary_folder() as folder:
            out, err, files = self.logs(folder, "-t", "1:3")
            self.assertEqual(out, ["[rank0]:", "[rank1]:", "out0", "out1"])
            self.assertEqual(files, {"attempt_0/1/stdout.log": "out1\n", "attempt_0/1/stderr.log": "err1\n"})

    def test_filter(self):
        with temporary_folder() as folder:
            out, err, files = self.logs(folder, "--tee", "3", "--local-ranks-filter", "1")
            self.assertEqual((out, err), (["[rank1]:", "out1"], ["[rank1]:", "err1"]))
            self.assertEqual(len(files), 4)

    def test_without_a_folder_logs_are_kept_where_it_says(self):
        with temporary_folder() as folder:
            code, _, err = lockstep_run("--redirects", 3, "sh", "-c", "echo x", env={"TMPDIR": str(folder)})
            said = pathlib.Path(err.strip().rsplit(" ", 1)[-1])
            self.assertEqual((code, (said / "attempt_0/0/stdout.log").read_text()), (0, "x\n"))

    def test_a_folder_that_cannot_be_made_is_named(self):
        with temporary_folder() as folder:
            (folder / "file").write_text("x")
            code, out, err = lockstep_run("--log-dir", folder / "file", "echo", "started")
            self.assertEqual((code, out), (2, ""))
            self.assertIn(f"--log-dir {folder}/file: cannot make a folder there: Not a directory\n  hint: ", err)

    def test_a_reader_of_errors_that_is_gone_does_not_change_the_exit_code(self):
        with Launched("sh", "-c", "exit 7") as launched:
            launched.process.stderr.close()
            launched.process.stderr = None
            self.assertEqual(launched.end()[0], 7)

    def test_nothing_stays_in_the_temporary_folder(self):
        with temporary_folder() as folder:
            self.assertEqual(lockstep_run("true", env={"TMPDIR": str(folder)})[0], 0)
            self.assertEqual(lockstep_run("false", env={"TMPDIR": str(folder)})[0], 1)
            self.assertEqual(list(folder.iterdir()), [])


class Terminal(unittest.TestCase):
    """One rank that is started from a terminal: what it writes and reads is the terminal's."""

    def run_in_terminal(self, *words, typed=b""):
        """Exit code and what the terminal showed."""
        master, slave = pty.openpty()
        environment = clean_environment(PYTHON_EXEC=sys.executable, TERM="xterm")
        del environment["OMP_NUM_THREADS"]
        # The launcher's terminal must be its controlling one, in the foreground, as after a shell's command.
        process = subprocess.Popen([sys.executable, "-c", CONTROLLING, LOCKSTEP, "run", *map(str, words)], stdin=slave, stdout=slave,
                                   stderr=slave, env=environment, start_new_session=True)
        os.close(slave)
        shown = b""
        try:
            if typed:
                os.write(master, typed)
            while True:
                ready, _, _ = select.select([master], [], [], 60)
                self.assertTrue(ready, f"nothing came for a minute after {shown!r}")
                try:
                    part = os.read(master, 65536)
                except OSError:  # All others have closed it.
                    break
                shown += part
                if not part:
                    break
        finally:
            os.close(master)  # Hangs up what is still there.
        return process.wait(30), shown.decode().replace("\r\n", "\n")

    def test_a_line_erases_a_progress_bar_that_stands_there(self):
        code, shown = self.run_in_terminal("--nproc-per-node", 2, "sh", "-c", "echo short >&2")
        self.assertEqual(code, 0, shown)
        lines = [line for line in shown.splitlines() if line]
        self.assertEqual(len(lines), 3, shown)
        self.assertTrue(all(line.startswith("\x1b[K") for line in lines), shown)
        self.assertEqual(sum("OMP_NUM_THREADS" in line for line in lines), 1, shown)

    def test_without_a_terminal_lines_are_as_they_come(self):
        environment = clean_environment()
        del environment["OMP_NUM_THREADS"]
        result = run(LOCKSTEP, "run", "--nproc-per-node", 2, "sh", "-c", "echo short >&2", env=environment)
        self.assertEqual(sorted(result.stderr.splitlines()), ["[rank0]: short", "[rank1]: short"])

    def test_a_rank_alone_writes_to_it_and_reads_it(self):
        text = "import sys\nprint([f.isatty() for f in (sys.stdin, sys.stdout, sys.stderr)])\nprint('read', input('prompt> '))\n"
        with temporary_folder() as folder:
            code, shown = self.run_in_terminal(script(folder, text), typed=b"word\n")
        self.assertEqual(code, 0, shown)
        self.assertIn("[True, True, True]\n", shown)
        self.assertIn("prompt> ", shown)
        self.assertIn("read word\n", shown)
        self.assertNotIn("[rank0]", shown)

    def test_pdb_works(self):
        with temporary_folder() as folder:
            path = script(folder, "x = 41\nbreakpoint()\nprint('end')\n")
            code, shown = self.run_in_terminal(path, typed=b"p x + 1\nc\n")
        self.assertEqual(code, 0, shown)
        self.assertIn("42\n", shown)
        self.assertIn("end\n", shown)

    def test_a_failure_is_shown_once(self):
        with temporary_folder() as folder:
            code, shown = self.run_in_terminal(script(folder, "raise ValueError('seven')\n"))
        self.assertEqual(code, 1, shown)
        self.assertEqual(shown.count("ValueError: seven"), 1, shown)
        self.assertRegex(shown, r"lockstep run: error: rank 0 \(pid \d+\) exited with code 1\n$")

    def test_several_ranks_share_it_in_lines(self):
        _, shown = self.run_in_terminal("--nproc-per-node", 2, "--stdin", "none", "sh", "-c", "[ -t 1 ] || echo lines; cat")
        self.assertEqual(sorted(line for line in shown.splitlines() if "[rank" in line),
                         ["\x1b[K[rank0]: lines", "\x1b[K[rank1]: lines"])

    def test_a_pipe_is_read_by_one_rank(self):
        for words, shown in (((), b"[rank0]: data\n"), (("--nproc-per-node", "2"), b"[rank0]: data\n"),
                             (("--nproc-per-node", "2", "--stdin", "1"), b"[rank1]: data\n"),
                             (("--nproc-per-node", "2", "--stdin", "none"), b"")):
            result = subprocess.run([LOCKSTEP, "run", *words, "cat"], input=b"data\n", stdout=subprocess.PIPE,
                                    env=clean_environment(), timeout=30, check=False)
            self.assertEqual((result.returncode, result.stdout), (0, shown), words)
        for wrong in ("2", "-1", "all"):
            self.assertEqual(lockstep_run("--nproc-per-node", 2, "--stdin", wrong, "cat")[0], 2, wrong)

    def test_standard_descriptors_may_be_closed(self):
        for closed in ("2>&-", "<&-", "<&- >&- 2>&-"):
            result = subprocess.run(["sh", "-c", f'exec "$0" run --nproc-per-node 2 sh -c "echo out; cat; echo err >&2" {closed}',
                                     LOCKSTEP], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                    env=clean_environment(), timeout=30, check=False)
            self.assertEqual(result.returncode, 0, closed)
            shown = [] if ">&- 2" in closed else [b"[rank0]: out", b"[rank1]: out"]
            self.assertEqual(sorted(result.stdout.splitlines()), shown, closed)

    def test_breakpoint_of_torch_distributed_works(self):
        text = ("import torch.distributed as dist\ndist.init_process_group('gloo')\nx = 41\n"
                "dist.breakpoint(rank=0)\nprint('end')\ndist.destroy_process_group()\n")
        with temporary_folder() as folder:
            code, shown = self.run_in_terminal("--nproc-per-node", 2, script(folder, text), typed=b"up\np x + 1\nc\n")
        self.assertEqual(code, 0, shown)
        self.assertIn("[rank0]: (Pdb) ", shown)
        self.assertIn("42\n", shown)
        self.assertEqual(shown.count("end\n"), 2, shown)


class FlagsOfTorchrun(unittest.TestCase):
    def test_those_without_effect_are_taken_and_say_so(self):
        flags = ["--monitor-interval", "0.5", "--start-method=fork", "--logs-specs", "x"]
        code, out, err = lockstep_run(*flags, "echo", "x")
        self.assertEqual((code, out), (0, "[rank0]: x\n"), err)
        for flag in ("--monitor-interval", "--start-method", "--logs-specs"):
            self.assertEqual(err.count(f"lockstep run: {flag} has no effect here: "), 1, err)

    def events(self, *words, **more):
        """The exit code, and the state, source and rank of each event."""
        code, _, err = lockstep_run("--event-log-handler", "console", *words, **more)
        found = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
        for event in found:
            self.assertEqual(list(event), ["name", "source", "timestamp", "metadata"])
            self.assertEqual(event["name"], "torchelastic.worker.status." + event["metadata"]["state"])
            self.assertGreaterEqual(json.loads(event["metadata"]["metadata"]).keys(), {"group_world_size", "entry_point"})
        return code, [(event["metadata"]["state"], event["source"], event["metadata"]["global_rank"]) for event in found], found

    def test_events_are_lines_of_json(self):
        text = "[ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 3; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || sleep 1000"
        code, told, events = self.events("--nproc-per-node", 2, "--max-restarts", 1, "--rdzv-id", "some", "sh", "-c", text)
        self.assertEqual(code, 0)
        starts = [("START", "WORKER", 0), ("START", "WORKER", 1)]
        self.assertEqual(told.pop(0), ("RENDEZVOUS", "AGENT", None))
        self.assertEqual(sorted(told[:2]), starts)
        self.assertEqual(told[2:5], [("FAILED", "WORKER", 1), ("TERMINATED", "WORKER", 0), ("RESTART", "AGENT", None)])
        self.assertEqual(sorted(told[5:9]), [*starts, ("SUCCEEDED", "WORKER", 0), ("SUCCEEDED", "WORKER", 1)])
        self.assertEqual(told[9:], [("SUCCEEDED", "AGENT", None)])
        failed = events[3]["metadata"]
        self.assertEqual((failed["run_id"], failed["agent_restarts"], failed["rdzv_backend"]), ("some", 0, "static"))
        details = json.loads(failed["metadata"])
        self.assertEqual((details["exit_code"], details["local_rank"], details["entry_point"]), ([3], [1], "sh"))
        self.assertIn("exited with code 3", json.loads(failed["raw_error"])["message"])
        self.assertEqual(events[-1]["metadata"]["agent_restarts"], 1)

    def test_a_rank_that_is_replaced_is_an_event(self):
        # The ranks announce that they can go on without one that fails, as those of an ElasticJob do.
        text = ("echo [] >$OUT/new-$RANK; mv $OUT/new-$RANK $LOCKSTEP_GENERATION_FOLDER/worker-$RANK; "
                "if [ $RANK = 1 ] && [ ! -e $OUT/failed ]; then touch $OUT/failed; "
                "until [ -e $LOCKSTEP_GENERATION_FOLDER/worker-0 ]; do sleep 0.02; done; exit 3; fi; "
                "[ $RANK = 0 ] || touch $OUT/again; until [ -e $OUT/again ]; do sleep 0.02; done")
        with temporary_folder() as folder:
            code, told, events = self.events("--nproc-per-node", 2, "--max-restarts", 1, "sh", "-c", text, env={"OUT": str(folder)})
        self.assertEqual(code, 0)
        self.assertEqual(told[3:6], [("FAILED", "WORKER", 1), ("REPLACEMENT", "AGENT", None), ("START", "WORKER", 1)])
        self.assertEqual(events[4]["metadata"]["agent_restarts"], 1)

    def test_events_have_torchruns_fields(self):
        if not TORCHRUN.exists():
            self.skipTest("no torchrun beside this Python")
        result = subprocess.run([*torchrun(), "--event-log-handler", "console", "--nproc-per-node", "1", "--no-python", "true"],
                                capture_output=True, text=True, timeout=120, env=clean_environment())
        theirs = [json.loads(line) for line in result.stderr.splitlines() if line.startswith("{")]
        ours = self.events("true")[2]
        key = lambda event: (event["source"], event["metadata"]["state"])
        self.assertTrue(theirs, result.stderr)
        theirs, ours = ({key(event): event for event in events} for events in (theirs, ours))
        theirs.pop(("AGENT", "ASSIGN_WORKER_RANKS"))  # a step of its own that ours does not have
        for name, event in theirs.items():
            self.assertIn(name, ours)
            self.assertEqual(list(event["metadata"]), list(ours[name]["metadata"]))
            self.assertEqual(*(list(json.loads(e["metadata"]["metadata"])) for e in (event, ours[name])))

    def test_run_path(self):
        # Also a file that is no *.py, which `python3 FILE` would run as well, and a folder.
        with temporary_folder() as folder:
            path = script(folder, "import sys; print(sys.argv, __name__)", "odd")
            code, out, err = lockstep_run("--run-path", "--no-python", path, "-x", env={"PYTHON_EXEC": sys.executable})
            self.assertEqual((code, out), (0, f"[rank0]: ['{path}', '-x'] __main__\n"), err)
            (folder / "package").mkdir()
            script(folder / "package", "print('in a folder')", "__main__.py")
            self.assertEqual(lockstep_run("--run-path", folder / "package", env={"PYTHON_EXEC": sys.executable})[1],
                             "[rank0]: in a folder\n")

    def test_a_virtual_local_rank(self):
        text = "echo $LOCAL_RANK $RANK $CUDA_VISIBLE_DEVICES"
        flags = ["--virtual-local-rank", "--nproc-per-node", 2, "sh", "-c", text]
        _, out, _ = lockstep_run(*flags)
        self.assertEqual(sorted(out.splitlines()), ["[rank0]: 0 0 0", "[rank1]: 0 1 1"])
        _, out, _ = lockstep_run(*flags, env={"CUDA_VISIBLE_DEVICES": "5, 7"})
        self.assertEqual(sorted(out.splitlines()), ["[rank0]: 0 0 5", "[rank1]: 0 1 7"])
        code, _, err = lockstep_run(*flags, env={"CUDA_VISIBLE_DEVICES": "5"})
        self.assertEqual(code, 2)
        self.assertIn("no GPU for local rank 1 in CUDA_VISIBLE_DEVICES=5", err)

    def test_filtered_copies(self):
        text = "echo a,b; echo apple$RANK; echo plain; echo an orange >&2"
        with temporary_folder() as folder:
            code, _, err = lockstep_run("--nproc-per-node", 2, "--log-dir", folder, "--tee", 3, "--duplicate-stdout-filters",
                                        "apple,a,,b", "--duplicate-stderr-filters", "orange", "sh", "-c", text)
            self.assertEqual(code, 0, err)
            attempt = next(folder.iterdir()) / "attempt_0"
            self.assertEqual(sorted((attempt / "filtered_stdout.log").read_text().splitlines()),
                             ["[rank0]: a,b", "[rank0]: apple0", "[rank1]: a,b", "[rank1]: apple1"])
            self.assertEqual(sorted((attempt / "filtered_stderr.log").read_text().splitlines()),
                             ["[rank0]: an orange", "[rank1]: an orange"])
            self.assertEqual((attempt / "0" / "stdout.log").read_text(), "a,b\napple0\nplain\n")

    def test_its_variable_for_the_grace_counts(self):
        code, _, err = lockstep_run("true", env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"})
        self.assertEqual(code, 2)
        self.assertIn("TORCH_ELASTIC_SHUTDOWN_TIMEOUT='soon'", err)

    def test_the_help_names_them_all(self):
        _, out, _ = lockstep_run("--help")
        for flag in ("--monitor-interval", "--start-method", "--event-log-handler", "--run-path", "--local-addr", "--logs-specs",
                     "--numa-binding", "--virtual-local-rank", "--duplicate-stdout-filters", "--duplicate-stderr-filters",
                     "--rdzv-conf"):
            self.assertIn(f" {flag} ", out)
        self.assertIn("PET_NPROC_PER_NODE", out)


class Slurm(unittest.TestCase):
    """The variables of a task stand in the shells of allocations, too, where nothing has started ranks."""

    # As sbatch and salloc give them to their shell.
    SHELL = {"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0, "SLURM_NNODES": 1, "SLURM_NTASKS": 1,
             "SLURM_TASKS_PER_NODE": "1", "SLURM_JOB_ID": 4711, "SLURM_JOB_NODELIST": "n1"}

    def train(self, devices, launcher=(), **env):
        result = run(*launcher, LOCKSTEP, "train", "--devices", devices, "--max-epochs", 1, "--limit-train-batches", 3,
                     "--limit-val-batches", 1, env=clean_environment(LOCKSTEP_TIMEOUT=30, **env))
        return result.stdout, result.stderr

    def test_in_an_allocations_shell_ranks_are_started(self):
        for more in ({"SLURM_NTASKS": 2}, {"SLURM_STEP_ID": 4294967290, "SLURM_STEP_NUM_TASKS": 1}, *LONG * [{}]):
            with self.subTest(more):
                out, err = self.train(2, **{**self.SHELL, **more})
                self.assertRegex(out, r"(?m)^2 ranks over ")
                self.assertIn("allocation 4711", err)

    def test_the_only_task_of_a_step_starts_ranks(self):
        out, err = self.train(2, **self.SHELL, SLURM_STEP_ID=0, SLURM_STEP_NUM_TASKS=1)
        self.assertRegex(out, r"(?m)^2 ranks over ")
        self.assertIn("this is the only task of a Slurm step", err)

    def test_one_rank_of_an_allocation_of_several_tasks_is_told(self):
        _, err = self.train(1, **{**self.SHELL, "SLURM_NTASKS": 4})
        self.assertRegex(err, "1 rank, .*allocation 4711.* 4 tasks")

    def test_ranks_that_another_launcher_keeps_from_starting_are_told(self):
        out, err = self.train(2, launcher=(LOCKSTEP, "run"))
        self.assertNotIn("2 ranks over", out)
        self.assertIn("none is started, as lockstep run has started this process as the only rank", err)


class Prefix(unittest.TestCase):
    def test_none_when_asked_for(self):
        code, out, err = lockstep_run("--no-prefix", "--nproc-per-node", 2, "sh", "-c", "echo x; echo y >&2",
                                      env={"OMP_NUM_THREADS": "1"})
        self.assertEqual((code, out, err), (0, "x\nx\n", "y\ny\n"))

    def test_no_second_one(self):
        _, out, _ = lockstep_run("sh", "-c", "echo '[rank0] warning: x'; echo '[rank0]:[W] x'; echo '[rank1] y'")
        self.assertEqual(out, "[rank0] warning: x\n[rank0]:[W] x\n[rank0]: [rank1] y\n")


class Hosts(unittest.TestCase):
    def test_an_address_in_brackets(self):
        with socket.socket(socket.AF_INET6) as probe:
            try:
                probe.bind(("::1", 0))
            except OSError:
                self.skipTest("no IPv6 here")
        for flags in (["--master-addr", "[::1]"], ["--rdzv-endpoint", "[::1]:0"],
                      *LONG * [["--rdzv-endpoint", "[::1]"], ["--master-addr", "::1"]]):
            with self.subTest(flags):
                code, out, err = lockstep_run(*flags, "--nproc-per-node", 2, CPP_RANK, "init", timeout=120)
                self.assertEqual(code, 0, err)
                self.assertEqual(len(out.splitlines()), 2)
                self.assertEqual(lockstep_run(*flags, "sh", "-c", "echo $MASTER_ADDR")[1], "[rank0]: ::1\n")

    def test_two_hosts(self):
        """Two launchers of two ranks each are one job of four, and the store outlives the slower."""
        if not CPP_RANK.exists():
            self.skipTest(f"{CPP_RANK} is not built")
        for _ in range(5):  # a free port may be taken before the launcher binds it
            flags = ["--nnodes", 2, "--nproc-per-node", 2, "--master-addr", "127.0.0.1", "--master-port", free_port()]
            with Launched(*flags, "--node-rank", 0, CPP_RANK, "init") as first, \
                    Launched(*flags, "--node-rank", 1, CPP_RANK, "init") as second:
                code, out, err = first.end(120)
                if "in use" in err:
                    continue
                code2, out2, err2 = second.end(120)
                self.assertEqual((code, code2), (0, 0), err + err2)
                lines = sorted(line[:9] for line in (out + out2).splitlines())
                self.assertEqual(lines, [f"[rank{rank}]: " for rank in range(4)])
                self.assertEqual({json.loads(line[9:])["sum"] for line in (out + out2).splitlines()},
                                 {json.loads(out[9:].splitlines()[0])["sum"]})
                first.nothing_left(), second.nothing_left()
                return
        self.fail("no free port in five attempts")

    def test_a_taken_port(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            code, out, err = lockstep_run("--master-port", port, "sh", "-c", "echo started")
        self.assertEqual((code, out), (1, ""))
        self.assertIn(f"127.0.0.1:{port}", err)
        self.assertIn("hint:", err)

    def test_an_address_that_does_not_resolve(self):
        code, out, err = lockstep_run("--nnodes", 2, "--node-rank", 0, "--master-addr", "no-such-host.invalid",
                                      "--rdzv-conf", "join_timeout=2", "true")
        self.assertEqual((code, out), (1, ""))
        self.assertIn("no-such-host.invalid", err)


class Usage(unittest.TestCase):
    def refused(self, *words, says):
        code, out, err = lockstep_run(*words)
        self.assertEqual((code, out), (2, ""), err)
        self.assertTrue(err.startswith("lockstep run: error: "), err)
        for text in says if isinstance(says, (list, tuple)) else [says]:
            self.assertIn(text, err)

    def test_mistakes_are_named(self):
        self.refused(says="no program")
        self.refused("--nproc-per-nod", 2, "true", says=["--nproc-per-nod'", "did you mean '--nproc-per-node'?"])
        self.refused("--nproc", 2, "true", says="unknown flag '--nproc'; did you mean '--nproc-per-node'?")
        self.refused("--nproc-per-node=", "true", says="--nproc-per-node= needs a value")
        self.refused("--nproc_per_nod=2", "true", says="did you mean '--nproc-per-node'?")
        self.refused("--nproc-per-node", says="needs a value")
        self.refused("--nproc-per-node", "--tee", 3, "true", says="--nproc-per-node needs a value")
        for bad in ("0", "-1", "two", "1.5"):
            self.refused("--nproc-per-node", bad, "true", says=["--nproc-per-node", bad])
        self.refused("--nnodes", 2, "--node-rank", 2, "true", says=["--node-rank 2", "from 0 to 1"])
        self.refused("--nnodes", 2, "--master-port", 0, "true", says="--master-port 0")
        self.refused("--master-port", 65536, "true", says="--master-port")
        self.refused("--tee", 4, "true", says="--tee: '4'")
        self.refused("--redirects", "0:1,x", "true", says="--redirects")
        self.refused("--tee", "1:3", "true", says="no local rank 1")
        self.refused("--local-ranks-filter", "1", "true", says="--local-ranks-filter: '1'")
        self.refused("--signals-to-handle", "SIGNONE", "true", says="SIGNONE")
        self.refused("-m", "--no-python", "x", says="exclude each other")

    def test_what_does_not_go_together_is_said(self):
        self.refused("--nnodes", "1:4", "true", says=["--nnodes 1:4", "hint:"])
        self.refused("--nnodes", 2, "--rdzv-backend", "c10d", "true", says=["c10d", "--rdzv-endpoint"])
        self.refused("--rdzv-backend", "stati", "true", says="did you mean 'static'?")
        self.refused("--numa-binding", "socket", "true", says=["--numa-binding", "--bind-to"])

    def test_programs_that_cannot_run_are_named(self):
        with temporary_folder() as folder:
            self.refused("no-such-program", says="no-such-program")
            self.refused(folder, says="is a folder")
            self.refused(script(folder, "x", "data"), says=["data", "chmod +x"])

    def test_help(self):
        code, out, err = lockstep_run("--help")
        self.assertEqual((code, err), (0, ""))
        self.assertIn("Examples:", out)
        self.assertLessEqual(max(map(len, out.splitlines())), 100)

    def test_the_binary_itself(self):
        def binary(*words):
            result = run(LOCKSTEP, *words, check=False)
            return result.returncode, result.stdout, result.stderr
        code, out, err = binary()
        self.assertEqual((code, out), (2, ""))
        self.assertIn("Usage: lockstep COMMAND", err)
        code, out, err = binary("trian")
        self.assertEqual((code, out), (2, ""))
        self.assertIn("did you mean 'train'?", err)
        self.assertEqual(binary("--help")[0], 0)
        self.assertRegex(binary("--version")[1], r"^lockstep \d+\.\d+\.\d+\n$")


if __name__ == "__main__":
    main()
