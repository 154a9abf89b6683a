"""The page of `lockstep report` and of `lockstep train --dashboard`, as Chromium shows it."""

import contextlib
import itertools
import json
import math
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import unittest
import urllib.request

import lockstep_testing as t
from test_loggers import MODEL, train, training, url_of

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PARTS = ("data_s", "compute_s", "optimizer_s", "waiting_s", "other_s")

LAST_STEP = "charts.has('metric loss') && charts.get('metric loss').plot.data[0].at(-1)"
GRIDS = ("#dde1e8", "#333a45")  # page.html's lines: light, dark
# How many pixels of a chart have about this colour.
PIXELS = """(() => {
  const {canvas} = charts.get('%s').plot.ctx, {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const wanted = [1, 3, 5].map(at => parseInt('%s'.slice(at, at + 2), 16));
  let count = 0;
  for (let i = 0; i < data.length; i += 4)
    count += data[i + 3] > 200 && wanted.every((value, at) => Math.abs(value - data[i + at]) < 5);
  return count;
})()"""


def made_run(folder, steps, ranks, slow=-1, **hyperparameters):
    """The rows of a run of so many steps."""
    folder.mkdir()
    with open(folder / "metrics.jsonl", "w") as file:
        def row(**values):
            file.write(json.dumps(values) + "\n")
        row(step=0, split="run", unix_time=1.8e9, ranks=ranks, restarts=0)
        row(step=0, split="run", hyperparameters={"model": "mlp", "lr": "0.05", **hyperparameters})
        for step in range(1, steps + 1):
            loss = 2 / (1 + step / steps * 9) + 0.05 * math.sin(step)
            row(step=step, split="train", epoch=1, loss=9.5 if step == steps // 2 else loss, accuracy=1 - loss / 3, lr=0.05,
                samples_per_s=1000 + 50 * math.cos(step), seconds=step * 0.01)
            times = {part: [0.1 * (i + 1)] * ranks for i, part in enumerate(PARTS)}
            if slow >= 0:
                times["waiting_s"] = [0.05 if rank == slow else 0.6 for rank in range(ranks)]
                times["compute_s"] = [0.85 if rank == slow else 0.3 for rank in range(ranks)]
            memory = 9e9 if step == steps // 2 else 3e8
            row(step=step, split="ranks", **times, memory_bytes=[memory] * ranks)
        row(step=steps, split="test", epoch=1, loss=0.3, accuracy=0.9, lr=0.05, samples_per_s=5000, seconds=9)
        row(step=steps, split="run", failure="rank 1 was lost </script><b>")
    return folder


def data_of(page):
    return json.loads(re.search(r"^const DATA = (.*);$", page, re.M).group(1))


class Report(unittest.TestCase):

    def test_a_long_run_keeps_its_extremes_in_few_points(self):
        with t.temporary_folder() as folder:
            run = made_run(folder / "a", 30000, 2)
            t.run(t.LOCKSTEP, "report", run, "-o", folder / "out.html")
            page = (folder / "out.html").read_text()
        (data,) = data_of(page)
        loss = data["series"]["train/loss"]
        self.assertLessEqual(len(loss["steps"]), 2000)
        self.assertEqual(loss["steps"], sorted(set(loss["steps"])))
        self.assertEqual(loss["values"][loss["steps"].index(15000)], 9.5)
        self.assertAlmostEqual(data["ranks"]["compute_s"][1]["sum"], 0.2 * 30000, places=3)
        for name, wanted in (("train/samples_per_s", 30000), ("train/loss", 30000), ("test/loss", 30000)):
            self.assertEqual(data["series"][name]["steps"][-1], wanted, name)
        self.assertEqual(loss["steps"][0], 1)
        self.assertEqual(max(data["ranks"]["memory_bytes"][1]["values"]), 9e9)
        self.assertLess(len(page), 1 << 20)
        self.assertNotIn("</script><b>", page)
        self.assertFalse(re.search(r"""(src|href)=["']?http""", page), "it needs no network")

    def test_a_benchmark_has_both_sides_and_what_it_ran_on(self):
        with t.temporary_folder() as folder:
            t.run(t.LOCKSTEP, "bench", "allreduce", "--sizes", "0,4", "--steps", 2, "--rounds", 1, "--output", folder / "b.json")
            t.run(t.LOCKSTEP, "report", made_run(folder / "a", 10, 1), folder / "b.json", "-o", folder / "out.html")
            run, bench = data_of((folder / "out.html").read_text())
            self.assertEqual(run["name"], str(folder / "a"))
            self.assertEqual(bench.pop("name"), str(folder / "b.json"))
            self.assertEqual(bench, json.loads((folder / "b.json").read_text()))
            (piped,) = data_of(t.run(t.LOCKSTEP, "report", folder / "b.json", "-o", "-").stdout)
            self.assertEqual(piped["results"], bench["results"])
            self.assertEqual(list(bench["results"][0])[:3], ["bytes", "ranks", "backend"], "columns keep their order")

    def test_what_is_no_run_is_named(self):
        with t.temporary_folder() as folder:
            (folder / "empty").mkdir()
            (folder / "empty" / "metrics.jsonl").write_text("no rows\n")
            for run, code, words in ((folder / "none", 2, "does not exist"), (folder, 2, "cannot be read"),
                                     (folder / "empty", 1, "no rows")):
                result = t.run(t.LOCKSTEP, "report", run, "-o", folder / "out.html", check=False)
                self.assertEqual(result.returncode, code)
                self.assertRegex(result.stderr, f"{run}.* {words}")
            self.assertEqual(t.run(t.LOCKSTEP, "report", check=False).returncode, 2)
            self.assertEqual(t.run(t.LOCKSTEP, "report", folder / "empty", "-o", "", check=False).returncode, 2)
            self.assertFalse((folder / "out.html").exists())


@unittest.skipUnless(CHROMIUM, "no Chromium is installed")
class InABrowser(unittest.TestCase):

    def shown(self, url, *flags, budget=5000):
        """The page's elements after its scripts have run. An error of a script fails the test."""
        with t.temporary_folder() as profile:
            result = subprocess.run(
                [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}",
                 "--enable-logging=stderr", "--log-level=0", f"--virtual-time-budget={budget}", *flags, "--dump-dom", str(url)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=180, check=True)
        self.assertNotRegex(result.stderr, r"CONSOLE.*(?i:error|uncaught)")
        return result.stdout

    def test_runs_are_compared(self):
        with t.temporary_folder() as folder:
            runs = [made_run(folder / "a", 10, 1), made_run(folder / "b", 5000, 8, slow=3, lr="0.1")]
            t.run(t.LOCKSTEP, "report", *runs, "-o", folder / "out.html")
            dom = self.shown((folder / "out.html").as_uri())
        self.assertGreaterEqual(dom.count("<canvas"), 6)
        self.assertGreater(int(re.search(r'data-points="(\d+)"', dom).group(1)), 2000)
        for text in ("Rank 3 is the slow one", "Differences", "rank 1 was lost", "Memory by rank", "Accuracy"):
            self.assertIn(text, dom)
        differences = dom[dom.index("Differences"):dom.index("Configuration")]
        self.assertIn("0.1", differences)
        self.assertNotIn("mlp", differences)

    def test_a_benchmark_is_drawn_beside_its_targets(self):
        context = {"cpu": "a processor", "lockstep": "0.1.0", "libtorch": "2.13.0", "date": "2026-01-01"}
        rows = {"targets": [{"target": "step </script><b>", "bound": 0.2, "at_most": True, "measured": 0.1, "met": True, "own": 3.5, "other": 35.0},
                            {"target": "loader", "bound": 100.0, "at_most": False, "measured": 50.0, "met": False}],
                "step": [{"model": model, "ranks": 2, "us_per_step": 20.5, "python_us_per_step": 41.0, "ratio": ratio,
                          "profile": [{"part": "forward", "us": 7.25}]} for model, ratio in (("mlp", 0.5), ("linear", None))],
                "scaling": [{"model": "mlp", "strategy": "ddp", "ranks": ranks, "seconds": 3.25 / ranks, "parts": {"forward": 1.5},
                             "speedup": speedup} for ranks, speedup in ((1, 1), (4, 2.0))]}
        with t.temporary_folder() as folder:
            for name, results in rows.items():
                (folder / name).write_text(json.dumps({"benchmark": name, "context": context, "results": results}))
            t.run(t.LOCKSTEP, "report", *(folder / name for name in rows), "-o", folder / "out.html")
            dom = self.shown((folder / "out.html").as_uri())
        figures = re.findall(r'<div class="figure"><span>(.*?)</span>.*?width: ([\d.]+)%.*?<span(?: class="(.*?)")?>(.*?)</span>', dom)
        self.assertEqual([(width, state) for _, width, state, _ in figures], [("25", ""), ("25", "bad"), ("25", ""), ("50", ""), ("25", "")])
        self.assertEqual([label for label, *_ in figures[1:]], ["loader", "mlp", "ranks 1", "ranks 4"])
        self.assertEqual([said for *_, said in figures[1:]],
                         ["50, at least 100: missed", "0.5, of the other's", "1, ideal 1", "2, ideal 4"])
        for text in ("a processor", "2.13.0", "<td>41</td>", "<td>7.25</td>", "profile: mlp", "<td>forward 1.5</td>", "&lt;/script&gt;&lt;b&gt;"):
            self.assertIn(text, dom)
        self.assertNotIn("Restarts and failures", dom[dom.index("<main"):dom.index("</main>")])

    def test_a_run_that_goes_on_keeps_its_name(self):
        with t.temporary_folder() as folder:
            flags = ("--logger", "jsonl", "--log-dir", folder / "log", "--checkpoint-dir", folder / "saved")
            t.run(t.LOCKSTEP, "train", *MODEL, *flags, "--max-epochs", 1)
            with training("--dashboard", *MODEL[4:6], *flags, "--resume", "auto") as process:
                with urllib.request.urlopen(url_of(process, "dashboard") + "events", timeout=60) as events:
                    line = next(line for line in iter(events.readline, b"") if line.startswith(b"data: "))
        (run,) = json.loads(line[6:])
        self.assertEqual(run["name"], str(folder / "log"))
        self.assertEqual(run["series"]["train/loss"]["steps"][0], 2, "what was before is there")

    def test_idle_pages_do_not_keep_others_from_the_run(self):
        with training("--dashboard") as process, contextlib.ExitStack() as idle:
            url = url_of(process, "dashboard")
            host, port = re.search(r"//(.+):(\d+)/", url).groups()
            for _ in range(60):
                connection = idle.enter_context(socket.create_connection((host, int(port)), timeout=60))
                connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")  # What comes is never read.
            self.assertIn("<title>Lockstep", urllib.request.urlopen(url, timeout=90).read().decode())
            with urllib.request.urlopen(url + "events", timeout=90) as events:
                self.assertIn(b"data: ", next(line for line in iter(events.readline, b"") if line.startswith(b"data: ")))

    @contextlib.contextmanager
    def page(self, url):
        """A function that evaluates JavaScript in the page, and one for Chromium's other commands. The page is open as long
        as this lasts: virtual time would wait for the end of its stream. It is asked over pipes, in texts that end in zero
        bytes."""
        command_out, command_in = os.pipe()
        answer_out, answer_in = os.pipe()
        with t.temporary_folder() as profile:
            words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}",
                     "--remote-debugging-pipe"]
            browser = subprocess.Popen(["bash", "-c", f'exec "$@" 3<&{command_out} 4>&{answer_in}', "bash", *words],
                                       pass_fds=(command_out, answer_in), stderr=subprocess.DEVNULL, start_new_session=True)
            os.close(command_out)
            os.close(answer_in)
            received, numbers, session = b"", itertools.count(1), {}

            def ask(method, **parameters):
                nonlocal received
                number = next(numbers)
                os.write(command_in, json.dumps({"id": number, "method": method, "params": parameters, **session}).encode() + b"\0")
                while True:
                    while b"\0" not in received:
                        self.assertTrue(select.select([answer_out], [], [], 60)[0], f"no answer to {method}")
                        received += os.read(answer_out, 1 << 16)
                    text, received = received.split(b"\0", 1)
                    message = json.loads(text)
                    self.assertNotEqual(message.get("method"), "Runtime.exceptionThrown", message)
                    if message.get("id") == number:
                        return message["result"]

            try:
                target = ask("Target.createTarget", url=url)["targetId"]
                session["sessionId"] = ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
                ask("Runtime.enable")
                yield lambda script: ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value"), ask
            finally:
                os.killpg(browser.pid, signal.SIGKILL)
                browser.wait()
                os.close(command_in)
                os.close(answer_out)

    def test_a_run_is_shown_as_it_goes_on(self):
        with training("--dashboard", "--devices", 2) as process:
            url = url_of(process, "dashboard")
            self.assertIn("<title>Lockstep", urllib.request.urlopen(url, timeout=30).read().decode())
            with urllib.request.urlopen(url + "events", timeout=30) as events:
                def steps():
                    line = next(line for line in iter(events.readline, b"") if line.startswith(b"data: "))
                    return (json.loads(line[6:])[0]["series"].get("train/loss") or {"steps": [0]})["steps"][-1]
                first = steps()
                self.assertGreater(steps(), first)
            with self.page(url) as (evaluate, _):
                t.wait_until(lambda: evaluate(LAST_STEP), 60, "the first curve")
                first = evaluate(LAST_STEP)
                t.wait_until(lambda: evaluate(LAST_STEP) > first, 60, "a later step")
                self.assertGreaterEqual(evaluate("document.querySelectorAll('canvas').length"), 4)
                self.assertIn("rank 1", evaluate("document.body.innerText"))
                process.send_signal(signal.SIGINT)
                t.wait_until(lambda: "has ended" in evaluate("document.getElementById('state').textContent"), 60, "the end")

    @unittest.skipUnless(os.environ.get("LOCKSTEP_LONG_TESTS"), "the long form only (LOCKSTEP_LONG_TESTS=1)")
    def test_any_window_shows_a_run_of_one_rank_or_eight(self):
        for ranks in (1, 8):
            with training("--dashboard", "--devices", ranks) as process, \
                    self.page(url_of(process, "dashboard")) as (evaluate, ask):
                t.wait_until(lambda: evaluate(LAST_STEP), 180, "the first curve")
                for dark, width in itertools.product((False, True), (360, 1400)):
                    with self.subTest(ranks=ranks, dark=dark, width=width):
                        ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
                        ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
                        first = evaluate(LAST_STEP)
                        t.wait_until(lambda: evaluate(LAST_STEP) > first, 120, "a later step")
                        self.assertLessEqual(evaluate("document.documentElement.scrollWidth"), width)
                        self.assertEqual(evaluate("document.querySelectorAll('.rank').length"), ranks)
                        self.assertEqual(evaluate("charts.get('ranks memory_bytes').plot.series.length"), 1 + ranks)
                        for name in evaluate("[...charts.keys()]"):
                            last = evaluate(f"charts.get('{name}').plot.series.at(-1).stroke()")  # drawn over the others
                            curve, grid, other_grid = (evaluate(PIXELS % (name, color)) for color in (last, GRIDS[dark], GRIDS[not dark]))
                            self.assertGreater(curve, 10, name)
                            self.assertGreater(grid, 100, name)
                            self.assertEqual(other_grid, 0, name)

    def test_a_run_that_was_trained(self):
        with t.temporary_folder() as folder:
            train(folder / "a", "--logger", "jsonl", "--max-epochs", 2)
            t.run(t.LOCKSTEP, "report", folder / "a", "-o", folder / "out.html")
            dom = self.shown((folder / "out.html").as_uri())
        for text in ("Where the time of steps goes", "max-epochs", "begins, ranks: 1"):
            self.assertIn(text, dom)


if __name__ == "__main__":
    t.main()
