"""The twin of `lockstep bench rpc`."""

import collections
import os
import time

os.environ.setdefault("TP_SOCKET_IFNAME", "lo")

import common  # noqa: E402
import torch  # noqa: E402
import torch.distributed.autograd as dist_autograd  # noqa: E402
import torch.distributed.rpc as rpc  # noqa: E402

WIDTH, IN_FLIGHT, BATCH, ECHO_WARMUP = 1024, 64, 16, 64
WEIGHTS = torch.ones(WIDTH, WIDTH)
WAITING = []  # [state, future]


def add(a, b):
    return a + b


def echo(a):
    return a


def unbatched(state):
    return state.matmul(WEIGHTS)


@rpc.functions.async_execution
def batched(state):
    future = torch.futures.Future()
    WAITING.append((state, future))
    if len(WAITING) >= BATCH:
        full, WAITING[:] = WAITING[:], []
        for row, (_, waiting) in zip(torch.stack([s for s, _ in full]).matmul(WEIGHTS).unbind(), full):
            waiting.set_result(row)
    return future


def throughput(function, calls):
    calls = -(-calls // BATCH) * BATCH  # Batches come out even: nothing here ends one that is not full.
    state, under_way = torch.ones(WIDTH), collections.deque()
    start = time.perf_counter()
    for _ in range(calls):
        if len(under_way) == IN_FLIGHT:
            under_way.popleft().wait()
        under_way.append(rpc.rpc_async("server", function, (state,)))
    for future in under_way:
        future.wait()
    return (time.perf_counter() - start) * 1e6 / calls


def in_context(leaf, one):
    with dist_autograd.context():
        rpc.rpc_sync("server", add, (leaf, one))


def measure(row, config):
    steps, one = row["steps"], torch.ones(1)
    if row["call"] in ("own", "fast", "tcp"):
        return common.median_us(lambda: rpc.rpc_sync("server", add, (one, one)), config["warmup"], steps)
    if row["call"] == "autograd":
        leaf = torch.ones(1, requires_grad=True)
        return common.median_us(lambda: in_context(leaf, one), config["warmup"], steps)
    if row["call"] == "echo":
        tensor = torch.ones(row["bytes"] // 4)
        return common.median_us(lambda: rpc.rpc_sync("server", echo, (tensor,)), ECHO_WARMUP, steps)
    return throughput(unbatched if row["call"] == "unbatched" else batched, steps)


def main():
    config = common.config()
    rank = int(os.environ["RANK"])
    options = rpc.TensorPipeRpcBackendOptions(init_method=config["init_method"])
    rpc.init_rpc("client" if rank == 0 else "server", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        common.write_result(config, {"rows": [{"p50_us": measure(row, config)} for row in config["rows"]]})
    rpc.shutdown()


if __name__ == "__main__":
    main()
