"""Groups of "lockstep": made, destroyed and made again; errors; what is built on them."""

import signal
import unittest

import wheel_testing as w

w.require_tools()


class Groups(unittest.TestCase):
    def check(self, name, ranks=3, **environment):
        w.run_ranks(ranks, w.HERE / "groups_rank.py", name, **environment)

    def test_groups_within_groups_again_and_again(self):
        self.check("groups")

    def test_backends_named_by_device(self):
        self.check("by_device")

    def test_errors_are_those_of_torch_distributed(self):
        self.check("errors")

    def test_callbacks_of_futures_may_wait_for_calls(self):
        self.check("callbacks", ranks=2)

    def test_powersgd_trains_as_over_gloo(self):
        self.check("powersgd", ranks=2)

    def test_a_lost_rank_is_named_in_backward(self):
        results = w.run_ranks(3, w.HERE / "groups_rank.py", "lost_rank", check=False)
        self.assertEqual([result.returncode for result in results], [0, -signal.SIGKILL, 0],
                         "\n".join(result.stderr for result in results))


if __name__ == "__main__":
    import lockstep_testing

    lockstep_testing.main()
