"""The extension: what makes the backends of process groups."""

from datetime import timedelta

from torch._C._distributed_c10d import Backend, Store

class Made:
    """A group's backend."""

    @property
    def backend(self) -> Backend: ...
    @property
    def name(self) -> str: ...
    @property
    def reason(self) -> str: ...

def make_backend(
    store: Store, rank: int, size: int, timeout: timedelta, group_name: str, global_ranks: list[int]
) -> Made:
    """Forms a group. All its ranks call it, and it returns when all have come."""
