"""Makes the backends of process groups, and knows which one each group has got."""

import math
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from lockstep import _C


class BackendInfo(NamedTuple):
    """What carries the bytes of a group, and why that was chosen."""

    name: str
    """"shm", "hierarchical" or "gloo"."""
    reason: str
    """As "all 2 ranks share one host"."""


_infos: dict[str, BackendInfo] = {}


def _forget_ended():
    """The latest may be of groups that torch.distributed does not know yet."""
    known = set(dist.distributed_c10d._world.pg_names.values())
    for name in list(_infos)[:-64]:
        if name not in known:
            _infos.pop(name, None)


def make(options, backend_options=None):
    """What torch.distributed calls for each group with a rank of this process."""
    if backend_options is not None:
        raise ValueError('the backend "lockstep" takes no pg_options')
    made = _C.make_backend(options.store, options.group_rank, options.group_size, options.timeout,
                           options.group_id, list(options.global_ranks_in_group))
    _infos.pop(options.group_id, None)
    _infos[options.group_id] = BackendInfo(made.name, made.reason)
    _forget_ended()
    return made.backend


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group() if group is None else group


def backend_info(group: dist.ProcessGroup | None = None) -> BackendInfo:
    """Which of Lockstep's backends ``group`` (the default group) has, and why.

    Raises ValueError where its CPU tensors are not joined by "lockstep".
    """
    group = _group(group)
    backends = dist.distributed_c10d._world.pg_backend_config.get(group, "")
    if "cpu:lockstep" not in backends:
        raise ValueError(f"the group's backends are {backends or 'unknown'}, and none of them is lockstep")
    return _infos[group.group_name]


def monitored_barrier(group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None,
                      wait_all_ranks: bool = False) -> None:
    """torch.distributed.monitored_barrier, which Python allows to Gloo only.

    Blocks until all ranks have come. Raises DistNetworkError naming those that did not within ``timeout`` (that
    of the group). Every wait of Lockstep names them, so ``wait_all_ranks`` changes nothing.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    group = _group(group)
    if isinstance(timeout, float) and not math.isfinite(timeout):
        raise ValueError(f"timeout={timeout}: expected a finite number of seconds")
    if isinstance(timeout, (int, float)):
        timeout = timedelta(seconds=timeout)
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(f"timeout={timeout}: expected more than 0")
    given = {} if timeout is None else {"timeout": timeout}
    group.monitored_barrier(wait_all_ranks=wait_all_ranks, **given)
