"""Where `lockstep train` logs to: what TensorBoard and other programs read."""

import contextlib
import errno
import http.server
import importlib.util
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import threading
import unittest
import urllib.request

import lockstep_testing as t

MODEL = ("--model", "mlp", "--dataset", "digits", "--limit-train-batches", 8, "--log-every-n-steps", 2)


def train(folder, *flags, **kwargs):
    return t.run(t.LOCKSTEP, "train", *MODEL, "--log-dir", folder, *flags, **kwargs)


@contextlib.contextmanager
def training(*flags, **env):
    """A run that goes on until it is left, and the lines of its standard error so far."""
    command = [t.LOCKSTEP, "train", *MODEL[:4], "--log-every-n-steps", 1, "--max-epochs", 100000, *flags]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               env=t.clean_environment(**env), start_new_session=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=60)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def url_of(process, what):
    """Of the line in which the run says where it serves."""
    while select.select([process.stderr], [], [], 60)[0]:
        line = process.stderr.readline()
        if not line:
            break
        found = re.search(what + r": (http://127\.0\.0\.1:\d+/\S*)", line)
        if found:
            return found.group(1)
    raise AssertionError(f"the run did not say where its {what} is")


def fetched(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def rows_of(folder, split=None):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if split is None or row.get("split") == split]


class JsonLines(unittest.TestCase):

    def test_a_row_for_each_log_and_one_for_where_the_ranks_spend_their_time(self):
        with t.temporary_folder() as folder:
            train(folder / "a", "--logger", "jsonl", "--devices", 2, "--max-epochs", 1)
            rows = rows_of(folder / "a")
        self.assertEqual([(row["split"], row["step"]) for row in rows],
                         [("run", 0), ("run", 0), *[(split, step) for step in (2, 4, 6, 8) for split in ("train", "ranks")],
                          ("test", 8)])
        self.assertEqual((rows[0]["ranks"], rows[0]["restarts"]), (2, 0))
        self.assertEqual(rows[1]["hyperparameters"]["model"], "mlp")
        parts = ["data_s", "compute_s", "optimizer_s", "waiting_s", "other_s"]
        for row in (row for row in rows if row["split"] == "ranks"):
            self.assertTrue(all(len(row[part]) == 2 and min(row[part]) >= 0 for part in parts))
            self.assertTrue(all(bytes > 1e6 for bytes in row["memory_bytes"]))
        # The parts are all of the time: ranks, which wait for each other, have as much of it.
        whole = [sum(sum(row[part][rank] for part in parts) for row in rows if row["split"] == "ranks") for rank in (0, 1)]
        self.assertLess(abs(whole[0] - whole[1]), 0.5 * max(whole))

    def test_rows_on_standard_output_stand_between_the_lines(self):
        with t.temporary_folder() as folder:
            with open(folder / "out", "w") as out:
                result = subprocess.run([*map(str, (t.LOCKSTEP, "train", *MODEL, "--max-epochs", 1, "--metrics-file", "/dev/stdout"))],
                                        stdout=out, stderr=subprocess.PIPE, text=True, env=t.clean_environment(), check=True)
            lines = (folder / "out").read_text().splitlines()
        rows = [json.loads(line)["step"] for line in lines if line.startswith("{")]
        self.assertEqual(rows, [2, 4, 6, 8, 8], result.stderr)
        self.assertNotIn("\0", "".join(lines))
        self.assertFalse(lines[-1].startswith("{"), "the outcome is last")

    def test_what_is_missing_or_unknown_is_named(self):
        with t.temporary_folder() as folder:
            for flags, word in ((("--logger", "jsonl"), "--log-dir"), (("--logger", "json", "--log-dir", folder), "jsonl"),
                                (("--log-histograms", "all"), "--logger tensorboard"), (("--logger", ""), "jsonl"),
                                (("--log-dir", folder), "--logger"), (("--dashboard-address", "127.0.0.1:9"), "--dashboard"),
                                (("--prometheus-address", "127.0.0.1:9"), "--logger prometheus")):
                result = t.run(t.LOCKSTEP, "train", *MODEL, *flags, check=False)
                self.assertEqual(result.returncode, 2)
                self.assertIn(word, result.stderr)


@unittest.skipUnless(importlib.util.find_spec("tensorboard"), "Python's tensorboard is not installed")
class TensorBoard(unittest.TestCase):

    def read(self, folder):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
        return events.Reload()

    def test_scalars_are_those_of_the_json_lines_to_the_bit(self):
        import numpy

        with t.temporary_folder() as folder:
            train(folder, "--logger", "tensorboard,jsonl", "--devices", 2, "--max-epochs", 2)
            events = self.read(folder)
            for split in ("train", "test"):
                rows = rows_of(folder, split)
                for name in ("loss", "accuracy", "lr", "samples_per_s", "epoch"):
                    got = [(event.step, event.value) for event in events.Scalars(f"{split}/{name}")]
                    self.assertEqual(got, [(row["step"], float(numpy.float32(row[name]))) for row in rows], name)
            waiting = [event.value for event in events.Scalars("rank1/waiting_s")]
            self.assertEqual(waiting, [float(numpy.float32(row["waiting_s"][1])) for row in rows_of(folder, "ranks")])
            text = events.Tensors("hyperparameters")[0].tensor_proto.string_val[0].decode()
            self.assertIn("| model | mlp |", text)
            self.assertEqual(events.SummaryMetadata("hyperparameters").plugin_data.plugin_name, "text")

    def test_histograms_are_those_of_the_saved_weights(self):
        import numpy
        from safetensors.numpy import load_file

        with t.temporary_folder() as folder:
            weights = folder / "w.safetensors"
            train(folder, "--logger", "tensorboard", "--log-histograms", "all", "--max-epochs", 1, "--save-weights", weights)
            events = self.read(folder)
            for name, values in load_file(weights).items():
                last = events.Histograms(f"weights/{name}")[-1]
                wanted, _ = numpy.histogram(values.astype(float), 64)
                got = last.histogram_value
                self.assertEqual((last.step, got.num, got.min, got.max), (8, values.size, values.min(), values.max()))
                self.assertAlmostEqual(got.sum, values.astype(float).sum(), places=6)
                self.assertEqual(sum(got.bucket), values.size)
                self.assertLessEqual(numpy.abs(numpy.array(got.bucket) - wanted).sum(), 2, "but for rounding at an edge")
                gradients = events.Histograms(f"gradients/{name}")
                self.assertEqual([event.step for event in gradients], [2, 4, 6, 8])
                self.assertGreater(gradients[0].histogram_value.sum_squares, 0)

    def test_a_run_that_goes_on_takes_back_the_steps_that_it_makes_again(self):
        with t.temporary_folder() as folder:
            flags = ("--logger", "tensorboard", "--checkpoint-dir", folder / "saved")
            train(folder, *flags, "--max-epochs", 1)
            train(folder, *flags, "--max-epochs", 2, "--resume", "auto")
            steps = [event.step for event in self.read(folder).Scalars("train/loss")]
        self.assertEqual(steps, [2, 4, 6, 8, 10, 12, 14, 16])

    def test_a_second_run_in_the_folder_takes_the_place_of_the_first(self):
        with t.temporary_folder() as folder:
            for epochs in (2, 1):
                train(folder, "--logger", "tensorboard", "--max-epochs", epochs)
            self.assertEqual([event.step for event in self.read(folder).Scalars("train/loss")], [2, 4, 6, 8])

    def test_records_are_whole_and_their_checksums_right(self):
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

        with t.temporary_folder() as folder:
            train(folder, "--logger", "tensorboard", "--max-epochs", 1)
            (file,) = folder.glob("events.out.tfevents.*")
            reader, records = PyRecordReader_New(str(file)), 0
            while True:
                try:
                    reader.GetNext()
                except Exception as end:  # pylint: disable=broad-except
                    self.assertIn("EOF", repr(end) + "EOF" if type(end).__name__ == "OutOfRangeError" else repr(end))
                    break
                records += 1
        self.assertGreater(records, 10)


class Prometheus(unittest.TestCase):

    def gauges(self, url):
        """Empty before the first log."""
        text = fetched(url)
        rows = (re.fullmatch(r"(lockstep_\w+)(?:\{(\w+)=\"(\w+)\"\})? (\S+)", line) for line in text.splitlines())
        return {row.group(1, 2, 3): float(row.group(4)) for row in rows if row}

    def test_the_values_of_the_job_and_of_each_rank_are_served(self):
        with training("--logger", "prometheus", "--devices", 2) as process:
            url = url_of(process, "prometheus")
            t.wait_until(lambda: ("lockstep_loss", "split", "train") in self.gauges(url), 60, "the first values")
            first = self.gauges(url)
            self.assertIn("# TYPE lockstep_step gauge", fetched(url))
            t.wait_until(lambda: self.gauges(url)["lockstep_step", "split", "train"] > first["lockstep_step", "split", "train"], 60,
                         "a later step")
        for name in ("loss", "accuracy", "samples_per_s", "lr"):
            self.assertTrue(math.isfinite(first[f"lockstep_{name}", "split", "train"]), name)
        for rank in "01":
            self.assertGreaterEqual(first["lockstep_waiting_s", "rank", rank], 0)
            self.assertGreater(first["lockstep_memory_bytes", "rank", rank], 1e6)
        self.assertEqual(first["lockstep_restarts", "split", "run"], 0)

    def test_all_addresses_are_told_by_the_name_of_the_host(self):
        with training("--logger", "prometheus", "--prometheus-address", "0.0.0.0:0") as process:
            line = next(line for line in iter(process.stderr.readline, "") if "prometheus: " in line)
        self.assertRegex(line, f"^prometheus: http://{re.escape(socket.gethostname())}:[0-9]+/metrics")

    def test_a_port_that_is_taken_is_named(self):
        for flags in (("--logger", "prometheus", "--prometheus-address"), ("--dashboard", "--dashboard-address")):
            with training(*flags, "127.0.0.1:0", "--quiet") as process:
                address = url_of(process, flags[-1].split("-")[2]).split("/")[2]
                result = t.run(t.LOCKSTEP, "train", *MODEL, *flags, address, check=False)
            self.assertNotEqual(result.returncode, 0)
            self.assertEqual(result.stderr.count(f"{address}: {os.strerror(errno.EADDRINUSE)}"), 1, result.stderr)
            self.assertEqual(result.stderr.count("hint: "), 1, result.stderr)


class MlflowServer(http.server.BaseHTTPRequestHandler):
    """As much of MLflow as a run asks for. It notes what it was sent."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path.removeprefix("/api/2.0/mlflow/")
        answers = {"experiments/search": {"experiments": []}, "experiments/create": {"experiment_id": "7"},
                   "runs/create": {"run": {"info": {"run_id": "abc"}}}}
        status = 200
        if self.server.fails:
            self.server.fails -= 1
            status = 503
        elif any(value is None or not re.fullmatch(r"[\w\-./ :]+", one["key"]) for one in body.get("metrics", [])
                 for value in [one["value"]]):
            status = 400  # of all in the request, as MLflow does
        else:
            self.server.sent.append((path, body))
        text = json.dumps(answers.get(path, {})).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def mlflow_server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), MlflowServer)
    server.sent, server.fails, server.daemon_threads = [], 0, True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Mlflow(unittest.TestCase):

    def train(self, url, folder, *flags, check=True):
        env = t.clean_environment(MLFLOW_TRACKING_URI=url, MLFLOW_EXPERIMENT_NAME="digits", MLFLOW_RUN_NAME="a")
        return t.run(t.LOCKSTEP, "train", *MODEL, "--logger", "mlflow,jsonl", "--log-dir", folder, "--max-epochs", 2, *flags, env=env,
                     check=check)

    def expect_same_metrics(self, metrics, folder):
        for split in ("train", "test"):
            for name in ("loss", "accuracy", "lr"):
                wanted = [(row["step"], row[name]) for row in rows_of(folder, split)]
                self.assertEqual(sorted(metrics[f"{split}/{name}"]), wanted, name)

    def test_a_run_sends_its_metrics_and_parameters(self):
        with t.temporary_folder() as folder, mlflow_server() as (server, url):
            self.train(url, folder)
            paths = [path for path, _ in server.sent]
            self.assertEqual(paths[:3], ["experiments/search", "experiments/create", "runs/create"])
            self.assertEqual(server.sent[1][1], {"name": "digits"})
            self.assertEqual((server.sent[2][1]["experiment_id"], server.sent[2][1]["run_name"]), ("7", "a"))
            metrics, params = {}, {}
            for path, body in server.sent[3:]:
                self.assertEqual(body["run_id"], "abc")
                for one in body.get("metrics", []):
                    metrics.setdefault(one["key"], []).append((one["step"], one["value"]))
                params.update((one["key"], one["value"]) for one in body.get("params", []))
            self.expect_same_metrics(metrics, folder)
            self.assertEqual(params["model"], "mlp")
            self.assertEqual((paths[-1], server.sent[-1][1]["status"]), ("runs/update", "FINISHED"))

    def test_a_server_that_is_away_for_a_while_gets_the_values_later(self):
        with t.temporary_folder() as folder, mlflow_server() as (server, url):
            with training("--logger", "mlflow,jsonl", "--log-dir", folder, MLFLOW_TRACKING_URI=url) as process:
                t.wait_until(lambda: len(server.sent) > 5, 60, "the first values")
                server.fails = 2
                t.wait_until(lambda: server.fails == 0, 60, "requests that fail")
                count = len(server.sent)
                t.wait_until(lambda: len(server.sent) > count + 1, 60, "later values")
            steps = [one["step"] for _, body in server.sent for one in body.get("metrics", []) if one["key"] == "train/loss"]
            self.assertEqual(steps, [row["step"] for row in rows_of(folder, "train")])
            self.assertIn(("runs/update", "FAILED"), [(path, body.get("status")) for path, body in server.sent])
            self.assertEqual(process.returncode, 130)

    DIVERGES = ("--model", "linear", "--dataset", "random", "--lr", 1000, "--on-nan", "proceed")

    def test_a_run_that_diverges_loses_nothing_else(self):
        with t.temporary_folder() as folder, mlflow_server() as (server, url):
            result = self.train(url, folder, *self.DIVERGES)
            self.assertNotIn("did not take", result.stderr)
            metrics = [one for _, body in server.sent for one in body.get("metrics", [])]
            self.assertIn("Infinity", [one["value"] for one in metrics if one["key"] == "train/loss"])
            steps = [row["step"] for row in rows_of(folder, "train")]
            self.assertEqual([one["step"] for one in metrics if one["key"] == "train/lr"], steps)
            self.assertEqual(server.sent[-1][1]["status"], "FINISHED")

    def test_a_server_that_is_not_there_is_named(self):
        with t.temporary_folder() as folder:
            for url, word in (("", "MLFLOW_TRACKING_URI"), ("http://127.0.0.1:1", "http://127.0.0.1:1")):
                result = self.train(url, folder, check=False)
                self.assertNotEqual(result.returncode, 0)
                self.assertIn(word, result.stderr)

    @unittest.skipUnless(os.environ.get("LOCKSTEP_LONG_TESTS"), "the long form has a real server")
    def test_a_real_server(self):
        program = t.SOURCE_DIR / ".venv-mlflow" / "bin" / "mlflow"
        if not program.exists():
            self.skipTest("no .venv-mlflow: scripts/setup.sh --test with LOCKSTEP_LONG_TESTS makes it")
        with t.temporary_folder() as folder, socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
            free.close()
            url = f"http://127.0.0.1:{port}"
            server = subprocess.Popen([program, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
                                       "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"], cwd=folder, start_new_session=True,
                                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                def answers():
                    with contextlib.suppress(OSError):
                        return fetched(url + "/health")
                t.wait_until(answers, 180, "the server")
                self.train(url, folder, *self.DIVERGES)
                self.train(url, folder)
                self.train(url, folder)  # the experiment is there now
                post = lambda path, body: json.loads(urllib.request.urlopen(urllib.request.Request(
                    f"{url}/api/2.0/mlflow/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}), timeout=60).read())
                (experiment,) = post("experiments/search", {"filter": "name = 'digits'", "max_results": 5})["experiments"]
                runs = post("runs/search", {"experiment_ids": [experiment["experiment_id"]]})["runs"]
                self.assertEqual([run["info"]["status"] for run in runs], ["FINISHED"] * 3)
                self.assertIn("train/lr", [one["key"] for one in runs[2]["data"]["metrics"]])
                (wanted,) = (row["hyperparameters"] for row in rows_of(folder, "run") if "hyperparameters" in row)
                self.assertEqual({one["key"]: one["value"] for one in runs[0]["data"]["params"]}, wanted)
                metrics = {}
                for key in ("train/loss", "train/accuracy", "train/lr", "test/loss", "test/accuracy", "test/lr"):
                    history = json.loads(fetched(f"{url}/api/2.0/mlflow/metrics/get-history?run_id={runs[0]['info']['run_id']}&metric_key={key}"))
                    metrics[key] = [(one.get("step", 0), one["value"]) for one in history["metrics"]]
                self.expect_same_metrics(metrics, folder)
            finally:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(30)


if __name__ == "__main__":
    t.main()
