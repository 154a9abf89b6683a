"""The twin of `lockstep bench allreduce`."""

import common
import torch
import torch.distributed as dist


def main():
    config = common.config()
    common.join(config)
    p50 = []
    for row in config["sizes"]:
        tensor = torch.zeros(row["bytes"] // 4)
        call = (lambda: dist.all_reduce(tensor)) if row["bytes"] else dist.barrier
        p50.append(common.median_us(call, config["warmup"], row["steps"]))
    common.finish(config, {"p50_us": p50})


main()
