"""What the tests of consumers share: projects that use Lockstep as a user does."""

import pathlib
import tempfile

import lockstep_testing as t

HERE = pathlib.Path(__file__).parent


def consumer_environment():
    """The test's own environment decides which LibTorch is found: the one that we link."""
    return t.clean_environment(LOCKSTEP_TORCH=t.LIBTORCH)


def temporary():
    return tempfile.TemporaryDirectory(prefix="lockstep-install.")
