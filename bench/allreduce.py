"""The twin of `lockstep bench allreduce`."""

import common
import torch
import torch.distributed as dist


def main():
    config = common.config()
    common.join(config)
    rows = []
    for row in config["sizes"]:
        tensor = torch.zeros(row["bytes"] // 4, device=common.device(config))
        call = (lambda: dist.all_reduce(tensor)) if row["bytes"] else dist.barrier
        rows.append({"p50_us": common.median_us(call, config["warmup"], row["steps"])})
    common.finish(config, {"rows": rows})


main()
