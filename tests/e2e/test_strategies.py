"""Each strategy and each precision trains the MLP from the command line, and goes on after an interruption."""

import os
import re
import unittest

import lockstep_testing as t

LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
# Those whose sums are those of DDP, whatever a rank keeps.
AS_DDP = ("zero1", "zero2", "fsdp")
# 6 steps an epoch, of which the third is in its middle.
SHORT = ("--model", "mlp", "--optimizer", "adam", "--limit-train-batches", 6, "--limit-val-batches", 2,
         "--max-epochs", 2)


def data():
    folder = t.data_dir()
    return ("--dataset", "mnist", "--data-dir", folder) if folder else ("--dataset", "digits")


def strategies():
    text = t.run(t.LOCKSTEP, "train", "--help-all").stdout
    found = re.search(r"^  --strategy (\w+(\|\w+)+)$", text, re.M)
    assert found, text
    return found[1].split("|")


def ranks_for(strategy):
    return 1 if strategy == "dp" else 2


def train(strategy, *flags):
    return t.run(t.LOCKSTEP, "train", *data(), *SHORT, "--strategy", strategy, "--devices", ranks_for(strategy),
                 *flags).stdout.splitlines()


def weights(path):
    return path.read_bytes()


class Strategies(unittest.TestCase):
    def check_resumption(self, strategy, *flags):
        """From the middle of the first epoch on: the same last line, and the same weights to the last bit."""
        with t.temporary_folder() as folder:
            whole = train(strategy, *flags, "--save-weights", folder / "whole", "--checkpoint-dir", folder / "run",
                          "--checkpoint-every", 3, "--keep-checkpoints", 0)
            resumed = train(strategy, *flags, "--save-weights", folder / "resumed", "--resume",
                            folder / "run/step-00000003")
            self.assertTrue(any(line.startswith("resumed after step 3 ") for line in resumed), resumed)
            self.assertRegex(whole[-1], r"^test accuracy 0\.\d{4} loss \d\.\d{4}$")
            self.assertEqual(resumed[-1], whole[-1])
            self.assertEqual(weights(folder / "resumed"), weights(folder / "whole"))
            return whole[-1]

    @staticmethod
    def optimizer(precision):
        """Adam's eps of 1e-8 is 0 in float16, so that a gradient of 0 makes a parameter NaN, as in PyTorch."""
        return ("--optimizer", "sgd") if precision in ("16-true", "O3") else ()

    def test_each_strategy(self):
        for strategy in strategies():
            with self.subTest(strategy):
                self.check_resumption(strategy)

    def test_each_precision(self):
        for precision in PRECISIONS[1:]:
            with self.subTest(precision):
                self.check_resumption("ddp", "--precision", precision, "--gradient-clip-val", 1, *self.optimizer(precision))

    def test_lbfgs(self):
        """On several ranks and on several replicas; a strategy without all parameters refuses it."""
        lbfgs = ("--optimizer", "lbfgs", "--line-search-fn", "strong_wolfe", "--max-iter", 3, "--history-size", 4)
        for strategy in ("ddp", "dp"):
            with self.subTest(strategy):
                last = self.check_resumption(strategy, *lbfgs)
                self.assertGreater(float(last.split()[2]), 0.5, last)

    def test_dp_has_as_many_replicas_as_are_asked_for(self):
        """One has the sums of a single process. Three add parts of the batch up, to other last bits."""
        with t.temporary_folder() as folder:
            t.run(t.LOCKSTEP, "train", *data(), *SHORT, "--threads", 1, "--save-weights", folder / "ddp")
            lines = {}
            for count in (1, 3):
                lines[count] = train("dp", "--threads", 1, "--dp-replicas", count, "--save-weights", folder / str(count))
            self.assertEqual(weights(folder / "1"), weights(folder / "ddp"))
            self.assertNotEqual(weights(folder / "3"), weights(folder / "ddp"))
            accuracies = [float(line[-1].split()[2]) for line in lines.values()]
            self.assertAlmostEqual(*accuracies, delta=0.01)

    def test_a_pipeline_tells_where_it_is_cut(self):
        def cut(*flags):
            result = t.run(t.LOCKSTEP, "train", *data(), *SHORT, "--max-epochs", 0, "--strategy", "pipeline", "--devices", 2,
                           *flags)
            return re.findall(r"pipeline: stage 0 on rank 0: .*", result.stderr)

        # 100,480 of 109,386 parameters are the first layer's.
        self.assertEqual(cut("--pipeline-balance", "parameters"),
                         ["pipeline: stage 0 on rank 0: layers.0 (92% of parameters), "
                          "stage 1 on rank 1: layers.1 to layers.4 (8%)"])
        self.assertRegex("".join(cut()), r"^pipeline: stage 0 on rank 0: layers\.0.* of time\), stage 1 on rank 1: .*%\)$")
        self.assertEqual(cut("--pipeline-plan", "layers.2"), [])

    def test_apex_levels(self):
        for level, scale in (("O1", "dynamic"), *([("O2", "dynamic")] if LONG else []), ("O2", "128"), ("O3", "64")):
            with self.subTest(f"{level} {scale}"):
                self.check_resumption("ddp", "--amp-level", level, "--loss-scale", scale, *self.optimizer(level))

    @unittest.skipUnless(LONG, "LOCKSTEP_LONG_TESTS=1 combines all strategies with all precisions")
    def test_all_combinations(self):
        for strategy in strategies():
            for precision in PRECISIONS:
                with self.subTest(f"{strategy} {precision}"):
                    self.check_resumption(strategy, "--precision", precision, "--accumulate-grad-batches", 2,
                                          "--gradient-clip-val", 1, *self.optimizer(precision))

    def test_a_checkpoint_of_one_strategy_is_resumed_by_another(self):
        """From the end of an epoch: to the same bits where the sums are the same."""
        names = [name for name in strategies() if name in AS_DDP]
        with t.temporary_folder() as folder:
            for name in names:
                train(name, "--max-epochs", 1, "--checkpoint-dir", folder / name)
            whole = train("ddp", "--save-weights", folder / "whole", "--checkpoint-dir", folder / "run", "--keep-checkpoints", 0)
            (folder / "ddp").symlink_to("run/step-00000006")
            for name in names:
                for saved, resumed in (("ddp", name), (name, "ddp")):
                    with self.subTest(f"{saved} then {resumed}"):
                        lines = train(resumed, "--save-weights", folder / "resumed", "--resume", folder / saved)
                        self.assertEqual(lines[-1], whole[-1])
                        self.assertEqual(weights(folder / "resumed"), weights(folder / "whole"))

    @unittest.skipUnless("pipeline" in strategies() if t.LOCKSTEP else False, "there is no strategy pipeline")
    def test_a_position_within_an_epoch_is_one_of_samples(self):
        """3 steps of 2 batches are 6 of one: then the epoch of 6 batches is done."""
        with t.temporary_folder() as folder:
            train("ddp", "--checkpoint-dir", folder, "--checkpoint-every", 3, "--keep-checkpoints", 0)
            for step in (3, 6):
                lines = train("pipeline", "--resume", folder / f"step-0000000{step}")
                self.assertTrue(any(line.startswith(f"resumed after step {step} ") for line in lines), lines)


class Options(unittest.TestCase):
    def test_gradients_of_16_bits_end_near_those_of_32(self):
        with t.temporary_folder() as folder:
            plain = train("ddp", "--save-weights", folder / "plain")
            rounded = train("ddp", "--comm-hook", "bf16_compress", "--bucket-cap-mb", 0.1, "--save-weights", folder / "rounded")
            self.assertNotEqual(weights(folder / "plain"), weights(folder / "rounded"))
            self.assertAlmostEqual(float(plain[-1].split()[-1]), float(rounded[-1].split()[-1]), delta=0.05)


class WrongUse(unittest.TestCase):
    def refuse(self, flags, code, *texts):
        result = t.run(t.LOCKSTEP, "train", "--dataset", "digits", *flags, check=False)
        self.assertEqual(result.returncode, code, result.stderr)
        for text in texts:
            self.assertIn(text, result.stderr)

    def test_names(self):
        self.refuse(("--strategy", "ddpp"), 2, "did you mean 'ddp'")
        self.refuse(("--precision", "fp16"), 2, "--precision", "16-mixed")
        self.refuse(("--amp-level", "O4"), 2, "--amp-level", "O3")
        self.refuse(("--loss-scale", "-1", "--precision", "16-mixed"), 2, "loss")
        self.refuse(("--num-micro-batches", "0"), 2, "--num-micro-batches")

    def test_strategies_that_do_not_combine(self):
        self.refuse(("--mesh", "dp=1", "--strategy", "dp"), 2, "strategy dp takes no mesh")
        self.refuse(("--mesh", "dp_shard=2", "--devices", 2), 2, "ddp", "dp_shard")
        self.refuse(("--mesh", "dp=2", "--devices", 2, "--min-ranks", 1), 2, "--min-ranks", "dp=2")
        self.refuse(("--mesh", "pp=2", "--devices", 2, "--logical-shards", 2), 2, "logical shards", "pp=2")

    def test_what_does_not_go_with_lbfgs(self):
        lbfgs = ("--optimizer", "lbfgs", "--limit-train-batches", 2)
        for strategy in strategies():
            if strategy not in ("ddp", "dp"):
                self.refuse((*lbfgs, "--strategy", strategy, "--devices", 2), 2, " looks at ")
        self.refuse((*lbfgs, "--precision", "16-mixed"), 2, "which a loss scale does not go with")
        self.refuse((*lbfgs, "--amp-level", "O2", "--loss-scale", "1"), 2, "float32 copies of the parameters")
        self.refuse((*lbfgs, "--accumulate-grad-batches", 2), 2, "of 2 batches a step only the last one")
        self.refuse(("--max-iter", 2), 2, "--max-iter is for --optimizer lbfgs; --optimizer is sgd")
        self.refuse((*lbfgs, "--line-search-fn", "wolfe"), 2, "--line-search-fn", "strong_wolfe")

    def test_flags_of_other_strategies(self):
        self.refuse(("--dp-replicas", 2), 2, "--dp-replicas is for --strategy dp; --strategy is ddp")
        self.refuse(("--dp-replicas", 0, "--strategy", "dp"), 2, "--dp-replicas")
        self.refuse(("--find-unused-parameters", "--strategy", "zero1"), 2, "--find-unused-parameters", "zero1")
        self.refuse(("--comm-hook", "bf16_compress", "--strategy", "fsdp"), 2, "--comm-hook", "fsdp")
        self.refuse(("--fsdp-units", "0"), 2, "--fsdp-units", "ddp")
        self.refuse(("--fsdp-units", "layer", "--strategy", "fsdp"), 2, "unknown module 'layer'")
        self.refuse(("--bucket-cap-mb", 1, "--logical-shards", 1), 2, "ddp options", "logical shards")
        self.refuse(("--pipeline-balance", "size", "--strategy", "pipeline"), 2, "--pipeline-balance")

    def test_a_level_that_contradicts_the_precision(self):
        self.refuse(("--amp-level", "O0", "--precision", "16-mixed"), 2, "O0")


if __name__ == "__main__":
    t.main()
