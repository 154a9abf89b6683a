"""ZeRO and Join give Python's losses, weights and optimizer state, to the last bit where the sums are the same."""

import pathlib
import unittest

import lockstep_testing as testing
import torch_forks
from parity_testing import differences, require_linked_torch, run_job, save

require_linked_torch()

import torch  # noqa: E402
from test_ddp_parity import data  # noqa: E402

HERE = pathlib.Path(__file__).parent
PARITY = testing.BUILD_DIR / "tests" / "lockstep_zero_parity"
MLP = {"model": "mlp", "optimizer": "adam", "lr": 0.003, "steps": 6, "batch": 16}
SGD = {**MLP, "optimizer": "sgd", "lr": 0.05, "momentum": 0.9}

# By the number of ranks. Python runs what differs in "way" in the one way that it has.
RUNS = {
    1: {"zero1": {**MLP, "way": "zero1"}, "optimizer": {**MLP, "way": "optimizer"}},
    2: {
        "zero1": {**MLP, "way": "zero1"},
        "zero1, convnet": {**MLP, "way": "zero1", "model": "convnet", "steps": 3},
        "zero1, accumulation": {**MLP, "way": "zero1", "accumulate": 3},
        "zero1, clipping": {**MLP, "way": "zero1", "max_norm": 0.1},
        "zero1, sgd": {**SGD, "way": "zero1"},
        "zero2": {**MLP, "way": "zero2"},
        "zero2, adamw": {**MLP, "way": "zero2", "optimizer": "adamw", "weight_decay": 0.1},
        "zero2, accumulation": {**MLP, "way": "zero2", "accumulate": 2},
        "optimizer": {**MLP, "way": "optimizer"},
        "overlap": {**MLP, "way": "overlap"},
        "join": {**SGD, "way": "join", "inputs": [3, 6], "divide_by_all": True},
        "join, divided by those that are left": {**SGD, "way": "join", "inputs": [6, 2], "divide_by_all": False},
    },
    3: {
        "zero1": {**MLP, "way": "zero1"},
        "optimizer": {**MLP, "way": "optimizer"},
        "join": {**SGD, "way": "join", "inputs": [2, 4, 0], "divide_by_all": False},
    },
    4: {"zero1": {**MLP, "way": "zero1"}},
}
# What is added up in the same order over shared memory: one and two ranks, whatever the backend.
SAME_SUMS = (1, 2)


class ZeroParity(unittest.TestCase):
    def compare(self, ranks):
        from safetensors.torch import load_file

        runs = RUNS[ranks]
        with testing.temporary_folder() as folder:
            configs = []
            for number, config in enumerate(runs.values()):
                config = {"seed": 5, "input": str(folder / f"in.{number}"), **config}
                save(data(config["model"], config["steps"], ranks, config["batch"]), config["input"])
                configs.append(config)
            sides = {"gloo": [PARITY], "python": [*torch_forks.python("torch.distributed.optim"), HERE / "zero_parity_worker.py"]}
            if ranks in SAME_SUMS:
                sides["shm"] = [PARITY]
            for side, command in sides.items():
                run_job(command, ranks, folder, side, configs, backend=side)
            for number, (name, config) in enumerate(runs.items()):
                for rank in range(ranks):
                    theirs = self.comparable(load_file(folder / f"python.{number}.{rank}"))
                    for side in set(sides) - {"python"}:
                        with self.subTest(run=name, rank=rank, backend=side):
                            ours = self.comparable(load_file(folder / f"{side}.{number}.{rank}"))
                            if config["way"] == "join":
                                ours = {key: value for key, value in ours.items() if not key.startswith("s.")}
                            self.assertEqual(differences(ours, theirs), [])
                            losses = ours["losses"]
                            self.assertTrue(bool(torch.isfinite(losses).all()))
                            if len(losses) > 1:
                                self.assertNotEqual(float(losses[0]), float(losses[-1]), "nothing was trained")

    @staticmethod
    def comparable(tensors):
        """Counts are numbers of one element here and of none in Python, of another dtype."""
        return {name: tensor.reshape(1).to(torch.int64) if name.startswith("s.step.") else tensor
                for name, tensor in tensors.items()}

    def test_one_rank(self):
        self.compare(1)

    def test_two_ranks(self):
        self.compare(2)

    def test_three_ranks(self):
        self.compare(3)

    def test_four_ranks(self):
        self.compare(4)


if __name__ == "__main__":
    testing.main()
