"""Times a step of the pipeline strategy and of Python's torch.distributed.pipelining in turns: 2 ranks, 4 micro-batches,
Adam. Not a test: `python3 tests/interop/pipeline_bench.py [MODEL...] [--schedule 1f1b] [--rounds 3] [--steps 100]`."""

import argparse
import json
import pathlib
import statistics
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1] / "support"))
import lockstep_testing as testing  # noqa: E402
import torch  # noqa: E402
from parity_testing import save  # noqa: E402
from parity_testing import run_ranks  # noqa: E402

HERE = pathlib.Path(__file__).parent
# Of each model: a batch, and the first layer of the second stage in the chain of both sides.
MODELS = {
    "mlp": (lambda: (torch.rand(1, 32, 784), torch.randint(10, (1, 32))), 2, "layers.2"),
    "wide": (lambda: (torch.rand(1, 32, 784), torch.randint(10, (1, 32))), 6, "layers.6"),
    "gpt": (lambda: (torch.randint(65, (1, 8, 128)), torch.randint(65, (1, 8, 128))), 4, "blocks.3"),
}


def measure(folder, name, command, config):
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"backend": "gloo" if "python" in name else "shm", "meet": str(folder / f"meet.{name}"),
                                "runs": [config]}))
    run_ranks([*command, path], 2, folder, timeout=600)
    return float((folder / "log.0").read_text().split()[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plan", default=None)
    parser.add_argument("--quantile", type=float, default=0.5, help="of the steps; 0.1 on a machine that is busy")
    options = parser.parse_args()
    for model in options.models:
        make, start, plan = MODELS[model]
        with testing.temporary_folder() as folder:
            x, y = make()
            save({"x": x, "y": y}, folder / "input.safetensors")
            config = {"model": model, "schedule": options.schedule, "micro_batches": 4, "optimizer": "adam",
                      "lr": 1e-3, "steps": options.steps, "quantile": options.quantile, "starts": [0, start], "plan": [options.plan or plan],
                      "input": str(folder / "input.safetensors")}
            pairs = []
            for i in range(options.rounds):
                ours = measure(folder, f"ours{i}", [testing.BUILD_DIR / "tests/lockstep_pipeline_rank"], config)
                python = measure(folder, f"python{i}", [sys.executable, HERE / "pipeline_worker.py"], config)
                pairs.append((ours, python))
                print(f"{model}: {ours:.0f} us, Python {python:.0f} us, ratio {ours / python:.3f}", flush=True)
            print(f"{model}: median ratio {statistics.median(a / b for a, b in pairs):.3f}", flush=True)


if __name__ == "__main__":
    main()
