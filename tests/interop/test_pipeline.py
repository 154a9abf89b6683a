"""The pipeline strategy against Python's torch.distributed.pipelining: the same orders, losses and weights. And a
rank that is killed in the middle of each schedule."""

import pathlib
import unittest

import lockstep_testing as testing
import torch_forks
from parity_testing import differences, require_linked_torch, run_job, save

require_linked_torch()

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

HERE = pathlib.Path(__file__).parent
RANK = testing.BUILD_DIR / "tests" / "lockstep_pipeline_rank"
WIDTHS = [12, 16, 16, 16, 16, 16, 16, 5]
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble")


def write_input(path, widths=WIDTHS, steps=3, batch=16):
    torch.manual_seed(3)
    tensors = {"x": torch.randn(steps, batch, widths[0]), "y": torch.randint(widths[-1], (steps, batch))}
    for i, (inputs, outputs) in enumerate(zip(widths, widths[1:])):
        linear = torch.nn.Linear(inputs, outputs)
        tensors |= {f"{i}.weight": linear.weight, f"{i}.bias": linear.bias}
    save(tensors, path)


def config_of(folder, schedule, stages, **extra):
    """Equal stages, by name of their first layers."""
    layers = len(WIDTHS) - 1
    starts = [round(i * layers / stages) for i in range(stages)]
    return {"schedule": schedule, "widths": WIDTHS, "starts": starts, "plan": [str(i) for i in starts[1:]],
            "micro_batches": 4, "optimizer": "sgd", "lr": 0.1, "input": str(folder / "input.safetensors"), **extra}


def results(folder, name, i, ranks, python):
    state = {}
    for rank in range(ranks) if python else [None]:
        state |= load_file(str(folder / f"{name}.{i}") + (f".{rank}" if python else ""))
    return state | load_file(f"{folder / name}.{i}.losses")


class Parity(unittest.TestCase):
    def compare(self, ranks):
        with testing.temporary_folder() as folder:
            write_input(folder / "input.safetensors")
            runs = [config_of(folder, schedule, ranks * (2 if schedule.startswith("inter") else 1))
                    for schedule in SCHEDULES]
            run_job([*torch_forks.python("torch.distributed.pipelining"), HERE / "pipeline_worker.py"], ranks, folder, "python",
                    runs, backend="gloo")
            for backend in ("shm", "gloo"):
                run_job([RANK], ranks, folder, backend, runs, backend=backend)
                for i, run in enumerate(runs):
                    with self.subTest(schedule=run["schedule"], backend=backend):
                        self.assertEqual(differences(results(folder, backend, i, ranks, False),
                                                     results(folder, "python", i, ranks, True)), [])

    def test_two_ranks(self):
        self.compare(2)

    def test_three_ranks(self):
        self.compare(3)


class Death(unittest.TestCase):
    def test_a_rank_killed_in_the_middle_is_named(self):
        with testing.temporary_folder() as folder:
            write_input(folder / "input.safetensors", steps=6)
            for schedule in SCHEDULES:
                run = config_of(folder, schedule, 4 if schedule.startswith("inter") else 2, dies_after=1)
                with self.subTest(schedule=schedule), self.assertRaises(AssertionError):
                    run_job([RANK], 2, folder, f"death-{schedule}", [run], backend="shm")
                self.assertRegex((folder / "log.0").read_text(), r"rank 1\b.*(ended|lost|gone|died|killed)")


if __name__ == "__main__":
    testing.main()
