"""lockstep bench and lockstep env through the binary: what they print is what was measured."""

import contextlib
import functools
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import unittest

import lockstep_testing as t
import torch_forks

LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
HAS_TORCH = t.torch_is_the_linked_one()
NO_TORCH = "this Python's torch is not the LibTorch that is linked"


def bench(*arguments, timeout=120, **environment):
    result = t.run(t.LOCKSTEP, "bench", *arguments, "--json", timeout=timeout, env=t.clean_environment(**environment))
    report = json.loads(result.stdout)  # alone on standard output
    return report


MEMORY = ("--model", "wide", "--strategy", "ddp,zero1,zero2,fsdp", "--optimizer", "adam", "--devices", "1,2")


@functools.cache
def measured_memory():
    return bench("memory", *MEMORY)["results"]


class Bench(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if HAS_TORCH:
            cls.python = torch_forks.executable(cls.enterClassContext(t.temporary_folder()))

    def check_context(self, report):
        context = report["context"]
        for key in ("cpu", "cores", "libtorch", "lockstep", "date"):
            self.assertTrue(context[key], key)

    def test_data_parallel(self):
        report = bench("data-parallel", "--model", "convnet", "--batch-sizes", "1,16", "--replicas", 2, "--steps", 2,
                       "--rounds", 1)
        self.check_context(report)
        rows = report["results"]
        self.assertEqual([(r["batch_size"], r["replicas"], r["threads"]) for r in rows], [(1, 2, 1), (16, 2, 1)])
        for row in rows:
            for key in ("single_us", "single_all_threads_us", "replica_us", "start_us", "us"):
                self.assertGreater(row[key], 0, key)
            self.assertAlmostEqual(row["ratio"], row["us"] / row["single_us"], places=6)
            self.assertEqual(row["faster"], "yes" if row["ratio"] < 1 and row["batch_size"] > 1 else "no")
            self.assertTrue(row["why"])
        self.assertIn("one sample cannot be cut", rows[0]["why"])

    def test_step(self):
        report = bench("step", "--model", "mlp,linear", "--devices", "1,2", "--steps", 5, "--rounds", 1,
                       "--batch-size", 8)
        self.check_context(report)
        rows = report["results"]
        self.assertEqual([(r["model"], r["ranks"]) for r in rows],
                         [("mlp", 1), ("mlp", 2), ("linear", 1), ("linear", 2)])
        for row in rows:
            self.assertEqual(set(row), {"model", "batch_size", "ranks", "backend", "strategy", "precision",
                                        "optimizer", "us_per_step"})
            self.assertEqual((row["strategy"], row["precision"], row["optimizer"]), ("ddp", "32-true", "sgd"))
            self.assertEqual((row["batch_size"], row["backend"]), (8, "auto"))
            self.assertGreater(row["us_per_step"], 1)

    def test_strategies_and_precisions(self):
        rows = bench("step", "--strategy", "ddp,zero1,zero2,fsdp,pipeline", "--precision", "32-true,bf16-mixed",
                     "--optimizer", "adam", "--devices", 2, "--steps", 3, "--rounds", 1)["results"]
        self.assertEqual([(r["strategy"], r["precision"]) for r in rows],
                         [(s, p) for s in ("ddp", "zero1", "zero2", "fsdp", "pipeline")
                          for p in ("32-true", "bf16-mixed")])
        for row in rows:
            self.assertEqual(row["optimizer"], "adam")
            self.assertGreater(row["us_per_step"], 1)

    def test_memory_is_what_the_formula_says(self):
        """In float32 with Adam: parameters, gradients and two moments of 4 bytes each, whole or a share of them."""
        rows = [row for row in measured_memory() if row["ranks"] == 2]
        self.assertEqual([(r["strategy"], r["rank"]) for r in rows],
                         [(s, rank) for s in ("ddp", "zero1", "zero2", "fsdp") for rank in (0, 1)])
        whole = {"ddp": 16, "zero1": 12, "zero2": 10, "fsdp": 8}  # For two ranks.
        for row in rows:
            self.assertEqual(row["parameters"], 6 * (784 * 784 + 784) + 784 * 10 + 10)
            self.assertEqual(row["state_bytes"], row["parameter_bytes"] + row["gradient_bytes"] + row["optimizer_bytes"])
            formula = whole[row["strategy"]] * row["parameters"]
            self.assertGreaterEqual(row["state_bytes"], 0.95 * formula, row)
            self.assertLessEqual(row["state_bytes"], 1.05 * formula, row)
            self.assertGreater(row["peak_rss_bytes"], row["state_bytes"])

    def test_memory_is_what_was_predicted(self):
        measured = {(r["strategy"], r["ranks"]): r for r in measured_memory() if r["rank"] == 0}
        self.assertRegex(t.run(t.LOCKSTEP, "estimate-memory", *MEMORY).stdout, r"ddp +2 +\d+ +\d[\d.]* [KMG]?B")
        predicted = json.loads(t.run(t.LOCKSTEP, "estimate-memory", *MEMORY, "--json").stdout)["results"]
        self.assertEqual([(r["strategy"], r["ranks"]) for r in predicted],
                         [(s, n) for s in ("ddp", "zero1", "zero2", "fsdp") for n in (1, 2)])
        for row in predicted:
            own = measured[row["strategy"], row["ranks"]]
            self.assertEqual(row["parameters"], own["parameters"])
            self.assertLess(abs(row["state_bytes"] - own["state_bytes"]), 0.05 * own["state_bytes"], (row, own))

    def test_memory_over_a_mesh_is_what_was_predicted(self):
        for mesh, strategies in (("dp_replicate=2,dp_shard=2", "fsdp"), ("pp=2,dp=2", "zero1,fsdp")):
            words = ("--model", "wide", "--strategy", strategies, "--optimizer", "adam", "--devices", 4, "--mesh", mesh)
            predicted = json.loads(t.run(t.LOCKSTEP, "estimate-memory", *words, "--json").stdout)["results"]
            measured = bench("memory", *words)["results"]
            for row in predicted:
                own = max(r["state_bytes"] for r in measured if r["strategy"] == row["strategy"])
                self.assertLess(abs(row["state_bytes"] - own), 0.01 * own, (mesh, row, own))

    def test_a_model_larger_than_the_memory_can_be_estimated(self):
        big = "gpt:layers=96,heads=96,channels=12288,context=2048"  # 174 billion parameters
        result = t.run(t.LOCKSTEP, "estimate-memory", "--model", big, "--strategy", "fsdp", "--devices", 1024, "--json")
        row, = json.loads(result.stdout)["results"]
        self.assertGreater(row["parameters"], 170e9)
        self.assertAlmostEqual(row["state_bytes"], 16 * row["parameters"] / 1024, delta=0.05 * row["state_bytes"])

    def test_checkpoint(self):
        compare = ["--compare-python"] if HAS_TORCH else []
        python = {"LOCKSTEP_PYTHON": self.python} if HAS_TORCH else {}
        rows = bench("checkpoint", "--model", "mlp", "--strategy", "ddp,zero1", "--devices", "1,2", "--batch-size", 8,
                     "--rounds", 1, *compare, **python)["results"]
        self.assertEqual([(r["strategy"], r["ranks"], r["read_ranks"]) for r in rows],
                         [("ddp", 1, 2), ("zero1", 1, 2), ("ddp", 2, 3), ("zero1", 2, 3)])
        parameters = 784 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10
        for row in rows:
            self.assertAlmostEqual(row["bytes"], 12 * parameters, delta=100, msg=row)  # Adam's counts are beside them.
            self.assertGreaterEqual(row["rank_bytes"], row["bytes"] / row["ranks"])
            self.assertLessEqual(row["read_bytes"], row["bytes"])
            for key in ("stall_ms", "of_memcpy", "seconds", "of_dd"):
                self.assertGreater(row[key], 0, key)
            if compare:
                python = [row[key] for key in ("torch_save_s", "dcp_stall_ms", "dcp_s")]
                self.assertTrue(all(python) if row["strategy"] == "ddp" else python == [None] * 3, row)

    def test_scaling_says_what_ate_the_rest(self):
        rows = bench("scaling", "--model", "mlp", "--devices", "2,1", "--epochs", 1, "--rounds", 1, "--batch-size",
                     512)["results"]
        self.assertEqual([r["ranks"] for r in rows], [1, 2])
        one, two = rows
        self.assertEqual((one["speedup"], one["efficiency"]), (1, 1))
        self.assertAlmostEqual(two["speedup"], one["seconds"] / two["seconds"])
        self.assertAlmostEqual(two["efficiency"], two["speedup"] / 2)
        self.assertEqual((one["samples"], one["steps"], two["steps"]), (60000, 118, 59))
        for row in rows:
            self.assertLess(sum(row["parts"].values()), 1.01 * row["seconds"])
            for part, seconds in row["lost_s"].items():
                self.assertAlmostEqual(seconds, row["parts"][part] - one["parts"][part] / row["ranks"])

    def test_a_pipeline_has_no_parts_to_profile(self):
        result = t.run(t.LOCKSTEP, "bench", "step", "--strategy", "pipeline", "--profile", check=False)
        self.assertEqual(result.returncode, 2)
        self.assertIn("forward and backward take turns", result.stderr)

    def test_wide_takes_longer_than_linear(self):
        rows = bench("step", "--model", "wide,linear", "--devices", "1", "--steps", 5, "--rounds", 1)["results"]
        self.assertGreater(rows[0]["us_per_step"], 10 * rows[1]["us_per_step"])

    def test_rpc(self):
        rows = bench("rpc", "--steps", 40, "--rounds", 1)["results"]
        self.assertEqual([(row["call"], row["bytes"]) for row in rows],
                         [("own", 4), ("autograd", 4), ("fast", 4), ("echo", 65536), ("echo", 4194304),
                          ("unbatched", 4096), ("batched", 4096), ("tcp", 4)])
        for row in rows:
            self.assertGreater(row["p50_us"], 0)
            self.assertAlmostEqual(row["calls_per_s"] * row["p50_us"], 1e6, delta=1)
            if row["call"] in ("unbatched", "batched"):
                self.assertIsNone(row["p99_us"])
            else:
                self.assertGreaterEqual(row["p99_us"], row["p50_us"])

    def test_allreduce(self):
        report = bench("allreduce", "--sizes", "4,4194304", "--backend", "gloo", "--steps", 5, "--rounds", 1)
        rows = report["results"]
        self.assertEqual([r["bytes"] for r in rows], [4, 4194304])
        for row in rows:
            self.assertEqual(set(row), {"bytes", "ranks", "backend", "p50_us", "bound_us", "of_bound"})
            self.assertEqual(row["ranks"], 2)
            self.assertGreater(row["of_bound"], 0)
        self.assertGreater(rows[1]["p50_us"], rows[0]["p50_us"])
        # 4 MB are read and written twice: no memory does that in the time of 4 bytes.
        self.assertGreater(rows[1]["bound_us"], 100 * rows[0]["bound_us"])

    def test_the_share_of_the_bound_is_that_of_a_turn(self):
        row, = bench("allreduce", "--sizes", 1 << 20, "--steps", 1, "--rounds", 1)["results"]
        self.assertAlmostEqual(row["of_bound"], row["bound_us"] / row["p50_us"])

    def test_a_barrier_is_a_size_of_none(self):
        rows = bench("allreduce", "--sizes", "0,67108864", "--steps", 5, "--rounds", 1)["results"]
        self.assertIsNone(rows[0]["bound_us"])
        self.assertGreater(rows[1]["p50_us"], 10 * rows[0]["p50_us"])

    def test_one_rank_has_nothing_to_copy(self):
        row, = bench("allreduce", "--sizes", "1024", "--devices", 1, "--steps", 5, "--rounds", 1)["results"]
        self.assertIsNone(row["bound_us"])
        self.assertIsNone(row["of_bound"])

    def test_loader_on_digits_when_there_is_no_mnist(self):
        with t.temporary_folder() as empty:
            report = bench("loader", "--steps", 5, "--rounds", 1, LOCKSTEP_DATA_DIR=empty)
        row, = report["results"]
        self.assertEqual(row["dataset"], "digits")
        self.assertGreater(row["samples_per_s"], 1000)

    def test_launch(self):
        row, = bench("launch", "--rounds", 1)["results"]
        self.assertEqual(set(row), {"ranks", "backend", "seconds"})
        self.assertTrue(0.01 < row["seconds"] < 60, row)

    def test_pipeline(self):
        with t.temporary_folder() as folder:
            rows = bench("pipeline", "--stages", "2,4", "--num-micro-batches", "4,8")["results"]
            self.assertEqual(len(rows), 16)
            for row in rows:
                self.assertLess(abs(row["bubble_percent"] - row["formula_percent"]), 5, row)
            self.assertEqual(rows[0], {"schedule": "gpipe", "ranks": 2, "stages": 2, "micro_batches": 4,
                                       "formula_percent": 20.0, "bubble_percent": rows[0]["bubble_percent"],
                                       "kept_activations": 4})
            plot = folder / "a.svg"
            bench("pipeline", "--schedule", "zero-bubble", "--stages", 3, "--plot", plot)
            self.assertIn("zero-bubble, 3 ranks, 3 stages, 8 micro-batches", plot.read_text())
            self.assertEqual(plot.read_text().count("<title>"), 3 * 8 * 3)
            result = t.run(t.LOCKSTEP, "bench", "pipeline", "--plot", plot, check=False)
            self.assertEqual(result.returncode, 2)
            self.assertIn("give one --schedule", result.stderr)

    def test_pipeline_of_stages_that_sleep(self):
        # A busy machine adds to the bubble: other tests run beside this one.
        points, sleep, stages = (5, 20, "2,4") if os.environ.get("LOCKSTEP_LONG_TESTS") else (60, 10, "2")
        for row in bench("pipeline", "--stages", stages, "--num-micro-batches", 4, "--sleep-ms", sleep)["results"]:
            self.assertGreater(row["measured_percent"], row["formula_percent"] - 1, row)
            self.assertLess(row["measured_percent"], row["formula_percent"] + points, row)

    def test_table(self):
        result = t.run(t.LOCKSTEP, "bench", "step", "--devices", 1, "--steps", 5, "--rounds", 1)
        head, row = result.stdout.splitlines()
        self.assertEqual(head.split(), ["model", "batch_size", "ranks", "backend", "strategy", "precision",
                                        "optimizer", "us_per_step"])
        self.assertEqual(row.split()[:7], ["mlp", "32", "1", "auto", "ddp", "32-true", "sgd"])

    def test_threads_reach_the_ranks(self):
        report = bench("step", "--devices", 1, "--steps", 5, "--rounds", 1, "--threads", 2)
        self.assertEqual(report["context"]["threads"], 2)

    def test_output_file(self):
        with t.temporary_folder() as folder:
            result = t.run(t.LOCKSTEP, "bench", "step", "--devices", 1, "--steps", 5, "--rounds", 1, "--output",
                           folder / "b.json")
            self.assertIn("us_per_step", result.stdout)
            self.assertEqual(json.loads((folder / "b.json").read_text())["benchmark"], "step")

    @unittest.skipUnless(HAS_TORCH, NO_TORCH)
    def test_step_against_python(self):
        row, = bench("step", "--model", "linear", "--devices", 2, "--steps", 5, "--rounds", 1, "--compare-python",
                     LOCKSTEP_PYTHON=self.python)["results"]
        self.assertGreater(row["python_us_per_step"], 1)
        self.assertAlmostEqual(row["ratio"], row["us_per_step"] / row["python_us_per_step"])

    @unittest.skipUnless(HAS_TORCH, NO_TORCH)
    def test_each_strategy_against_python(self):
        """The short form draws one that torch.distributed has."""
        strategies = ["zero1", "fsdp", "pipeline"] if LONG else [random.choice(["zero1", "fsdp", "pipeline"])]
        rows = bench("step", "--strategy", ",".join([*strategies, "zero2"]), "--optimizer", "adam", "--devices", 2, "--steps",
                     3, "--rounds", 1, "--compare-python", LOCKSTEP_PYTHON=self.python)["results"]
        self.assertEqual([row["strategy"] for row in rows], [*strategies, "zero2"])
        for row in rows:
            if row["strategy"] == "zero2":  # torch.distributed has none
                self.assertIsNone(row["ratio"])
            else:
                self.assertAlmostEqual(row["ratio"], row["us_per_step"] / row["python_us_per_step"])

    @unittest.skipUnless(HAS_TORCH, NO_TORCH)
    def test_loader_and_allreduce_against_python(self):
        row, = bench("loader", "--steps", 5, "--rounds", 1, "--compare-python", LOCKSTEP_PYTHON=self.python)["results"]
        self.assertGreater(row["ratio"], 1)
        row, = bench("allreduce", "--sizes", 1024, "--steps", 5, "--rounds", 1, "--compare-python",
                     LOCKSTEP_PYTHON=self.python)["results"]
        self.assertGreater(row["python_p50_us"], 1)

    @unittest.skipUnless(HAS_TORCH, NO_TORCH)
    def test_a_crash_of_python_is_an_error(self):
        with t.temporary_folder() as folder:
            (folder / "sitecustomize.py").write_text("import os\nif os.environ.get('RANK') == '1': os.abort()\n")
            env = t.clean_environment(PYTHONPATH=folder, LOCKSTEP_PYTHON=os.sys.executable)
            result = t.run(t.LOCKSTEP, "bench", "step", "--model", "linear", "--devices", 2, "--steps", 5, "--rounds", 1,
                           "--compare-python", env=env, check=False)
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn("Python's step benchmark failed with exit code 134", result.stderr)

    @unittest.skipUnless(HAS_TORCH, NO_TORCH)
    def test_recovery(self):
        rows = bench("recovery", "--kills", 1, "--kill-every", 0.2, "--rounds", 1, "--seed", 3, timeout=400,
                     LOCKSTEP_PYTHON=self.python)["results"]
        self.assertEqual([(row["side"], row["devices"], row["replacement"]) for row in rows],
                         [("ours", 2, True), ("ours", 2, False), ("restart", 2, True), ("torchrun", 2, True)])
        for row in rows:
            self.assertEqual((row["kills"], row["seed"], row["samples_lost"]), (1, 3, 0), row)
            self.assertEqual(row["goodput"] is None, not row["replacement"], row)
            self.assertGreater(row["recovery_p50_s"], 0)
            self.assertGreaterEqual(row["recovery_p99_s"], row["recovery_p50_s"])
        ours = rows[0]
        self.assertEqual((ours["samples_repeated"], ours["sha256_equal"]), (0, True))
        self.assertLess(ours["detection_p50_s"], ours["recovery_p50_s"])
        self.assertEqual(rows[1]["samples_repeated"], 0)

    @unittest.skipUnless(HAS_TORCH and os.environ.get("LOCKSTEP_LONG_TESTS"), "takes minutes: set LOCKSTEP_LONG_TESTS=1")
    def test_targets(self):
        rows = bench("targets", "--steps", 2, "--rounds", 1, timeout=1800, LOCKSTEP_PYTHON=os.sys.executable)["results"]
        wanted = {row["target"]: row for row in json.loads((t.SOURCE_DIR / "bench/targets.json").read_text())}
        missing = {wanted[name]["command"] for name in set(wanted) - {row["target"] for row in rows}}
        self.assertTrue(all(command == "python" or "bf16" in command for command in missing), missing)
        for row in rows:
            self.assertEqual(row["met"], (row["measured"] <= row["bound"]) == row["at_most"], row)
            if row["other"] is not None:  # Of one round.
                self.assertAlmostEqual(row["measured"], row["own"] / row["other"])

    @unittest.skipUnless(HAS_TORCH, NO_TORCH)
    def test_launch_against_python(self):
        row, = bench("launch", "--rounds", 1, "--compare-python", timeout=240, LOCKSTEP_PYTHON=self.python)["results"]
        self.assertGreater(row["python_seconds"], 0.1)

    @unittest.skipUnless(HAS_TORCH, NO_TORCH)
    def test_python_twins_have_our_models(self):
        """As many parameters as our models of the same names."""
        script = "import sys; sys.argv[1:] = ['{}']; import common, json;" \
                 "print(json.dumps({n: sum(p.numel() for p in common.Task(n).make().parameters()) for n in common.NAMES}))"
        twins = json.loads(t.run(os.sys.executable, "-c", script, cwd=t.SOURCE_DIR / "bench").stdout)
        self.assertEqual(twins, {"mlp": 109386, "wide": 6 * 785 * 784 + 7850, "convnet": 29034, "linear": 21,
                                 "fashion-cnn": 1475338, "gpt": 10746624, "resnet18": 11689512})

    def test_a_mistake_is_named(self):
        for arguments, words in ((["stepp"], "did you mean 'step'"), (["step", "--model", "mpl"], "did you mean 'mlp'"),
                                 (["step", "--backend", "glo"], "did you mean 'gloo'"),
                                 (["allreduce", "--sizes", "6"], "multiple of 4"),
                                 (["step", "--output", "/dev/null"], "--output /dev/null: cannot write /dev/null"),
                                 (["step", "--profile", "--trace", "/no/t"], "--trace /no/t: there is no folder /no"),
                                 (["loader", "--data-dir", "/nowhere"], "/nowhere")):
            result = t.run(t.LOCKSTEP, "bench", *arguments, check=False)
            self.assertIn(result.returncode, (1, 2), result)
            self.assertIn(words, result.stderr)

    def test_python_that_is_not_there_is_named(self):
        result = t.run(t.LOCKSTEP, "bench", "step", "--compare-python", check=False,
                       env=t.clean_environment(LOCKSTEP_PYTHON="/nowhere/python3"))
        self.assertEqual(result.returncode, 2)
        self.assertIn("/nowhere/python3", result.stderr)


    def test_an_interrupt_leaves_nothing(self):
        with t.temporary_folder() as folder:
            job = subprocess.Popen([t.LOCKSTEP, "bench", "step", "--devices", "2", "--steps", "1000000000"],
                                   env=t.clean_environment(TMPDIR=folder), stderr=subprocess.PIPE)
            try:
                t.wait_until(lambda: len(ranks_below(folder)) == 2, what="two ranks")
                ranks = ranks_below(folder)
                job.send_signal(signal.SIGINT)
                job.communicate(timeout=60)
            finally:
                job.kill()
                job.wait()
            self.assertEqual(job.returncode, 130)
            self.assertEqual(list(folder.iterdir()), [])
            for rank in ranks:
                self.assertFalse(os.path.exists(f"/proc/{rank}"))


PARTS = ["data", "forward", "backward", "communication exposed", "optimizer", "rest"]


class Profile(unittest.TestCase):
    """Where a step's time goes: the table, and the trace that it is made of."""

    def measure(self, *arguments):
        with t.temporary_folder() as folder:
            trace = folder / "trace.json"
            row, = bench("step", "--profile", "--trace", trace, "--rounds", 1, *arguments)["results"]
            return row, json.loads(trace.read_text())

    def check_table(self, row):
        table = {line["part"]: line for line in row["profile"]}
        self.assertEqual(list(table), PARTS + ["step", "communication hidden"])
        step = table["step"]["us"]
        self.assertAlmostEqual(sum(table[part]["us"] for part in PARTS), step, delta=1e-3 * step)
        self.assertAlmostEqual(sum(table[part]["share"] for part in PARTS), 1, places=3)
        self.assertAlmostEqual(step, row["us_per_step"], places=3)
        for line in table.values():
            self.assertTrue(line["rank_min_us"] <= line["us"] <= line["rank_max_us"], line)
        for part in ("data", "forward", "backward", "optimizer"):
            self.assertGreater(table[part]["us"], 0, part)
        return table

    def check_trace(self, trace, ranks, steps):
        """Every row nests; each rank has its steps and parts. Returns durations by (rank, category, name)."""
        events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
        rows, sums = {}, {}
        for event in events:
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
            key = (event["pid"], event["cat"], event["name"].split()[0] if event["cat"] == "step" else event["name"])
            sums.setdefault(key, []).append(event["dur"])
        self.assertEqual({pid for pid, _ in rows}, set(range(ranks)))
        for row, in_row in rows.items():
            self.assertIn(row, names)
            ends = []
            for event in sorted(in_row, key=lambda e: (e["ts"], -e["dur"])):
                while ends and ends[-1] <= event["ts"] + 1e-3:
                    ends.pop()
                if ends:
                    self.assertLessEqual(event["ts"] + event["dur"], ends[-1] + 1e-3, (names[row], event))
                ends.append(event["ts"] + event["dur"])
        for rank in range(ranks):
            self.assertIn("main thread", [name for (pid, _), name in names.items() if pid == rank])
            for key in (("step", "step"), ("part", "data"), ("part", "forward"), ("part", "backward"),
                        ("part", "optimizer")):
                self.assertEqual(len(sums[(rank, *key)]), steps, key)
        return sums

    def test_two_ranks_over_shared_memory(self):
        row, trace = self.measure("--model", "mlp", "--devices", 2, "--backend", "shm", "--steps", 20)
        table = self.check_table(row)
        self.assertGreater(table["communication exposed"]["us"], 0)
        sums = self.check_trace(trace, ranks=2, steps=20)
        self.assertEqual(trace["otherData"]["model"], "mlp")
        for rank in range(2):
            self.assertGreaterEqual(len(sums[(rank, "communication", "all_reduce")]), 20)

    def test_the_table_is_what_the_trace_shows(self):
        row, trace = self.measure("--model", "convnet", "--devices", 2, "--backend", "gloo", "--steps", 12,
                                  "--batch-size", 8)
        self.check_table(row)
        steps = sorted((e["dur"], e["ts"]) for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 0
                       and e["cat"] == "step")
        middle = steps[3:-3]  # The middle half by time, as the table has it.
        inside = lambda e: any(ts - 1e-3 <= e["ts"] <= ts + dur for dur, ts in middle)
        waits = sum(e["dur"] for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 0 and e["cat"] == "wait"
                    and inside(e))
        table = {line["part"]: line["us"] for line in row["profile"]}
        self.assertAlmostEqual(table["communication exposed"], waits / len(middle), delta=0.1)
        self.assertAlmostEqual(table["step"], sum(dur for dur, _ in middle) / len(middle), delta=0.1)

    def test_gloo_is_partly_hidden(self):
        """Several buckets: the first are reduced while backward still computes."""
        row, trace = self.measure("--model", "wide", "--devices", 2, "--backend", "gloo", "--steps", 8)
        table = self.check_table(row)
        self.assertGreater(table["communication hidden"]["us"], 0)
        self.assertGreater(table["communication exposed"]["us"], 0)
        sums = self.check_trace(trace, ranks=2, steps=8)
        self.assertGreaterEqual(len(sums[(0, "communication", "all_reduce")]), 16)
        in_calls = sum(e["dur"] for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == "communication")
        waited = sum(e["dur"] for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == "wait")
        self.assertLess(waited, in_calls)

    def test_operations_are_named(self):
        row, trace = self.measure("--model", "mlp", "--devices", 1, "--operations", "--steps", 5)
        table = self.check_table(row)
        self.assertEqual(table["communication exposed"]["us"], 0)
        operations = {line["operation"]: line for line in row["operations"]}
        self.assertEqual(operations["aten::addmm"]["calls"], 3)
        self.assertGreater(operations["aten::mm"]["us"], 0)
        sums = self.check_trace(trace, ranks=1, steps=5)
        self.assertEqual(len(sums[(0, "operation", "aten::addmm")]), 15)

    def test_text(self):
        result = t.run(t.LOCKSTEP, "bench", "step", "--profile", "--devices", 2, "--steps", 5, "--rounds", 1)
        lines = result.stdout.splitlines()
        self.assertRegex(lines[0], "mlp, batch 32, 2 ranks over shm")
        self.assertEqual(lines[1].split()[0], "part")
        self.assertEqual(len(lines), 2 + len(PARTS) + 2)

    def test_what_does_not_go_together_is_named(self):
        for arguments, words in ((["--trace", "t.json"], "needs --profile"), (["--operations"], "needs --profile"),
                                 (["--profile", "--compare-python"], "leave out --compare-python"),
                                 (["--profile", "--trace", "t.json", "--devices", "1,2"], "one run")):
            result = t.run(t.LOCKSTEP, "bench", "step", *arguments, check=False)
            self.assertEqual(result.returncode, 2, result)
            self.assertIn(words, result.stderr)


def ranks_below(folder):
    """Workers of a bench whose files are in the folder."""
    found = []
    for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_text().split("\0")
            if words[1:3] == ["bench", "worker"] and str(folder) in words[3]:
                found.append(int(file.parent.name))
    return found


class Env(unittest.TestCase):
    def placement(self, *command, **environment):
        env = t.clean_environment(**environment)
        if "OMP_NUM_THREADS" not in environment:
            del env["OMP_NUM_THREADS"]
        out = t.run(*command, t.LOCKSTEP, "env", "--json", env=env).stdout
        lines = [line.removeprefix("[rank0]: ") for line in out.splitlines()]
        return json.loads("\n".join(lines))["placement"]

    def test_threads_and_why(self):
        cores = len(os.sched_getaffinity(0))
        alone = self.placement()
        self.assertLessEqual(alone["threads"], cores)
        self.assertIn("1 rank", alone["threads_reason"])
        self.assertEqual(self.placement(OMP_NUM_THREADS=3)["threads"], 3)
        first = str(min(os.sched_getaffinity(0)))
        one = self.placement("taskset", "-c", first)
        self.assertEqual(one["threads"], 1)

    def test_our_launchers_one_thread_is_for_others(self):
        """OMP_NUM_THREADS is 1 in the workers, as under torchrun; our programs still share the cores."""
        cores = self.placement()["threads"]
        out = self.placement(t.LOCKSTEP, "run", "--nproc-per-node", 2, "--local-ranks-filter", 0)
        self.assertEqual(out["threads"], max(1, cores // 2))
        self.assertIn("2 ranks", out["threads_reason"])

    def test_waiting_threads_sleep_soon_unless_the_user_has_chosen(self):
        """What OpenMP has read is what `env` says: it shows its settings itself."""
        for name, value, shown, says in (("TZ", "UTC", "10000?", "GOMP_SPINCOUNT=1000"),
                                         ("GOMP_SPINCOUNT", "77", "77", "by GOMP_SPINCOUNT=77"),
                                         ("OMP_WAIT_POLICY", "passive", "0", "by OMP_WAIT_POLICY=passive")):
            env = t.clean_environment(OMP_DISPLAY_ENV="verbose", **{name: value})
            result = t.run(t.LOCKSTEP, "env", env=env)
            self.assertIn(says, result.stdout)
            if name == "TZ":  # By how busy the machine is.
                self.assertRegex(result.stdout, r"GOMP_SPINCOUNT=(1000|10000), Lockstep's choice")
            if "GOMP_SPINCOUNT" in result.stderr:  # Else it is another OpenMP than GNU's.
                self.assertRegex(result.stderr, f"GOMP_SPINCOUNT = '{shown}'")
            program = ("python3", "-c", "import os; print(os.environ.get('GOMP_SPINCOUNT'))")
            out = t.run(t.LOCKSTEP, "run", "--no-python", *program, env=env).stdout
            self.assertRegex(out, {"TZ": r"\b10000?\b", "GOMP_SPINCOUNT": r"\b77\b"}.get(name, "None"))

    @unittest.skipIf(t.SANITIZED, "a sanitizer's malloc takes no such settings")
    def test_freed_memory_is_kept_unless_the_user_has_chosen(self):
        """The kernel gives pages to a few steps of a model, and to more steps no more of them."""
        def faults(steps, **variables):
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
            t.run(t.LOCKSTEP, "bench", "step", "--model", "wide", "--devices", 1, "--rounds", 1, "--steps", steps,
                  env=t.clean_environment(**variables))
            return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - before

        pages = 40 * 784 * 784 * 4 // 4096  # Of one gradient, in the 40 steps more.
        self.assertLess(faults(50) - faults(10), pages)
        self.assertGreater(faults(50, MALLOC_TRIM_THRESHOLD_=131072) - faults(10, MALLOC_TRIM_THRESHOLD_=131072), pages)
        self.assertIn("kept for the next step (Lockstep's choice)", t.run(t.LOCKSTEP, "env").stdout)
        said = t.run(t.LOCKSTEP, "env", env=t.clean_environment(MALLOC_TRIM_THRESHOLD_=131072)).stdout
        self.assertIn("by MALLOC_TRIM_THRESHOLD_", said)

    @unittest.skipIf(len(os.sched_getaffinity(0)) < 2, "one processor")
    def test_run_binds_any_program(self):
        result = t.run(t.LOCKSTEP, "run", "--nproc-per-node", 2, "--bind-to", "core", "--no-python", "python3", "-c",
                       "import os; print('on', *sorted(os.sched_getaffinity(0)))")
        sets = [set(line.split(" on ")[1].split()) for line in result.stdout.splitlines()]
        self.assertEqual(len(sets), 2)
        self.assertFalse(sets[0] & sets[1], sets)

    def test_json(self):
        report = json.loads(t.run(t.LOCKSTEP, "env", "--json").stdout)
        self.assertEqual(os.path.realpath(report["libtorch"]["path"]), os.path.realpath(t.LIBTORCH))
        self.assertIn("gloo", report["backends"])
        self.assertEqual(report["devices"][0]["device"], "cpu")
        self.assertGreaterEqual(report["cpu"]["cores"], report["cpu"]["usable_cores"])
        self.assertEqual(report["cpu"]["usable_cores"], len(os.sched_getaffinity(0)))
        flags = pathlib.Path("/proc/cpuinfo").read_text().split()
        for dtype, wanted in (("bfloat16", ("avx512_bf16", "amx_bf16", "bf16")),
                              ("float16", ("avx512_fp16", "amx_fp16", "asimdhp"))):
            half = report["cpu"]["half"][dtype]
            if not any(flag in flags for flag in wanted):
                self.assertFalse(half["fast"], dtype)
            elif not half["fast"]:  # It was measured.
                self.assertRegex(half["reason"], r"takes \d+ us, and \d+ us in float32")
        loopback = [i for i in report["interfaces"] if i["loopback"]]
        self.assertIn("127.0.0.1", loopback[0]["addresses"])
        self.assertEqual(report["launcher"]["name"], "none")
        for item in report["missing"]:
            self.assertTrue(item["what"] and item["means"] and item["how"], item)

    def test_launchers_variables(self):
        env = t.clean_environment(RANK=1, WORLD_SIZE=2, TORCHELASTIC_RUN_ID="job")
        report = json.loads(t.run(t.LOCKSTEP, "env", "--json", env=env).stdout)
        self.assertEqual(report["launcher"]["name"], "torchrun or lockstep run")
        self.assertEqual(report["launcher"]["variables"]["WORLD_SIZE"], "2")

    def test_missing_data_is_said(self):
        with t.temporary_folder() as empty:
            env = t.clean_environment(LOCKSTEP_DATA_DIR=empty)
            report = json.loads(t.run(t.LOCKSTEP, "env", "--json", env=env).stdout)
        self.assertIn("MNIST", [item["what"] for item in report["missing"]])

    def test_text(self):
        text = t.run(t.LOCKSTEP, "env").stdout
        for word in ("lockstep", "libtorch", "cpu", "backends", "gloo", "interfaces", "127.0.0.1"):
            self.assertIn(word, text)


if __name__ == "__main__":
    t.main()
