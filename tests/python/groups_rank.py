"""A rank of test_groups.py: RANK SIZE MEET CHECK runs one of the functions below."""

import gc
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import lockstep

rank, size, meet, check = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]


def init(backend="lockstep", meet=meet, **options):
    dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=size,
                            **{"timeout": timedelta(seconds=60), **options})


def error_of(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("no error")


def raises(kind, *words, call):
    error = error_of(call)
    assert type(error) is kind, (type(error), error)
    for word in words:
        assert word in str(error), (word, str(error))


def summed(group=None, value=None):
    total = torch.tensor([float(rank + 1 if value is None else value)])
    dist.all_reduce(total, group=group)
    return total.item()


def groups():
    """Sub-groups; destroyed and made again in the same store; groups by device."""
    store = dist.FileStore(meet, size)
    for times in range(3):
        dist.init_process_group("lockstep", store=dist.PrefixStore("job", store), rank=rank, world_size=size,
                                timeout=timedelta(seconds=60))
        assert summed() == 6
        assert lockstep.backend_info().name == "shm"
        pair = dist.new_group([0, 2])
        assert (pair is dist.GroupMember.NON_GROUP_MEMBER) == (rank == 1)
        if rank != 1:
            assert summed(pair) == 4
            assert lockstep.backend_info(pair) == ("shm", "all 2 ranks share one host")
            lockstep.monitored_barrier(pair)
        alone, _ = dist.new_subgroups(group_size=1)
        assert lockstep.backend_info(alone).reason == "the group has one rank"
        assert summed(alone) == rank + 1
        if times == 2:  # Gloo itself cannot be made again in the same store
            other = dist.new_group(backend="gloo")
            assert summed(other) == 6
            raises(ValueError, "cpu:gloo", "lockstep", call=lambda: lockstep.backend_info(other))
        dist.destroy_process_group()
    raises(ValueError, "has not been initialized", call=lockstep.backend_info)


def by_device():
    """The form that names backends by device. Here are no GPUs: meta stands for another device."""
    config = dist.distributed_c10d.BackendConfig("cpu:lockstep,cuda:nccl")
    assert config.get_device_backend_map() == {"cpu": "lockstep", "cuda": "nccl"}
    init("cpu:lockstep")
    assert summed() == 6
    assert lockstep.backend_info().name == "shm"
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    dist.destroy_process_group()


def errors():
    """Each of Lockstep's errors is of a class of torch.distributed, and says what Lockstep says."""
    raises(ValueError, "rank=5 is out of range",
           call=lambda: dist.init_process_group("lockstep", store=dist.HashStore(), rank=5, world_size=2))
    for limit in (timedelta(seconds=-5), timedelta(0), timedelta(days=120_000), timedelta.max):
        raises(ValueError, "more than 0",
               call=lambda limit=limit: dist.init_process_group("lockstep", store=dist.HashStore(), rank=0, world_size=2,
                                                                timeout=limit))
    init(timeout=timedelta(seconds=30))
    raises(ValueError, "all_gather", "expected",
           call=lambda: dist.distributed_c10d._get_default_group().allgather([[torch.ones(1)]], [torch.ones(1)]))
    # Ranks that call different things.
    raises(dist.DistBackendError, "rank 0", "all_reduce",
           call=lambda: dist.all_reduce(torch.ones(2 if rank == 0 else 3)))
    work = dist.all_reduce(torch.ones(2 if rank == 0 else 3), async_op=True)
    raises(dist.DistBackendError, "rank 0", call=work.wait)
    work = dist.all_reduce(torch.ones(2 if rank == 0 else 3), async_op=True)
    future = work.get_future()
    raises(dist.DistBackendError, "rank 0", call=future.wait)
    # The group can be used afterwards.
    assert summed() == 6
    raises(ValueError, "pg_options", call=lambda: dist.new_group(pg_options=dist.ProcessGroup.BackendType))
    # A rank that comes too late is named, in the class of time-outs.
    short = dist.new_group(timeout=timedelta(seconds=1))
    if rank != 2:
        raises(dist.DistNetworkError, "rank 2", "did not come", "timeout",
               call=lambda: lockstep.monitored_barrier(short))
    raises(ValueError, "more than 0", call=lambda: lockstep.monitored_barrier(timeout=timedelta(0)))
    raises(ValueError, "finite", call=lambda: lockstep.monitored_barrier(timeout=float("inf")))
    assert isinstance(dist.DistNetworkError(), RuntimeError)
    dist.barrier()
    dist.destroy_process_group()


def callbacks():
    """Alternately one rank is late, and the call is left to the queue's thread."""
    init()
    for turn in range(20):
        if turn % size == rank:
            dist.recv(torch.zeros(1), 1 - rank)
        work = dist.all_reduce(torch.ones(10), async_op=True)
        if turn % size != rank:
            dist.send(torch.zeros(1), 1 - rank)
        inner = torch.ones(1)
        after = work.get_future().then(lambda _, inner=inner: dist.all_reduce(inner, async_op=True).wait())
        after.wait()
        assert inner.item() == size, inner


def trained_by_powersgd(backend, meet):
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    init(backend, meet)
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(5)))
    data = torch.randn(5, size, 32, 64)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5), powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        ddp(data[step, rank]).square().mean().backward()
        optimizer.step()
    # A group whose last owner is DDP's reducer ends under Python's lock, for which its threads may wait: with Gloo, too.
    del ddp
    gc.collect()
    dist.destroy_process_group()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def powersgd():
    ours = trained_by_powersgd("lockstep", meet)
    gloo = trained_by_powersgd("gloo", meet + ".gloo")
    assert torch.equal(ours, gloo), (ours - gloo).abs().max()


def lost_rank():
    """A rank that dies in a step of DDP is named, from backward too."""
    init(timeout=timedelta(seconds=60))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    loss = model(torch.ones(1, 3)).sum()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    raises(dist.DistBackendError, "rank 1", "has ended", call=loss.backward)
    assert time.monotonic() - begin < 30, "that was the time-out"
    os._exit(0)


globals()[check]()
os._exit(0)  # Python's torch aborts once in some hundred runs while the interpreter goes down
