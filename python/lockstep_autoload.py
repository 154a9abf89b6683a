"""What `import torch` calls where the wheel is installed.

It only makes the name "lockstep" known. Lockstep itself is imported with the first group, so that an
`import torch` in other programs costs nothing, and cannot fail by an extension of another torch.
"""


def register():
    import torch.distributed as dist

    if dist.is_available() and "LOCKSTEP" not in dist.Backend._plugins:
        dist.Backend.register_backend("lockstep", _make, extended_api=True, devices=["cpu"])


def _make(options, backend_options=None):
    from lockstep import _groups

    return _groups.make(options, backend_options)


def main():
    """The command `lockstep`: becomes the binary, with this Python and its torch unless others are named."""
    import importlib.util
    import os
    import sys

    torch = importlib.util.find_spec("torch")  # Does not import it.
    if torch and torch.origin:
        os.environ.setdefault("LOCKSTEP_TORCH", os.path.dirname(torch.origin))
    os.environ.setdefault("PYTHON_EXEC", sys.executable)
    binary = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lockstep", "bin", "lockstep")
    os.execv(binary, ["lockstep", *sys.argv[1:]])
