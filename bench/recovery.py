"""The twin of `lockstep bench recovery`'s worker, under torchrun: DDP over gloo, which saves every so many steps and goes
on from there after a restart. Into the folder's file `steps-PID` each process writes a line for each finished step: the
attempt, the step (-1: a failure was noticed), its samples on all ranks, and the time in nanoseconds. `weights` has the
hash of the weights after each epoch."""

import hashlib
import os
import pathlib
import time

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Rest(torch.utils.data.Sampler):
    """What is left of a sampler's samples after some."""

    def __init__(self, sampler, done):
        self.sampler, self.done = sampler, done

    def __iter__(self):
        return iter(list(self.sampler)[self.done:])


def train(config, log):
    folder, saved = pathlib.Path(config["folder"]), pathlib.Path(config["folder"], "saved.pt")
    rank, ranks, batch = dist.get_rank(), dist.get_world_size(), 64
    torch.manual_seed(0)
    module = common.MODELS["mlp"][0]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    state = torch.load(saved) if saved.exists() else {"step": 0, "epoch": 0, "batches": 0}
    if "model" in state:
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    model = DistributedDataParallel(module)
    dataset = common.Mnist(config["data"], "train")
    sampler = DistributedSampler(dataset, ranks, rank, seed=0)
    step = state["step"]
    for epoch in range(state["epoch"], config["epochs"]):
        sampler.set_epoch(epoch)
        done = state["batches"] if epoch == state["epoch"] else 0
        for at, (x, y) in enumerate(DataLoader(dataset, batch, sampler=Rest(sampler, done * batch)), done + 1):
            step += 1
            optimizer.zero_grad()
            F.cross_entropy(model(x.flatten(1)), y).backward()
            optimizer.step()
            log(step, len(y) * ranks)
            if rank == 0 and step % config["save_every"] == 0:
                torch.save({"step": step, "epoch": epoch, "batches": at, "model": module.state_dict(),
                            "optimizer": optimizer.state_dict()}, folder / "saved.new")
                os.replace(folder / "saved.new", saved)
        if rank == 0:
            weights = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
            with open(folder / "weights", "a") as file:
                file.write(f"{epoch} {hashlib.sha256(weights).hexdigest()}\n")


def main():
    config = common.config()
    steps = open(pathlib.Path(config["folder"], f"steps-{os.getpid()}"), "a", buffering=1)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def log(step, samples=0):
        steps.write(f"{attempt} {step} {samples} {time.monotonic_ns()}\n")

    dist.init_process_group("gloo")
    try:
        train(config, log)
    except RuntimeError:
        log(-1)
        raise
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
