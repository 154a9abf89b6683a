"""Autocast, the gradient scaler and the precisions against torch.amp, to the last bit, over Gloo. An infinity on one
rank alone is compared with ShardedGradScaler, whose ranks all skip."""

import unittest

import lockstep_testing as testing
import torch_forks
from parity_testing import HERE, differences, require_linked_torch, run_job, save

require_linked_torch()

import torch  # noqa: E402

AMP_PARITY = testing.BUILD_DIR / "tests" / "lockstep_amp_parity"
STEPS = 12
INF, NAN = float("inf"), float("nan")
# step: what one element of the gradient is then.
OVERFLOWS = {2: INF, 3: NAN, 7: -INF}


def gradients(ranks, bad_rank=0, overflows=OVERFLOWS, shape=(23,)):
    """Of each rank and step. Scaled ones reach from what float32 keeps only with a scale to what it cannot."""
    torch.manual_seed(3)
    tensors = {"p": torch.randn(shape)}
    for rank in range(ranks):
        for step in range(STEPS):
            gradient = torch.randn(shape) * 10.0 ** torch.randint(-6, 2, shape)
            if rank == bad_rank and step in overflows:
                gradient[5] = overflows[step]
            tensors[f"g.{rank}.{step}"] = gradient
    return tensors


SCALER = {"mode": "scaler", "optimizer": "sgd", "lr": 0.1, "steps": STEPS, "scaler": {"growth_interval": 3}}
ODD = {"init_scale": 1234.5, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 2}
TRAIN = {"mode": "train", "model": "mlp", "seed": 5, "lr": 0.05, "train_steps": 6, "batch": 16}
CONVNET = {**TRAIN, "model": "convnet", "train_steps": 3, "batch": 6}
RUNS = {
    1: {
        "scaler": SCALER,
        "scales that are no powers of two": {**SCALER, "scaler": ODD},
        "a fused optimizer, and odd scales": {**SCALER, "optimizer": "adam", "scaler": ODD},
        "clipping": {**SCALER, "max_norm": 0.7},
        "clipping, fused": {**SCALER, "max_norm": 0.7, "optimizer": "adam", "scaler": ODD},
        "a scale of the user's own": {**SCALER, "new_scale": 333.0},
        "not enabled": {**SCALER, "scaler": {"enabled": False}, "overflows": {}},
        "state taken over": {**SCALER, "reload": True},
        "the scale itself overflows": {**SCALER, "scaler": {"init_scale": 1e38, "growth_interval": 1}},
        "mlp in bf16-mixed": {**TRAIN, "precision": "bf16-mixed"},
        "mlp in 16-mixed, clipped": {**TRAIN, "precision": "16-mixed", "max_norm": 0.5},
        "mlp in 16-mixed, a loss that overflows": {**TRAIN, "precision": "16-mixed", "lr": 0.2, "scale_x": 50},
        "mlp in bf16-true": {**TRAIN, "precision": "bf16-true"},
        "mlp in 16-true": {**TRAIN, "precision": "16-true"},
        "mlp in O2": {**TRAIN, "precision": "16-mixed", "level": "O2"},
        "convnet in bf16-mixed": {**CONVNET, "precision": "bf16-mixed"},
        "convnet in O1": {**CONVNET, "precision": "16-mixed", "level": "O1"},
        "convnet in O2": {**CONVNET, "precision": "16-mixed", "level": "O2"},
    },
    2: {
        "sharded": {**SCALER, "sharded": True, "bad_rank": 1},
        "sharded, clipped": {**SCALER, "sharded": True, "bad_rank": 0, "max_norm": 0.7},
        "mlp in bf16-mixed": {**TRAIN, "precision": "bf16-mixed"},
        "mlp in 16-mixed, accumulated, clipped": {**TRAIN, "precision": "16-mixed", "accumulate": 2, "max_norm": 0.5},
        "mlp in 16-mixed, overflow on one rank": {**TRAIN, "precision": "16-mixed", "bad_x": 1},
        "mlp in O2": {**TRAIN, "precision": "16-mixed", "level": "O2"},
        "mlp in bf16-mixed, activations computed again": {**TRAIN, "precision": "bf16-mixed", "checkpointed": True},
        "convnet in bf16-true": {**CONVNET, "precision": "bf16-true"},
        "convnet in 16-mixed": {**CONVNET, "precision": "16-mixed"},
    },
    4: {
        "sharded": {**SCALER, "sharded": True, "bad_rank": 2},
        # On the CPU ShardedGradScaler multiplies its scale in float32, torch.amp's kernel in float64: with powers of
        # two these are the same.
        "sharded, other factors": {**SCALER, "sharded": True, "bad_rank": 3,
                                   "scaler": {"growth_factor": 8.0, "backoff_factor": 0.25, "growth_interval": 2}},
    },
}


def batches(config, ranks):
    torch.manual_seed(7)
    steps = config["train_steps"]
    shape = (784,) if config["model"] == "mlp" else (1, 28, 28)
    x = torch.randn(steps, ranks, config["batch"], *shape) * config.get("scale_x", 1)
    if "bad_x" in config:  # float16 ends at 65504, and so do the products with this sample.
        x[2, config["bad_x"], 0] = 60000.0
    return {"x": x, "y": torch.randint(10, (steps, ranks, config["batch"]))}


class AmpParity(unittest.TestCase):
    def results(self, ranks, folder):
        """For each run and rank: C++'s tensors and Python's."""
        from safetensors.torch import load_file

        configs = []
        for number, config in enumerate(RUNS[ranks].values()):
            config = {**config, "input": str(folder / f"in.{number}")}
            if config["mode"] == "scaler":
                made = gradients(ranks, config.get("bad_rank", 0), config.get("overflows", OVERFLOWS))
            else:
                made = batches(config, ranks)
            save(made, config["input"])
            configs.append(config)
        python = torch_forks.python("torch.distributed.fsdp.sharded_grad_scaler")
        for side, command in (("cpp", [AMP_PARITY]), ("python", [*python, HERE / "amp_parity_worker.py"])):
            run_job(command, ranks, folder, side, configs)
        for number, name in enumerate(RUNS[ranks]):
            for rank in range(ranks):
                yield (name, rank, load_file(folder / f"cpp.{number}.{rank}"),
                       load_file(folder / f"python.{number}.{rank}"))

    def compare(self, ranks):
        with testing.temporary_folder() as folder:
            for name, rank, ours, theirs in self.results(ranks, folder):
                with self.subTest(run=name, rank=rank):
                    self.assertEqual(differences(ours, theirs), [])
                    self.check_that_it_did_something(name, RUNS[ranks][name], ours)

    def check_that_it_did_something(self, name, config, ours):
        if config["mode"] == "scaler":
            skipped = [torch.equal(ours[f"p.{i}"], ours[f"p.{i - 1}"]) for i in range(1, STEPS)]
            overflows = config.get("overflows", OVERFLOWS)
            if "itself" not in name:
                self.assertEqual([i + 1 for i, same in enumerate(skipped) if same], list(overflows))
            return
        losses = [ours[key] for key in ours if key.startswith("loss.")]
        self.assertEqual(len(losses), config["train_steps"])
        self.assertNotEqual(float(ours["loss.0"]), float(ours[f"loss.{len(losses) - 1}"]), "nothing was trained")
        if "overflow" in name:
            self.assertLess(min(float(ours[key]) for key in ours if key.startswith("scale.")), 65536)

    def test_one_rank(self):
        self.compare(1)

    def test_two_ranks(self):
        self.compare(2)

    def test_four_ranks(self):
        self.compare(4)


if __name__ == "__main__":
    testing.main()
