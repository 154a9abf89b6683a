"""Shared memory as a backend of torch.distributed::

    import torch.distributed as dist

    dist.init_process_group("lockstep")  # in place of "gloo"

It joins CPU tensors: through shared memory on one host, and by a hierarchy of hosts on several. Beside CUDA
tensors it is named with their backend: ``init_process_group("cpu:lockstep,cuda:nccl")``.

``import lockstep`` makes the backend known. Where the wheel is installed ``import torch`` does so, too. The
errors are those of torch.distributed: DistNetworkError for a time-out, DistBackendError for a lost rank or calls
that differ, ValueError for wrong arguments. docs/python.md has more.
"""

from lockstep._build import TORCH_VERSION, VERSION as __version__
from lockstep._version_check import check as _check

_check()

from lockstep import _groups  # noqa: E402
from lockstep._groups import BackendInfo, backend_info, monitored_barrier  # noqa: E402
from lockstep_autoload import register as _register  # noqa: E402

_register()

__all__ = ["BackendInfo", "TORCH_VERSION", "backend_info", "monitored_barrier"]
