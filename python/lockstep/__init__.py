"""Shared memory as a backend of torch.distributed::

    import torch.distributed as dist

    dist.init_process_group("lockstep")  # in place of "gloo"

It joins CPU tensors: through shared memory on one host, and by a hierarchy of hosts on several. Beside CUDA
tensors it is named with their backend: ``init_process_group("cpu:lockstep,cuda:nccl")``.

``import lockstep`` makes the backend known. Where the wheel is installed ``import torch`` does so, too. The
errors are those of torch.distributed: DistNetworkError for a time-out, DistBackendError for a lost rank or calls
that differ, ValueError for wrong arguments. docs/python.md has more.
"""

import os

from lockstep._build import TORCH_VERSION, VERSION as __version__
from lockstep._version_check import check as _check

_check()

import torch as _torch  # noqa: E402
from lockstep import _groups  # noqa: E402
from lockstep._groups import BackendInfo, backend_info, monitored_barrier  # noqa: E402
from lockstep_autoload import register as _register  # noqa: E402

_register()

cmake_prefix_path = ";".join(os.path.dirname(os.path.abspath(module.__file__)) for module in (_groups, _torch))
"""For CMake's find_package(Lockstep): the folders of this package and of its LibTorch."""

__all__ = ["BackendInfo", "TORCH_VERSION", "backend_info", "cmake_prefix_path", "monitored_barrier"]
