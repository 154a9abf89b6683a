"""One Python rank that does what comm_rank.cpp does: comm_peer.py MODE."""

import datetime
import json
import os
import sys

import torch
import torch.distributed as dist


def numbers(value):
    if isinstance(value, list):
        return [numbers(v) for v in value]
    return value.to(torch.float64).flatten().tolist()


def make_input(rank, size, dtype=torch.float32):
    return ((torch.arange(size, dtype=torch.float64) * 0.37 + rank * 1.1).sin() * 3).to(dtype)


def run_ops():
    rank, size = dist.get_rank(), dist.get_world_size()
    results = {}
    for name in ("sum", "avg", "max", "product"):
        t = make_input(rank, 1001)
        dist.all_reduce(t, op=getattr(dist.ReduceOp, name.upper()))
        results["all_reduce_" + name] = numbers(t)
    whole = make_input(rank, 17).mul(10).to(torch.int64)
    dist.all_reduce(whole)
    results["all_reduce_int64"] = numbers(whole)
    shared = make_input(rank, 9)
    dist.broadcast(shared, size - 1)
    results["broadcast"] = numbers(shared)
    root = make_input(rank, 9)
    dist.reduce(root, 0)
    if rank == 0:
        results["reduce"] = numbers(root)
    gathered = [torch.empty(5) for _ in range(size)]
    dist.all_gather(gathered, make_input(rank, 5))
    results["all_gather"] = numbers(gathered)
    flat = torch.empty(5 * size)
    dist.all_gather_into_tensor(flat, make_input(rank, 5))
    results["all_gather_into_tensor"] = numbers(flat)
    part = torch.empty(4)
    dist.scatter(part, [make_input(i + 10, 4) for i in range(size)] if rank == 0 else None, 0)
    results["scatter"] = numbers(part)
    collected = [torch.empty(4) for _ in range(size)] if rank == 0 else []
    dist.gather(make_input(rank, 4), collected or None, 0)
    results["gather"] = numbers(collected)
    piece = torch.empty(3)
    dist.reduce_scatter_tensor(piece, make_input(rank, 3 * size))
    results["reduce_scatter_tensor"] = numbers(piece)
    swapped = torch.empty(2 * size)
    dist.all_to_all_single(swapped, make_input(rank, 2 * size))
    results["all_to_all_single"] = numbers(swapped)
    taken = torch.empty(6)
    works = [dist.isend(make_input(rank, 6), (rank + 1) % size, tag=7), dist.irecv(taken, (rank - 1) % size, tag=7)]
    for work in works:
        work.wait()
    results["ring"] = numbers(taken)
    dist.barrier()
    return results


def run_groups():
    rank, size = dist.get_rank(), dist.get_world_size()
    first = dist.new_group([0])
    pair = dist.new_group([size - 1, 0])
    member = [g is not None and g != dist.GroupMember.NON_GROUP_MEMBER for g in (first, pair)]
    results = {"member": member}
    if member[1] and size > 1:
        t = make_input(rank, 11)
        dist.all_reduce(t, group=pair)
        results["pair"] = numbers(t)
    return results


def main():
    torch.set_num_threads(1)
    seconds = float(os.environ.get("LOCKSTEP_TIMEOUT", "120"))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
    out = {"rank": dist.get_rank(), "size": dist.get_world_size(), "python": True}
    if sys.argv[1] == "init":
        one = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(one)
        out["sum"] = one.item()
    else:
        out["results"] = run_ops() if sys.argv[1] == "ops" else run_groups()
    print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main()
    # All is told. Python's torch aborts once in some hundred runs while the interpreter goes down.
    os._exit(0)
