"""A rank of PyTorch's own tests of torch.distributed, over "lockstep": RANK SIZE.

Reads a test's name and a folder for its files from each line of standard input, and answers with a line of JSON. The tests come from the torch that
is installed. Each of them makes and destroys its own default group. PyTorch starts new processes for each test; here
they stay, as starting them takes ten times as long as the tests.
"""

import faulthandler
import importlib.util
import json
import os
import pathlib
import sys
import time
import traceback
import types
import unittest
from datetime import timedelta

RANK, SIZE = int(sys.argv[1]), int(sys.argv[2])
NAME = "torch.testing._internal.distributed.distributed_test"
# What the tests ask of Gloo or MPI by name is asked of "lockstep" as well.
ALSO_OURS = (
    ('BACKEND != "gloo"', 'BACKEND not in ("gloo", "lockstep")'),
    ('BACKEND != "mpi"', 'BACKEND not in ("mpi", "lockstep")'),
    ('BACKEND == "mpi" or BACKEND == "gloo"', 'BACKEND in ("mpi", "gloo", "lockstep")'),
    ('require_backend_is_available({"gloo"})', 'require_backend_is_available({"gloo", "lockstep"})'),
)
# Their barrier, through files, looks ten times a second.
FASTER = ("time.sleep(0.1)", "time.sleep(0.003)")


def load_suite():
    os.environ.update(BACKEND="lockstep", WORLD_SIZE=str(SIZE), INIT_METHOD="file://")
    import torch.distributed as dist
    from torch.testing._internal import common_distributed

    import lockstep

    dist.monitored_barrier = lockstep.monitored_barrier  # Python's refuses all but Gloo
    for feature in ("cuda", "ddp", "gpu", "plugin", "subgroup"):
        common_distributed.DistTestCases.backend_feature[feature].add("lockstep")
    source = pathlib.Path(importlib.util.find_spec(NAME).origin).read_text()
    for theirs, ours in ALSO_OURS:
        assert theirs in source, f"{NAME} has changed: it holds no {theirs}"
        source = source.replace(theirs, ours)
    source = source.replace(*FASTER, 1)
    suite = types.ModuleType(NAME)
    suite.__file__ = NAME
    sys.modules[NAME] = suite
    exec(compile(source, NAME, "exec"), suite.__dict__)
    for backends in (suite.PROFILING_SUPPORTED_BACKENDS, suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        backends.append("lockstep")
    # Read from now on by skip_if_small_worldsize alone, which lets MPI's tests run with less than 8 ranks.
    os.environ["BACKEND"] = "mpi"
    return suite


def run(suite, case, name, folder):
    """(outcome, text) of one test on this rank."""
    import torch.distributed as dist
    from torch.testing._internal import common_utils

    test = case(name)
    if getattr(getattr(case, name), "__unittest_skip__", False):
        return "skipped", getattr(case, name).__unittest_skip_why__
    test.rank = RANK
    test.file_name = f"{folder}/meet"
    suite.INIT_METHOD = f"file://{folder}/meet_again"
    os.environ["TEMP_DIR"] = folder
    suite.Barrier.barrier_id = 0
    skips = {skip.exit_code: skip.message for skip in suite.TEST_SKIPS.values()}
    outcome = "passed", ""
    try:
        dist.init_process_group("lockstep", init_method=f"file://{test.file_name}", rank=RANK, world_size=SIZE,
                                timeout=timedelta(seconds=suite.CUSTOM_PG_TIMEOUT.get(name, 60)))
        common_utils.set_rng_seed()
        getattr(test, name)()
        test._barrier()
    except unittest.SkipTest as skip:
        outcome = "skipped", str(skip)
    except SystemExit as end:
        outcome = ("skipped", skips[end.code]) if end.code in skips else ("failed", f"exit code {end.code}")
    except BaseException:
        return "failed", traceback.format_exc()
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:
        return "failed", traceback.format_exc()
    return outcome


def main():
    import torch

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what tests print
    suite = load_suite()

    class Case(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        pass

    suite.instantiate_parametrized_tests(Case)
    faulthandler.enable()
    answers.write(json.dumps(sorted(name for name in dir(Case) if name.startswith("test_"))) + "\n")
    for line in sys.stdin:
        faulthandler.dump_traceback_later(100)
        begin = time.monotonic()
        outcome, text = run(suite, Case, *line.split())
        faulthandler.cancel_dump_traceback_later()
        answers.write(json.dumps([outcome, text, round(time.monotonic() - begin, 3)]) + "\n")
    os._exit(0)  # Python's torch aborts once in some hundred runs while the interpreter goes down


main()
