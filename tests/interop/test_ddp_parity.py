"""Losses and weights of DistributedDataParallel over Gloo equal Python's to the last bit."""

import pathlib
import unittest

import lockstep_testing as testing
import torch_forks
from parity_testing import PARITY, differences, require_linked_torch, run_job, save

require_linked_torch()

import torch  # noqa: E402

HERE = pathlib.Path(__file__).parent
SHAPES = {"mlp": (784,), "wide": (784,), "convnet": (1, 28, 28), "linear": (20,)}


def data(model, steps, ranks, batch, seed=7):
    torch.manual_seed(seed)
    x = torch.randn(steps, ranks, batch, *SHAPES[model])
    y = torch.randn(steps, ranks, batch, 1) if model == "linear" else torch.randint(10, (steps, ranks, batch))
    return {"x": x, "y": y}


# What is trained by how many ranks; each job is done by C++ and by Python and must end the same.
MLP = {"model": "mlp"}
WIDE = {"model": "wide", "steps": 6, "batch": 8}
CONVNET = {"model": "convnet", "steps": 4, "batch": 16}
RUNS = {
    1: {
        "mlp": MLP,
        "convnet": CONVNET,
        "linear": {"model": "linear"},
        "a hook that narrows on one rank": {**MLP, "hook": "fp16_compress"},
    },
    2: {
        "mlp": MLP,
        "convnet": CONVNET,
        "linear": {"model": "linear"},
        "gradients apart from buckets": {**MLP, "view": False},
        "views in Python": {**MLP, "python_view": True},
        "accumulation": {**MLP, "steps": 9, "accumulate": 3, "python_view": True},
        "accumulation, gradients apart": {**MLP, "steps": 6, "accumulate": 2, "view": False},
        "nesterov and decay": {**MLP, "options": {"lr": 0.05, "momentum": 0.9, "nesterov": True,
                                                  "weight_decay": 1e-3}},
        "plain sgd": {**MLP, "options": {"lr": 0.05}},
        "unused parameters are looked for": {**MLP, "find_unused_parameters": True},
        "static graph": {**CONVNET, "batch": 8, "static_graph": True},
        "all-reduce hook": {**MLP, "hook": "allreduce"},
        "fp16 hook": {**MLP, "hook": "fp16_compress"},
        "PowerSGD": {**MLP, "power_sgd": {"rank": 1, "start": 2}},
        "PowerSGD by QR, batched": {**WIDE, "power_sgd": {"rank": 4, "start": 3, "batch": True, "seed": 3}},
        "PowerSGD without memory": {**MLP, "bucket_cap_mb": 0.1, "power_sgd": {
            "rank": 2, "start": 1, "rate": 1, "feedback": False, "warm": False, "epsilon": 1e-8}},
        "parameters averaged every third step": {**MLP, "period": 3, "warmup": 2},
    },
    3: {
        "several buckets": {**MLP, "batch": 8, "bucket_cap_mb": 0.03},
        "convnet": {**CONVNET, "batch": 5},
        "PowerSGD": {**MLP, "power_sgd": {"rank": 2, "start": 2}},
    },
    4: {
        "post-local SGD": {**MLP, "batch": 8, "post_local_sgd": {"subgroup": 2, "start": 3}, "period": 2, "warmup": 3},
        "hierarchical averages": {**MLP, "batch": 8, "post_local_sgd": {"subgroup": 1, "start": 0},
                                  "hierarchy": [[2, 2], [4, 4]], "warmup": 1},
    },
}


class DdpParity(unittest.TestCase):
    def compare(self, ranks):
        from safetensors.torch import load_file

        runs = RUNS[ranks]
        with testing.temporary_folder() as folder:
            configs = []
            for number, config in enumerate(runs.values()):
                config = {"seed": 5, "options": {"lr": 0.05, "momentum": 0.9}, "steps": 8, "batch": 32, "view": True,
                          "python_view": False, "input": str(folder / f"in.{number}"), **config}
                save(data(config["model"], config["steps"], ranks, config["batch"]), config["input"])
                configs.append(config)
            for side, command in (("cpp", [PARITY]), ("python", [*torch_forks.python(), HERE / "ddp_parity_worker.py"])):
                run_job(command, ranks, folder, side, configs, mode="train")
            for number, name in enumerate(runs):
                for rank in range(ranks):
                    with self.subTest(run=name, rank=rank):
                        ours = load_file(folder / f"cpp.{number}.{rank}")
                        self.assertEqual(differences(ours, load_file(folder / f"python.{number}.{rank}")), [])
                        losses = ours["losses"]
                        self.assertEqual(len(losses), configs[number]["steps"])
                        self.assertTrue(bool(torch.isfinite(losses).all()))
                        self.assertNotEqual(float(losses[0]), float(losses[-1]), "nothing was trained")

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
