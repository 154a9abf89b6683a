"""`lockstep train --logical-shards V` ends with the same weights at any number of processes, to the last bit."""

import hashlib
import json
import unittest

import lockstep_testing as t

# 10,000 digits, of which each shard has its part.
SHORT = ("--dataset", "digits", "--limit-val-batches", 2, "--max-epochs", 1, "--log-every-n-steps", 2)
# Everything that draws random numbers or sums over samples.
ALL = ("--model", "fashion-cnn", "--augment", "--batch-size", 8, "--limit-train-batches", 6, "--gradient-clip-val", 0.1,
       "--accumulate-grad-batches", 2, "--optimizer", "adam")
MLP = ("--model", "mlp", "--batch-size", 16, "--limit-train-batches", 20)


def train(folder, shards, ranks, *flags, check=True):
    """The hash of the weights, the rows of metrics without times, and what it printed."""
    out, metrics = folder / "weights", folder / "metrics.jsonl"
    result = t.run(t.LOCKSTEP, "train", *SHORT, "--logical-shards", shards, "--devices", ranks, *flags, "--save-weights", out,
                   "--metrics-file", metrics, check=check)
    if result.returncode != 0:
        return result
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.unlink()
    numbers = [[(key, value) for key, value in row.items() if "loss" in key or "accuracy" in key] for row in rows]
    return hashlib.sha256(out.read_bytes()).hexdigest(), numbers, result


class SameBits(unittest.TestCase):
    def check(self, shards, sizes, *flags):
        with t.temporary_folder() as folder:
            digest, numbers, _ = train(folder, shards, 1, *flags)
            self.assertTrue(numbers)
            for backend, ranks in sizes:
                with self.subTest(backend=backend, ranks=ranks):
                    other, others, _ = train(folder, shards, ranks, "--backend", backend, *flags)
                    self.assertEqual(other, digest)
                    self.assertEqual(others, numbers)

    def test_mlp(self):
        self.check(4, [("shm", 2), ("shm", 4), ("gloo", 4)], *MLP)

    def test_all_that_is_random(self):
        self.check(4, [("shm", 2), ("shm", 3), ("gloo", 2), ("hierarchical", 3)], *ALL)

    def test_a_number_of_shards_that_is_no_power_of_two(self):
        self.check(3, [("shm", 2), ("shm", 3), ("gloo", 3)], *ALL)

    def test_a_last_smaller_batch(self):
        self.check(4, [("shm", 3)], "--model", "mlp", "--batch-size", 1600)

    def test_it_is_another_run_for_other_shards(self):
        with t.temporary_folder() as folder:
            self.assertNotEqual(train(folder, 4, 1, *MLP)[0], train(folder, 2, 1, *MLP, "--batch-size", 32)[0])

    def test_another_size_in_the_middle(self):
        """A checkpoint of 2 processes, within an epoch, goes on with 3 and with 1."""
        with t.temporary_folder() as folder:
            whole, _, _ = train(folder, 4, 2, *ALL, "--checkpoint-dir", folder / "run", "--checkpoint-every", 1,
                                "--keep-checkpoints", 0)
            for ranks in (3, 1):
                resumed, _, result = train(folder, 4, ranks, *ALL, "--resume", folder / "run/step-00000002")
                self.assertEqual(resumed, whole)
                self.assertNotIn("other settings", result.stderr)
            _, _, result = train(folder, 4, 1, *ALL, "--resume", folder / "run/step-00000002", "--threads", 2)
            self.assertRegex(result.stderr, "arithmetic.*2 threads")

    def test_the_global_batch_is_cut_into_shards(self):
        with t.temporary_folder() as folder:
            flags = ("--model", "mlp", "--limit-train-batches", 5)
            self.assertEqual(train(folder, 4, 2, *flags, "--global-batch-size", 64)[0],
                             train(folder, 4, 1, *flags, "--batch-size", 16)[0])


class WrongUse(unittest.TestCase):
    def refuse(self, text, shards, ranks, *flags):
        with t.temporary_folder() as folder:
            result = train(folder, shards, ranks, *flags, check=False)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn(text, result.stderr)

    def test_what_does_not_go_together(self):
        self.refuse("--logical-shards is for --strategy ddp; --strategy is zero1", 4, 2, "--strategy", "zero1")
        self.refuse("2 logical shards for 3 ranks", 2, 3)
        self.refuse("optimizer lbfgs", 2, 1, "--optimizer", "lbfgs")

    def test_ranks_that_compute_otherwise(self):
        script = f'exec {t.LOCKSTEP} train {" ".join(map(str, SHORT))} --logical-shards 2 --threads $((RANK + 1))'
        result = t.run(t.LOCKSTEP, "run", "--nproc-per-node", 2, "sh", "-c", script, check=False)
        self.assertNotEqual(result.returncode, 0)
        self.assertRegex(result.stderr, "1 thread.*2 threads|2 threads.*1 thread")


if __name__ == "__main__":
    t.main()
