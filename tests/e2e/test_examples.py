"""The seeds' programs: one host with one and two processes, two "hosts", and what they leave."""

import contextlib
import difflib
import functools
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time
import unittest

import lockstep_testing as t

LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
EXAMPLES = t.BUILD_DIR / "examples"
FEW = ("--limit", 600, "--epochs", 1)
NOTE = "built-in digits"


def free_port():
    """A port that was free a moment ago: the programs take a number, as the seeds do."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(program, *arguments, cwd=None, timeout=120, check=True, **environment):
    environment.setdefault("MASTER_PORT", free_port())
    return t.run(EXAMPLES / program, *arguments, cwd=cwd, timeout=timeout, check=check,
                 env=environment_of(**environment))


def environment_of(**variables):
    """No MNIST where the programs look for it by themselves: they take the built-in digits."""
    return t.clean_environment(**{"LOCKSTEP_DATA_DIR": "/nowhere", **variables})


def children_of(pid):
    return list(map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def run_on_two_hosts(program, arguments_of, timeout=120):
    """Runs a program twice side by side, as two hosts would: arguments_of(i) is host i's."""
    env = environment_of(MASTER_PORT=free_port())
    with contextlib.ExitStack() as stack:
        hosts = []
        for i in range(2):
            command = [str(EXAMPLES / program), *map(str, arguments_of(i))]
            host = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
            stack.callback(host.kill)
            hosts.append(host)
        outputs = [host.communicate(timeout=timeout) for host in hosts]
        for host, (out, err) in zip(hosts, outputs):
            if host.returncode != 0:
                raise AssertionError(f"{host.args} exited with {host.returncode}\n{out}\n{err}")
        return [out for out, err in outputs]


def epoch_lines(text):
    return [line for line in text.splitlines() if line.startswith("Epoch")]


class Playground(unittest.TestCase):
    folder = "000_playground"

    @classmethod
    @functools.cache
    def single_gpu(cls):
        return run(f"{cls.folder}/single_gpu", *FEW)

    def test_single_gpu(self):
        result = self.single_gpu()
        self.assertRegex(result.stdout, r"^Epoch 1/1 loss \d+\.\d{4} test accuracy 0\.\d{4}\n$")
        self.assertIn(NOTE, result.stderr)

    def test_learns(self):
        result = run(f"{self.folder}/distributed_data_parallel", "-g", 2, "--limit", 6000, "--lr", 0.05)
        accuracies = [float(re.search(r"accuracy ([\d.]+)", line)[1]) for line in epoch_lines(result.stdout)]
        self.assertEqual(len(accuracies), 3)
        self.assertGreater(accuracies[-1], 0.8)
        self.assertGreater(accuracies[-1], accuracies[0])
        self.assertEqual(result.stderr.count(NOTE), 1)  # rank 0 alone says it

    @unittest.skipUnless(t.data_dir(), t.NO_DATA)
    def test_real_mnist(self):
        result = run(f"{self.folder}/single_gpu", "--epochs", 1, "--limit", 2000, "--data-dir", t.data_dir())
        self.assertNotIn(NOTE, result.stderr)
        self.assertRegex(result.stdout, "^Epoch 1/1 ")

    def test_data_parallel(self):
        """One replica gives what the program for one GPU gives; several give nearly the same."""
        alone = self.single_gpu().stdout.strip()
        for replicas in (1, 3):
            result = run(f"{self.folder}/data_parallel", "--replicas", replicas, *FEW).stdout.strip()
            self.assertTrue(result.endswith(f" ({replicas} replicas)"), result)
            if replicas == 1:
                self.assertEqual(result, f"{alone} (1 replicas)")
            loss = [float(re.search(r"loss ([\d.]+)", text)[1]) for text in (alone, result)]
            self.assertAlmostEqual(*loss, delta=2e-4)

    def test_model_parallel(self):
        """Pipelined or not: the same mathematics on other parts of the batch."""
        flags = (*FEW, "--batch-size", 50)
        whole = run(f"{self.folder}/model_parallel", *flags).stdout
        parts = run(f"{self.folder}/model_parallel", "--pipelined", "--split-size", 16, *flags).stdout
        self.assertIn("(chunk by chunk)", whole)
        self.assertIn("(pipelined)", parts)
        loss = [float(re.search(r"loss ([\d.]+)", text)[1]) for text in (whole, parts)]
        self.assertAlmostEqual(*loss, delta=2e-4)

    def test_two_hosts(self):
        first, second = run_on_two_hosts(
            f"{self.folder}/distributed_data_parallel",
            lambda i: ["-n", 2, "-g", 1, "-nr", i, "-ip", "127.0.0.1", *FEW])
        self.assertIn("(2 processes)", first)
        self.assertEqual(second, "")

    def test_environment_wins_over_the_address(self):
        """-ip names an address that would not answer; MASTER_ADDR does. The flags are those that the seed writes."""
        result = run(f"{self.folder}/distributed_data_parallel", "-n", 1, "-g", 2, "-nr", 0, "-ip", "192.0.2.1", *FEW,
                     MASTER_ADDR="127.0.0.1")
        self.assertIn("(2 processes)", result.stdout)
        self.assertEqual(len(epoch_lines(result.stdout)), 1)

    def test_metrics_are_gathered(self):
        flags = ("--limit", 601, "--epochs", 1)
        name = f"{self.folder}/distributed_data_parallel2"
        with t.temporary_folder() as folder:
            result = run(name, "-n", 1, "-g", 2, "-r", 0, "-ip", "127.0.0.1", "--port", free_port(), "-s",
                         folder / "model.safetensors", *flags, MASTER_PORT="")
            line, saved = epoch_lines(result.stdout)
            # The test part has 601 samples, each counted once.
            self.assertRegex(line, r"train loss [\d.]+ accuracy [\d.]+ \| test loss [\d.]+ accuracy [\d.]+ \(601 samp")
            self.assertIn("saved to", saved)
            self.assertEqual(names_in(folder / "model.safetensors"),
                             {f"{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")})
        # Two hosts give the same metrics as one.
        first, second = run_on_two_hosts(name, lambda i: ["-n", 2, "-g", 1, "-r", i, "-ip", "127.0.0.1", *flags])
        self.assertEqual((first, second), (f"{line}\n", ""))

    def test_a_folder_without_mnist_is_refused(self):
        """Only where no folder is named the digits take its place."""
        for program, processes in (("single_gpu", ()), ("distributed_data_parallel", ("-g", 2))):
            result = run(f"{self.folder}/{program}", *processes, *FEW, "--data-dir", "/nowhere", check=False)
            self.assertEqual(result.returncode, 1, result)
            self.assertIn("no complete mnist in /nowhere", result.stderr)
            self.assertIn("hint: --download fetches it", result.stderr)
            self.assertNotIn("Epoch", result.stdout)

    def test_a_taken_port_is_named(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            for program, flags in (("distributed_data_parallel", ()), ("distributed_data_parallel2", ("--port", port))):
                result = run(f"{self.folder}/{program}", "-g", 2, *flags, *FEW, check=False,
                             MASTER_PORT="" if flags else port)
                self.assertEqual(result.returncode, 1, result)
                self.assertIn(f"cannot listen on 127.0.0.1:{port}: the port is taken", result.stderr)
                self.assertRegex(result.stderr, f"hint: give another one by {'--port or ' if flags else ''}MASTER_PORT")


class Mistakes(unittest.TestCase):
    """The messages are as good as the binary's."""

    def refused(self, program, *words, says):
        result = run(program, *words, check=False)
        self.assertEqual(result.returncode, 2, result)
        self.assertEqual(result.stdout, "")
        self.assertTrue(result.stderr.startswith(pathlib.Path(program).name + ": error: "), result.stderr)
        for part in [says] if isinstance(says, str) else says:
            self.assertIn(part, result.stderr)
        self.assertLess(max(map(len, result.stderr.splitlines())), 160, result.stderr)

    def test_unknown_flags(self):
        for program, flag, meant in (
                ("000_playground/distributed_data_parallel", "--batchsize", "--batch-size"),
                ("001_tutorial/mnist_distributed", "--gpu", "--gpus"),
                ("002_ddp_series/multigpu_torchrun", "--snapshot_pth", "--snapshot-path"),
                ("004_distributed_training/distributed_example", "--data_dr", "--data-dir"),
                *LONG * [("000_playground/single_gpu", "--epoch", "--epochs"),
                         ("000_playground/distributed_data_parallel2", "--savefil", "--savefile"),
                         ("001_tutorial/mnist", "--node", "--nodes"),
                         ("002_ddp_series/single_gpu", "--batch_sise", "--batch-size"),
                         ("002_ddp_series/multigpu", "--device", "--devices")]):
            self.refused(program, flag, 1, says=[f"unknown flag '{flag}'; did you mean '{meant}'?",
                                                f"--help' lists the flags"])

    def test_values(self):
        playground = "000_playground/distributed_data_parallel"
        self.refused(playground, "-nr", 2, "-n", 2, says="-nr 2 is not below -n 2")
        self.refused(playground, "-g", 0, says="--gpus: '0' is not a whole number of at least 1")
        if LONG:
            self.refused(playground, "-nr", "first", says="--nr: 'first' is not a whole number of at least 0")
            self.refused(playground, "--epochs", says="--epochs needs a value")
        self.refused(playground + "2", "--nr", 0, says="unknown flag '--nr'; did you mean '--rank'?")
        self.refused(playground + "2", "-s", "m.onnx", says="m.safetensors")
        self.refused(playground + "2", "--port", 70000, says="--port: '70000' is not a whole number from 1 to 65535")
        self.refused("001_tutorial/mnist", "-nr", 1, says="-nr 1 is not below -n 1")
        self.refused("004_distributed_training/distributed_example", "--model", "convnt", says="'convnet'")

    def test_words(self):
        for program in ("multigpu_torchrun", "single_gpu", "multigpu")[:1 + 2 * LONG]:  # They share their parser.
            program = f"002_ddp_series/{program}"
            self.refused(program, 2, 0, says="save_every: '0' is not a whole number of at least 1")
            self.refused(program, "two", 1, says="total_epochs: 'two' is not a whole number of at least 0")
            self.refused(program, 3, says="save_every is missing")
            self.refused(program, 1, 2, 3, 4, says="unexpected argument '3'")

    def test_help(self):
        """Names the program, its flags and their defaults."""
        for program, lines in (
                ("000_playground/distributed_data_parallel", [r"Usage: distributed_data_parallel \[FLAGS\]\n",
                                                              r"-n, --nodes N +Machines \[1\]",
                                                              r"--data-dir DIR +Where MNIST lies"]),
                ("002_ddp_series/multigpu_torchrun", [r"Usage: multigpu_torchrun \[FLAGS\] total_epochs save_every\n",
                                                      r"--snapshot-path FILE"])):
            out = run(program, "--help").stdout
            for line in lines:
                self.assertRegex(out, line)


def names_in(path):
    """The tensors' names in a safetensors file, by its header."""
    import json
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return set(json.loads(content[8:8 + size])) - {"__metadata__"}


class Tutorial(unittest.TestCase):
    # 200 steps of one process, 100 of two: enough for a line.
    flags = ("--epochs", 1, "--batch-size", 4, "--limit", 800)

    def check(self, output, steps):
        lines = output.splitlines()
        printed = [*range(100, steps, 100), steps]  # every hundredth, and the last
        for step, line in zip(printed, lines):
            self.assertRegex(line, rf"^Epoch \[1/1\], Step \[{step}/{steps}\], Loss: \d+\.\d{{4}}$")
        self.assertEqual(len(lines) - 1, len(printed))
        self.assertRegex(lines[-1], r"^Training complete in: \d+:\d\d:\d\d\.\d{6}$")

    def test_mnist(self):
        self.check(run("001_tutorial/mnist", "-n", 1, "-g", 1, "-nr", 0, *self.flags).stdout, 200)

    def test_a_short_run_prints_its_last_loss(self):
        flags = ("--epochs", 1, "--limit", 600)
        self.check(run("001_tutorial/mnist", *flags).stdout, 6)
        self.check(run("001_tutorial/mnist_distributed", "-g", 2, *flags).stdout, 3)

    def test_one_process(self):
        self.check(run("001_tutorial/mnist_distributed", "-n", 1, "-g", 1, "-nr", 0, *self.flags).stdout, 200)

    def test_two_hosts(self):
        first, second = run_on_two_hosts("001_tutorial/mnist_distributed",
                                         lambda i: ["-n", 2, "-g", 1, "-nr", i, *self.flags])
        self.check(first, 100)
        self.check(second, 100)  # as in the tutorial, each host's first process prints

    def last_loss(self, program, *flags):
        result = run(f"001_tutorial/{program}", "-g", 2, "--epochs", 1, "--limit", 32, "--batch-size", 4, *flags)
        return float(re.search(r"Step \[4/4\], Loss: ([\d.]+)", result.stdout)[1]), result

    def test_mixed_precision_at_each_level(self):
        plain, _ = self.last_loss("mnist_distributed")
        self.assertEqual(self.last_loss("mnist_mixed", "--opt-level", "O0")[0], plain)
        for flags in (("--opt-level", "O1"), ("--opt-level", "O3"), ("--loss-scale", 128), *LONG * [()]):
            loss, result = self.last_loss("mnist_mixed", *flags)
            # float16 has 11 bits: a loss near 2.3 is within some units of its last place, 0.002.
            self.assertAlmostEqual(loss, plain, delta=0.01, msg=flags)
            self.assertLessEqual(result.stderr.count("is no faster than float32"), 1)  # rank 0 alone says it

    def test_a_level_with_a_zero(self):
        """The seed: "if you use a zero instead, you will get a baffling error message"."""
        result = run("001_tutorial/mnist_mixed", "--opt-level", "02", check=False)
        self.assertEqual(result.returncode, 2)
        self.assertIn("a capital letter O, not a zero", result.stderr)
        self.assertEqual(result.stderr.count("error: "), 1)


class Series(unittest.TestCase):
    def test_single_gpu(self):
        with t.temporary_folder() as folder:
            result = run("002_ddp_series/single_gpu", 3, 2, cwd=folder)
            self.assertEqual(result.stdout.splitlines(), [
                "[GPU0] Epoch 0 | Batchsize: 32 | Steps: 64",
                "Epoch 0 | Training checkpoint saved at checkpoint.safetensors",
                "[GPU0] Epoch 1 | Batchsize: 32 | Steps: 64",
                "[GPU0] Epoch 2 | Batchsize: 32 | Steps: 64",
                "Epoch 2 | Training checkpoint saved at checkpoint.safetensors",
            ])
            self.assertEqual(names_in(folder / "checkpoint.safetensors"), {"weight", "bias"})

    def test_multigpu(self):
        with t.temporary_folder() as folder:
            result = run("002_ddp_series/multigpu", 2, 1, "--batch_size", 16, "--devices", 2, cwd=folder)
            expected = [f"[GPU{rank}] Epoch {epoch} | Batchsize: 16 | Steps: 64" for rank in (0, 1) for epoch in (0, 1)]
            expected += [f"Epoch {epoch} | Training checkpoint saved at checkpoint.safetensors" for epoch in (0, 1)]
            self.assertEqual(sorted(result.stdout.splitlines()), sorted(expected))

    def launch(self, folder, *arguments):
        program = EXAMPLES / "002_ddp_series/multigpu_torchrun"
        return t.run(t.LOCKSTEP, "run", "--nproc-per-node", 2, program, *arguments, cwd=folder,
                     env=environment_of()).stdout

    def test_snapshot(self):
        """Two runs of two epochs end with the weights of one run of four."""
        with t.temporary_folder() as folder, t.temporary_folder() as other:
            first = self.launch(folder, 2, 1)
            self.assertIn("[GPU0] Epoch 0 | Batchsize: 32 | Steps: 32", first)
            self.assertEqual(first.count("Training snapshot saved at snapshot.safetensors"), 2)
            self.assertNotIn("Loading", first)
            second = self.launch(folder, 4, 1)
            self.assertEqual(second.count("Loading snapshot"), 2)
            self.assertEqual(second.count("Resuming training from snapshot at Epoch 2"), 2)
            self.assertNotIn("Epoch 1 |", second)
            self.assertIn("[GPU1] Epoch 3 | Batchsize: 32 | Steps: 32", second)
            self.launch(other, 4, 1)
            self.assertEqual((folder / "snapshot.safetensors").read_bytes(),
                             (other / "snapshot.safetensors").read_bytes())

    @unittest.skipUnless(t.torch_is_the_linked_one(), "this Python's torch is not the LibTorch that is linked")
    def test_a_restart_by_torchrun(self):
        """torchrun keeps one store for all its attempts. The second one must not take the first one's keys for its own."""
        seed = int(os.environ.get("LOCKSTEP_FAULT_SEED", random.randrange(1 << 30)))
        print(f"LOCKSTEP_FAULT_SEED={seed}", flush=True)
        chance = random.Random(seed)
        program = EXAMPLES / "002_ddp_series/multigpu_torchrun"
        with t.temporary_folder() as folder:
            job = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                                    "--max-restarts", "3", "--no-python", program, "100", "1"], cwd=folder, text=True,
                                   env=environment_of(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            try:
                t.wait_until((folder / "snapshot.safetensors").exists, 60, "the first snapshot")
                time.sleep(chance.uniform(0, 0.2))
                os.kill(chance.choice(processes_of(program, job.pid)), signal.SIGKILL)
                output, errors = job.communicate(timeout=120)
            finally:
                job.kill()
                job.wait(20)
            self.assertEqual(job.returncode, 0, errors)
            self.assertIn("[GPU1] Epoch 99 | Batchsize: 32 | Steps: 32", output)
            self.assertEqual(output.count("Resuming training from snapshot at Epoch"), 2, output + errors)
            self.assertEqual(names_in(folder / "snapshot.safetensors"), {"weight", "bias"})

    def test_a_foreign_snapshot_is_named(self):
        with t.temporary_folder() as folder:
            (folder / "snapshot.safetensors").write_bytes(b"not one")
            result = run("002_ddp_series/multigpu_torchrun", 1, 1, cwd=folder, check=False, MASTER_PORT="")
            self.assertEqual(result.returncode, 1)
            self.assertIn("snapshot.safetensors", result.stderr)


def processes_of(program, ancestor):
    """The children of a process that run this program."""
    children = pathlib.Path(f"/proc/{ancestor}/task/{ancestor}/children").read_text().split()
    return [int(child) for child in children if os.readlink(f"/proc/{child}/exe") == str(program)]


class OpenTrainer(unittest.TestCase):
    """Programs on lockstep::Trainer with modules of their own."""

    def test_two_arguments(self):
        """The strategy and the precision are arguments; the lines stay the same."""
        weights = []
        for flags in ((), ("--strategy", "zero1"), ("--precision", "bf16-mixed")):
            with t.temporary_folder() as folder:
                out = run("002_ddp_series/trainer", 3, 2, "--devices", 2, *flags, cwd=folder, MASTER_PORT="").stdout
                lines = out.splitlines()
                self.assertEqual(len([line for line in lines if re.match(r"\[GPU[01]\] Epoch \d \| Loss: 0\.", line)]), 6)
                self.assertEqual(lines.count("Epoch 2 | Training checkpoint saved at checkpoint.safetensors"), 1)
                self.assertEqual(names_in(folder / "checkpoint.safetensors"), {"layer.weight", "layer.bias"})
                weights.append((folder / "checkpoint.safetensors").read_bytes())
        self.assertEqual(weights[0], weights[1])  # ZeRO-1 has DDP's bits
        self.assertNotEqual(weights[0], weights[2])

    def test_dcgan(self):
        """Two optimizers; a run of two epochs ends as two runs of one, both networks and optimizers saved."""
        flags = ("--limit", 16, "--batch-size", 8, "--devices", 2, "--log-every-n-steps", 1)
        line = re.compile(r"^\[ \d/2\]\[ +\d+/2\] D_loss: \d+\.\d{4} \| G_loss: \d+\.\d{4}$", re.M)
        with t.temporary_folder() as whole, t.temporary_folder() as parts:
            out = run("dcgan/dcgan", "--epochs", 2, *flags, cwd=whole, MASTER_PORT="").stdout
            self.assertEqual(len(line.findall(out)), 2, out)
            self.assertEqual(names_in(whole / "dcgan-samples.safetensors"), {"images"})
            for epochs in (1, 2):
                run("dcgan/dcgan", "--epochs", epochs, *flags, "--checkpoint-dir", parts / "run", cwd=parts,
                    MASTER_PORT="")
            names = set().union(*(names_in(path) for path in (parts / "run/latest").glob("state-*")))
            for network in ("generator", "discriminator"):
                self.assertIn(f"optimizer.{network}.exp_avg.0", names)
            self.assertEqual((whole / "dcgan-samples.safetensors").read_bytes(),
                             (parts / "dcgan-samples.safetensors").read_bytes())


class CharGpt(unittest.TestCase):
    def test_learns_a_text_and_writes(self):
        with t.temporary_folder() as folder:
            (folder / "text.txt").write_text("abcdefghij" * 300)
            out = run("char_gpt/char_gpt", "--text", folder / "text.txt", "--devices", 2, "--epochs", 8, "--batch-size", 2,
                      "--context", 16, "--channels", 32, "--layers", 1, "--sample", 40, "--temperature", 0.1, cwd=folder,
                      MASTER_PORT="").stdout
        losses = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("epoch")]
        self.assertEqual(len(losses), 8)
        self.assertLess(losses[-1], 0.3 * losses[0])
        # After a letter there is only one that can follow.
        written = out.splitlines()[-1]
        self.assertEqual(len(written), 40)
        self.assertIn(written, "abcdefghij" * 6)


class DistributedTraining(unittest.TestCase):
    flags = ("--limit", 200, "--batch-size", 20, "--model", "convnet")
    script = t.SOURCE_DIR / "examples/004_distributed_training/distributed_example.sh"
    program = EXAMPLES / "004_distributed_training/distributed_example"

    def environment(self, **more):
        return environment_of(DISTRIBUTED_EXAMPLE=self.program, MASTER_PORT=free_port(), **more)

    def test_script(self):
        result = t.run(self.script, 2, *self.flags, env=self.environment())
        self.assertRegex(result.stdout, r"Epoch 0: loss [\d.]+, \d+ samples/s over 2 processes\nDone in ")

    def test_one_process(self):
        result = t.run(self.program, *self.flags, "--model", "fashion-cnn", env=environment_of())
        self.assertIn("over 1 processes", result.stdout)

    def test_data_parallel(self):
        lines = run("004_distributed_training/data_parallel", "--batch-sizes", "1,32", "--n-reps", 2, "--replicas",
                    2).stdout.splitlines()
        self.assertRegex(lines[0], "2 replicas$")
        self.assertEqual([line.split()[0] for line in lines[1:]], ["1", "32"])
        for line in lines[1:]:
            self.assertTrue(all(float(figure) > 0 for figure in line.split()), line)

    def test_script_on_two_hosts(self):
        port = free_port()
        hosts = [subprocess.Popen([str(w) for w in (self.script, 1, *self.flags)], stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL, text=True,
                                  env={**self.environment(NNODES=2, NODE_RANK=i), "MASTER_PORT": str(port)})
                 for i in range(2)]
        try:
            outputs = [host.communicate(timeout=120)[0] for host in hosts]
        finally:
            for host in hosts:
                host.terminate()
                host.wait()
        self.assertEqual([host.returncode for host in hosts], [0, 0])
        self.assertIn("over 2 processes", outputs[0])
        self.assertEqual(outputs[1], "")

    def test_script_ends_all_when_one_fails(self):
        result = t.run(self.script, 2, "--model", "unknown", env=self.environment(), check=False)
        self.assertEqual(result.returncode, 1)
        self.assertIn("a process failed", result.stderr)

    def test_launcher(self):
        result = t.run(t.LOCKSTEP, "run", "--nproc-per-node", 2, self.program, *self.flags, env=environment_of())
        self.assertIn("over 2 processes", result.stdout)


class Quickstart(unittest.TestCase):
    def accuracies(self, text):
        return [float(a) for a in re.findall(r"epoch \d+: accuracy ([\d.]+)", text)]

    def test_at_most_five_lines_differ(self):
        sources = [(t.SOURCE_DIR / "examples/quickstart" / f"{name}.cpp").read_text() for name in
                   ("single", "distributed")]
        code = [[line for line in text.splitlines() if not line.startswith("//")] for text in sources]
        self.assertLessEqual(len([line for line in code[0] if line]), 30)
        changed = [line for line in difflib.ndiff(*code) if line.startswith("+ ")]
        self.assertGreater(len(changed), 0)
        self.assertLessEqual(len(changed), 5, changed)

    def test_single(self):
        accuracies = self.accuracies(run("quickstart/single").stdout)
        self.assertEqual(len(accuracies), 3)
        self.assertGreater(accuracies[-1], 0.9)

    def test_distributed(self):
        accuracies = self.accuracies(run("quickstart/distributed", MASTER_PORT="").stdout)
        self.assertEqual(len(accuracies), 3)  # rank 0's alone
        self.assertGreater(accuracies[-1], 0.9)

    def test_elastic(self):
        with subprocess.Popen([EXAMPLES / "quickstart/elastic"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=environment_of(MASTER_PORT="")) as job:
            shown = [job.stdout.readline()]
            supervisor, = children_of(job.pid)
            os.kill(random.choice(children_of(supervisor)), signal.SIGKILL)
            output, errors = job.communicate(timeout=120)
        shown += output.splitlines()
        self.assertEqual(job.returncode, 0, errors)
        # The rank that shows its lines may be the one that died.
        accuracies = [float(line.rsplit(" ", 1)[1]) for line in shown if "accuracy" in line]
        self.assertGreater(accuracies[-1], 0.9, shown)
        self.assertIn("the others go on without it", errors)

    def test_collectives(self):
        lines = run("quickstart/collectives", MASTER_PORT="").stdout.splitlines()
        numbers = {"message": [[42], [42], [0]], "all_reduce": [[6]] * 3, "all_gather": [[0, 10, 20]] * 3, "ring": [[6]] * 3}
        self.assertEqual(lines, [f"{what}, rank {rank}: {' '.join(map(str, values))}"
                                 for what, of_ranks in numbers.items() for rank, values in enumerate(of_ranks)])

    def test_mesh(self):
        losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\S+)", run("quickstart/mesh", MASTER_PORT="").stdout)]
        self.assertEqual(len(losses), 2)
        self.assertLess(losses[1], losses[0] / 2)
        self.assertLess(losses[1], 0.5)

    def test_parameter_averaging(self):
        accuracies = self.accuracies(run("quickstart/parameter_averaging", MASTER_PORT="").stdout)
        self.assertEqual(len(accuracies), 3)
        self.assertGreater(accuracies[-1], 0.85)

    def test_under_the_launcher(self):
        """All ranks' standard output is the launcher's to show."""
        command = (t.LOCKSTEP, "run", "--nproc-per-node", 3)
        program = EXAMPLES / "quickstart/distributed"
        lines = re.findall(r"\[rank\d\]: (epoch .*)", t.run(*command, program, env=environment_of()).stdout)
        self.assertEqual((len(lines), len(set(lines))), (9, 3))  # equal weights on all ranks
        if LONG:
            shown = t.run(*command, "--local-ranks-filter", 0, program, env=environment_of()).stdout
            self.assertEqual(re.findall(r"\[rank0\]: (epoch .*)", shown), sorted(set(lines)))

    def test_pages_show_the_programs(self):
        sources = [(t.SOURCE_DIR / "examples/quickstart" / f"{name}.cpp").read_text() for name in
                   ("single", "distributed")]
        code = [text[text.index("#include"):] for text in sources]
        page, readme = ((t.SOURCE_DIR / name).read_text() for name in ("docs/program.md", "README.md"))
        self.assertIn(f"```cpp\n{code[0]}```", page)
        changed = [line[0] + line[2:] for line in difflib.ndiff(*(text.splitlines() for text in code))
                   if line[:2] in ("+ ", "- ")]
        self.assertLessEqual(len(changed), 5, changed)
        for text in (page, readme):
            self.assertIn("```diff\n" + "\n".join(changed) + "\n```", text)


class TutorialPage(unittest.TestCase):
    """docs/tutorial.md shows lines that stand in the programs, and runs programs that exist."""
    PAGE = t.SOURCE_DIR / "docs/tutorial.md"
    LINK = re.compile(r"\]\(\.\./(examples/[\w/]+\.cpp)\)")

    def blocks(self, language):
        """Each block with the programs that the text before it links to."""
        text = self.PAGE.read_text()
        for match in re.finditer(rf"```{language}\n(.*?)```", text, re.DOTALL):
            links = list(dict.fromkeys(self.LINK.findall(text[:match.start()])[-2:]))
            yield match[1].splitlines(), [(t.SOURCE_DIR / link).read_text().splitlines() for link in links]

    def test_differences_are_those_of_the_programs(self):
        for lines, (before, after) in self.blocks("diff"):
            for line in lines:
                holder, other = (after, before) if line[0] == "+" else (before, after)
                with self.subTest(line):
                    self.assertIn(line[1:], holder)
                    self.assertNotIn(line[1:], other)

    def test_code_stands_in_the_program(self):
        for lines, programs in self.blocks("cpp"):
            program = [line.strip() for line in programs[-1]]
            for line in lines:
                self.assertIn(line.strip(), program)

    def test_programs_exist(self):
        programs = set(re.findall(r"build/examples/(\w+/\w+)", self.PAGE.read_text()))
        self.assertGreater(len(programs), 10)
        for program in programs:
            self.assertTrue((EXAMPLES / program).exists(), program)


if __name__ == "__main__":
    t.main()
