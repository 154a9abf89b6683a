"""The twin of `lockstep bench loader`: DataLoader with transforms a sample at a time."""

import itertools
import statistics
import time

import common
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main():
    config = common.config()
    dataset = common.Mnist(config["folder"], "train")
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
    loader = DataLoader(dataset, config["batch_size"], sampler=sampler)

    def samples_per_second(epoch, batches):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        samples = sum(len(y) for _, y in itertools.islice(loader, batches))
        return samples / (time.perf_counter() - start)

    samples_per_second(0, config["warmup"])
    rates = [samples_per_second(1 + i, config["batches"]) for i in range(config["epochs"])]
    common.write_result(config, {"samples_per_s": statistics.median(rates)})


main()
