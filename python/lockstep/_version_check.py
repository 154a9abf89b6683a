"""Refuses a torch whose C++ interface is another than the one that the extension was built with."""

from lockstep._build import TORCH_VERSION, VERSION


def _interface(version: str) -> list[str]:
    """The interface of C++ changes with the second number of a version."""
    return version.split("+")[0].split(".")[:2]


def check() -> None:
    """Raises ImportError, with both versions, when the two do not fit."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"lockstep {VERSION} needs torch {TORCH_VERSION}, and there is none") from error
    if _interface(torch.__version__) != _interface(TORCH_VERSION):
        raise ImportError(
            f"lockstep {VERSION} was built with torch {TORCH_VERSION}, but this is torch {torch.__version__}\n"
            "  hint: build it again beside this torch: pip install --force-reinstall --no-deps "
            "--no-build-isolation FOLDER_OF_LOCKSTEP")
