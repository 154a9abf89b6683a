"""What the parity tests share: calls of lockstep_parity, and comparisons to the bit."""

import json
import pathlib
import subprocess
import sys

import lockstep_testing as testing

HERE = pathlib.Path(__file__).parent
PARITY = testing.BUILD_DIR / "tests" / "lockstep_parity"


def require_linked_torch():
    """Skips the whole script where Python's torch is not the LibTorch that is linked."""
    if not testing.torch_is_the_linked_one():
        print("skipped: Python's torch is not the LibTorch that Lockstep links")
        sys.exit(77)
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        print("skipped: Python's safetensors is not installed")
        sys.exit(77)
    import torch

    torch.set_num_threads(1)


def parity(folder, **config):
    """Runs lockstep_parity and returns the tensors it wrote."""
    from safetensors.torch import load_file

    config["output"] = str(folder / "cpp.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    testing.run(PARITY, path)
    return load_file(config["output"])


def save(tensors, path):
    from safetensors.torch import save_file

    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, str(path))


def as_bytes(tensor):
    import torch

    return tensor.detach().contiguous().flatten().view(torch.uint8)


def differences(ours, theirs):
    """Names of tensors that are missing on a side or whose bits differ, with how many elements do."""
    import torch

    found = []
    for name in sorted(set(ours) | set(theirs)):
        if name not in ours or name not in theirs:
            found.append(f"{name}: only in {'C++' if name in ours else 'Python'}")
            continue
        a, b = ours[name], theirs[name].detach()
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{name}: {a.dtype} {list(a.shape)} in C++, {b.dtype} {list(b.shape)} in Python")
        elif not torch.equal(as_bytes(a), as_bytes(b)):
            found.append(f"{name}: {int((a != b).sum())} of {a.numel()} elements differ, by up to "
                         f"{float((a.double() - b.double()).abs().max()):.3g}")
    return found


def run_ranks(command, ranks, folder, timeout=150):
    """Starts the ranks of a job, which meet in a file."""
    processes = []
    try:
        for rank in range(ranks):
            env = testing.clean_environment(PYTHONPATH=f"{HERE}:{HERE.parent / 'lib'}", GLOO_SOCKET_IFNAME="lo")
            log = open(folder / f"log.{rank}", "w+")
            processes.append((subprocess.Popen([str(c) for c in (*command, rank, ranks)], env=env, stdout=log,
                                               stderr=log), log))
        if any([process.wait(timeout) for process, _ in processes]):
            said = []
            for rank, (process, log) in enumerate(processes):
                log.seek(0)
                said.append(f"rank {rank} exited with {process.returncode}:\n{log.read()}")
            raise AssertionError(f"{command}\n" + "\n".join(said))
    finally:
        for process, log in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
            log.close()


def run_job(command, ranks, folder, side, runs, **job):
    """Each rank gets all `runs` in a file. What it writes for one of them begins with FOLDER/SIDE.NUMBER."""
    path = folder / f"{side}.json"
    runs = [{**run, "output": str(folder / f"{side}.{number}")} for number, run in enumerate(runs)]
    path.write_text(json.dumps({"runs": runs, "meet": str(folder / f"meet.{side}"), **job}))
    run_ranks([*command, path], ranks, folder)


__all__ = ["PARITY", "require_linked_torch", "parity", "run_job", "run_ranks", "save", "differences"]
