"""FullyShardedDataParallel trains as Python's FSDP2 (fully_shard on each layer and the whole) does."""

import pathlib
import unittest

import lockstep_testing as testing
import torch_forks
from parity_testing import require_linked_torch, run_job, save

require_linked_torch()

import torch  # noqa: E402

HERE = pathlib.Path(__file__).parent
RANK = testing.BUILD_DIR / "tests" / "lockstep_fsdp_rank"

# Both divide gradients by the number of ranks, we before the sum, FSDP2 partly after it; for two ranks that is the
# same. Adam's kernel rounds the elements after a tensor's last full vector otherwise, and FSDP2 cuts tensors elsewhere
# than we do. So weights differ by units in the last place, which Adam's division by sqrt(v) lifts to parts of lr.
TOLERANCE = 2e-5
# The roundings of bfloat16 (8 bits) fall otherwise where a sum had another last bit.
HALF_TOLERANCE = 5e-3

RUNS = {
    "mlp": {"model": "mlp", "units": ["layers.*"]},
    "mlp, kept after forward": {"model": "mlp", "units": ["layers.*"], "reshard": False, "share_memory": False},
    "convnet": {"model": "convnet", "units": ["layer1", "layer2", "fc"], "steps": 3, "batch": 8},
    "clipped": {"model": "mlp", "units": ["layers.*"], "max_norm": 0.5},
    "bfloat16": {"model": "mlp", "units": ["layers.*"], "bfloat16": True},
}
SHAPES = {"mlp": (784,), "convnet": (1, 28, 28)}


def data(config, ranks, seed=7):
    torch.manual_seed(seed)
    shape = (config["steps"], ranks, config["batch"])
    return {"x": torch.randn(*shape, *SHAPES[config["model"]]), "y": torch.randint(10, shape)}


class FsdpParity(unittest.TestCase):
    def compare(self, ranks, backend, names):
        from safetensors.torch import load_file

        with testing.temporary_folder() as folder:
            configs = []
            for number, name in enumerate(names):
                config = {"seed": 5, "lr": 0.001, "steps": 6, "batch": 16, "input": str(folder / f"in.{number}"),
                          **RUNS[name]}
                save(data(config, ranks), config["input"])
                configs.append(config)
            for side, command in (("cpp", [RANK]), ("python", [*torch_forks.python("torch.distributed.fsdp"), HERE / "fsdp_worker.py"])):
                run_job(command, ranks, folder, side, configs, mode="train", backend=backend)
            for number, name in enumerate(names):
                tolerance = HALF_TOLERANCE if "bfloat16" in RUNS[name] else TOLERANCE
                for rank in range(ranks):
                    with self.subTest(run=name, rank=rank):
                        ours, theirs = (load_file(folder / f"{side}.{number}.{rank}") for side in ("cpp", "python"))
                        self.assertEqual(sorted(ours), sorted(theirs))
                        for tensor in ours:
                            away = float((ours[tensor].double() - theirs[tensor].double()).abs().max())
                            self.assertLessEqual(away, tolerance, tensor)
                        self.assertNotEqual(float(ours["losses"][0]), float(ours["losses"][-1]), "nothing was trained")

    def test_two_ranks_over_gloo(self):
        self.compare(2, "gloo", list(RUNS))

    def test_three_ranks_over_shared_memory(self):
        """Without the convnet: the gradient of a bias before batch norm is rounding alone, and Adam makes whole
        steps of it. Three ranks over shared memory add in another order than Python's over Gloo."""
        self.compare(3, "shm", ["mlp", "mlp, kept after forward", "clipped"])


if __name__ == "__main__":
    testing.main()
