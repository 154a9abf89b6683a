"""Optimizers, clipping and schedules against torch.optim and torch.nn.utils."""

import math
import os
import unittest

import lockstep_testing as testing
from parity_testing import differences, parity, require_linked_torch, save

require_linked_torch()

import torch  # noqa: E402

LONG = os.environ.get("LOCKSTEP_LONG_TESTS", "0") not in ("", "0")
# Around every vector's width, one that is larger than a kernel's grain, and one of the MLP.
SHAPES = [(1,), (7,), (10,), (15,), (16,), (17,), (31,), (32,), (33,), (47,), (48,), (255,), (3, 5, 7), (10, 64),
          (128, 784), (70001,)]
STEPS = 6
SGD_VARIANTS = [
    {},
    {"weight_decay": 0.01},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"momentum": 0.5, "dampening": 0.1, "weight_decay": 0.3},
]


def problem(shapes=SHAPES, steps=STEPS, seed=0, skip=()):
    """Parameters and gradients; `skip` lists (step, index) without a gradient."""
    torch.manual_seed(seed)
    tensors = {f"p.{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    for step in range(steps):
        for i, shape in enumerate(shapes):
            if (step, i) not in skip:
                tensors[f"g.{step}.{i}"] = torch.randn(shape)
    return tensors


def in_python(make, tensors, steps=STEPS, max_norm=None, lrs=None):
    parameters = []
    while f"p.{len(parameters)}" in tensors:
        parameters.append(torch.nn.Parameter(tensors[f"p.{len(parameters)}"].clone()))
    optimizer = make(parameters)
    out = {}
    for step in range(steps):
        optimizer.zero_grad()
        for i, parameter in enumerate(parameters):
            if f"g.{step}.{i}" in tensors:
                parameter.grad = tensors[f"g.{step}.{i}"].clone()
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            out[f"norm.{step}"] = norm.double().reshape(1)
        if lrs is not None:
            optimizer.param_groups[0]["lr"] = lrs[step]
        optimizer.step()
        for i, parameter in enumerate(parameters):
            out[f"p.{step}.{i}"] = parameter.detach().clone()
    return out


class SgdParity(unittest.TestCase):
    def compare(self, options, tensors=None, **more):
        options = {"lr": 0.0123, **options}
        tensors = tensors or problem()
        with testing.temporary_folder() as folder:
            save(tensors, folder / "in.safetensors")
            ours = parity(folder, mode="optim", name="sgd", options=options, steps=STEPS,
                          input=str(folder / "in.safetensors"), **more)
        more = {key: more[key] for key in ("max_norm", "lrs") if key in more}
        theirs = in_python(lambda p: torch.optim.SGD(p, **options), tensors, **more)
        self.assertEqual(differences(ours, theirs), [])

    def test_every_variant_has_pythons_bits(self):
        for options in SGD_VARIANTS:
            with self.subTest(options=options):
                self.compare(options)

    def test_parameters_without_a_gradient_in_some_steps(self):
        skip = {(0, 0), (0, 2), (1, 5), (3, 8), (4, 14)} | {(step, 9) for step in range(STEPS)}
        self.compare({"momentum": 0.9}, problem(skip=skip))

    def test_a_rate_that_changes(self):
        self.compare({"momentum": 0.9, "nesterov": True}, lrs=[0.1, 0.05, 0.3, 0.0, 1e-4, 0.7])

    def test_state_taken_over_in_the_middle(self):
        for options in SGD_VARIANTS[2:4]:
            with self.subTest(options=options):
                self.compare(options, reload=True)

    def test_clipped_gradients_and_their_norm(self):
        for max_norm in (0.5, 300.0, 1e6):
            with self.subTest(max_norm=max_norm):
                self.compare({"momentum": 0.9}, max_norm=max_norm)

    def test_two_threads(self):
        torch.set_num_threads(2)
        try:
            self.compare({"momentum": 0.9, "weight_decay": 0.01}, threads=2)
        finally:
            torch.set_num_threads(1)

    def test_other_dtypes(self):
        for dtype in (torch.float64, torch.bfloat16):
            with self.subTest(dtype=dtype):
                tensors = {name: tensor.to(dtype) for name, tensor in problem(SHAPES[:8]).items()}
                self.compare({"momentum": 0.9}, tensors)


class OthersParity(unittest.TestCase):
    """torch::optim in C++ computes the same formulas in another order of operations, with scalars
    that are rounded to float elsewhere: each step may differ by some ulps of the update, whose size
    is about lr. Six steps of lr 0.01 on values around 1: 1e-6 absolute is some ten ulps."""

    TOLERANCE = 1e-6
    VARIANTS = [
        ("rmsprop", torch.optim.RMSprop, {}),
        ("rmsprop", torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "alpha": 0.9}),
        ("adagrad", torch.optim.Adagrad, {}),
        ("adagrad", torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.01}),
    ]

    def check(self, name, make, options, **more):
        options = {"lr": 0.01, **options}
        tensors = problem()
        with testing.temporary_folder() as folder:
            save(tensors, folder / "in.safetensors")
            ours = parity(folder, mode="optim", name=name, options=options, steps=STEPS,
                          input=str(folder / "in.safetensors"), **more)
        theirs = in_python(lambda p: make(p, **options), tensors)
        self.assertEqual(set(ours), set(theirs))
        for key, value in theirs.items():
            self.assertLess(float((ours[key] - value).abs().max()), self.TOLERANCE, key)
        return ours

    def test_within_rounding_of_python(self):
        for name, make, options in self.VARIANTS:
            with self.subTest(name=name, options=options):
                self.check(name, make, options)

    def test_state_taken_over_in_the_middle_changes_no_bit(self):
        for name, make, options in self.VARIANTS:
            with self.subTest(name=name, options=options):
                self.assertEqual(differences(self.check(name, make, options, reload=True),
                                             self.check(name, make, options)), [])


def state_of(optimizer, parameters):
    """Python's state under our names: a count is int64 of one element here, a float32 scalar there."""
    out = {}
    for i, parameter in enumerate(parameters):
        for name, tensor in optimizer.state[parameter].items():
            tensor = tensor.to(torch.int64).reshape(1) if name == "step" else tensor.detach().clone()
            out[f"s.{name}.{i}"] = tensor
    return out


class AdamParity(unittest.TestCase):
    """Adam and AdamW go through LibTorch's fused kernels, as Python's do with fused=True: the same bits. Python's
    default rounds after each of a dozen operations, the kernels elsewhere: from the same state one step is within 8
    units in the last place of the larger of parameter and update."""

    UNITS = 8
    VARIANTS = [
        {},
        {"weight_decay": 0.1},
        {"amsgrad": True},
        {"betas": (0.5, 0.9), "eps": 1e-5},
        {"weight_decay": 0.01, "amsgrad": True, "betas": (0.0, 0.99)},
    ]
    KINDS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}

    def ours(self, name, options, tensors, steps, **more):
        options = dict(options)
        if "betas" in options:
            options["beta1"], options["beta2"] = options.pop("betas")
        with testing.temporary_folder() as folder:
            save(tensors, folder / "in.safetensors")
            return parity(folder, mode="optim", name=name, options=options, steps=steps,
                          input=str(folder / "in.safetensors"), **more)

    def each(self, variants=VARIANTS):
        for name in self.KINDS:
            for options in variants:
                with self.subTest(name=name, options=options):
                    yield name, {"lr": 0.01, **options}

    def test_the_bits_of_pythons_fused_optimizer(self):
        for name, options in self.each():
            tensors = problem()
            theirs = in_python(lambda p: self.KINDS[name](p, fused=True, **options), tensors)
            self.assertEqual(differences(self.ours(name, options, tensors, STEPS), theirs), [])
            if options.get("amsgrad"):
                threaded = self.ours(name, options, tensors, STEPS, threads=2)
                self.assertEqual(differences(threaded, theirs), [], "two threads")

    def test_the_bits_of_pythons_fused_optimizer_in_other_dtypes(self):
        for dtype in (torch.float64, torch.bfloat16):
            for name, make in self.KINDS.items():
                options = {"lr": 0.01, **self.VARIANTS[4]}
                tensors = {key: tensor.to(dtype) for key, tensor in problem().items()}
                theirs = in_python(lambda p: make(p, fused=True, **options), tensors)
                self.assertEqual(differences(self.ours(name, options, tensors, STEPS), theirs), [])

    def test_a_rate_that_changes_and_gradients_that_lack(self):
        skip = {(0, 0), (0, 2), (1, 5), (3, 8), (4, 14)} | {(step, 9) for step in range(STEPS)}
        tensors, lrs = problem(skip=skip), [0.1, 0.05, 0.3, 0.0, 1e-4, 0.7]
        theirs = in_python(lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), tensors, lrs=lrs)
        self.assertEqual(differences(self.ours("adamw", {"lr": 0.01}, tensors, STEPS, lrs=lrs), theirs), [])

    def one_step(self, name, options, scale, before=3):
        """Steps in Python, then one more from there on both sides: (start, Python's, ours)."""
        tensors = problem(steps=before + 1, seed=1)
        parameters = [torch.nn.Parameter(tensors[f"p.{i}"] * scale) for i in range(len(SHAPES))]
        optimizer = self.KINDS[name](parameters, **options)
        for step in range(before + 1):
            if step == before:
                start = {f"p.{i}": parameter.detach().clone() for i, parameter in enumerate(parameters)}
                start.update(state_of(optimizer, parameters))
            for i, parameter in enumerate(parameters):
                parameter.grad = tensors[f"g.{step}.{i}"].clone()
            optimizer.step()
        theirs = {f"p.0.{i}": parameter.detach() for i, parameter in enumerate(parameters)}
        theirs.update(state_of(optimizer, parameters))
        gradients = {f"g.0.{i}": tensors[f"g.{before}.{i}"] for i in range(len(SHAPES))}
        return start, theirs, self.ours(name, options, {**start, **gradients}, 1, state=True)

    def test_one_step_is_within_eight_units_of_pythons_default(self):
        unit = torch.finfo(torch.float32).eps
        # Parameters that are larger and smaller than the update.
        for scale, first in ((1.0, 0), (1e-3, 1)):
            for name, options in self.each(self.VARIANTS if LONG else self.VARIANTS[first::2]):
                start, theirs, ours = self.one_step(name, options, scale)
                self.assertEqual(set(ours), set(theirs))
                for i in range(len(SHAPES)):
                    new, mine = theirs[f"p.0.{i}"].double(), ours[f"p.0.{i}"].double()
                    size = torch.maximum(new.abs(), (new - start[f"p.{i}"].double()).abs())
                    place = torch.exp2(torch.floor(torch.log2(size))) * unit
                    self.assertLessEqual(float(((mine - new).abs() / place).max()), self.UNITS, SHAPES[i])
                for key in theirs:
                    if key.startswith("s.step."):
                        self.assertEqual(int(ours[key]), int(theirs[key]), key)
                    elif key.startswith("s."):
                        # Sums of a few terms around 1: some units in the last place of those.
                        self.assertLess(float((ours[key] - theirs[key]).abs().max()), 8 * unit, key)

    def test_state_taken_over_in_the_middle_changes_no_bit(self):
        for name, options in (("adam", self.VARIANTS[4]), ("adamw", {})):
            tensors, options = problem(), {"lr": 0.01, **options}
            self.assertEqual(differences(self.ours(name, options, tensors, STEPS, reload=True),
                                         self.ours(name, options, tensors, STEPS)), [])


class ScheduleParity(unittest.TestCase):
    """Python multiplies the last rate; ours is the closed form: they differ by rounding only."""

    def check(self, make, lr=0.1, steps=40, **config):
        with testing.temporary_folder() as folder:
            ours = parity(folder, mode="schedule", lr=lr, steps=steps, **config)["rates"].tolist()
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
        schedule = make(optimizer)
        for step in range(steps):
            expected = optimizer.param_groups[0]["lr"]
            self.assertTrue(math.isclose(ours[step], expected, rel_tol=1e-12, abs_tol=1e-15),
                            f"step {step}: {ours[step]} in C++, {expected} in Python")
            optimizer.step()
            schedule.step()
        return ours

    def test_step(self):
        self.check(lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=7, gamma=0.3), name="step", step_size=7,
                   gamma=0.3)

    def test_cosine(self):
        rates = self.check(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=40, eta_min=0.001),
                           name="cosine", total_steps=40, min_lr=0.001, steps=41)
        self.assertEqual(rates[40], 0.001)

    def test_linear(self):
        self.check(lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=30),
                   name="linear", total_steps=30, min_lr=0.01, steps=40)

    def test_warmup_then_cosine(self):
        schedulers = torch.optim.lr_scheduler

        def make(optimizer):
            warmup = schedulers.LinearLR(optimizer, start_factor=1 / 8, end_factor=1.0, total_iters=7)
            cosine = schedulers.CosineAnnealingLR(optimizer, T_max=32)
            return schedulers.SequentialLR(optimizer, [warmup, cosine], milestones=[8])

        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SequentialLR itself steps in a deprecated way.
            self.check(make, name="cosine", warmup_steps=8, total_steps=40)


class AverageParity(unittest.TestCase):
    """AveragedModel against torch.optim.swa_utils', to the bit."""

    def compare(self, use_buffers, decay=None):
        from torch.optim import swa_utils

        import parity_models

        steps, model = 5, parity_models.make("convnet", 3)
        average_of = swa_utils.get_ema_multi_avg_fn(decay) if decay is not None else None
        theirs = swa_utils.AveragedModel(model, multi_avg_fn=average_of, use_buffers=use_buffers)
        tensors = {}
        for step in range(steps):
            with torch.no_grad():
                for name, tensor in model.state_dict().items():
                    tensor.add_(torch.randn(tensor.shape) if tensor.is_floating_point() else 3)
                    tensors[f"u.{step}.{name}"] = tensor.clone()
            theirs.update_parameters(model)
        with testing.temporary_folder() as folder:
            save(tensors, folder / "in.safetensors")
            options = {} if decay is None else {"decay": decay}
            ours = parity(folder, mode="average", model="convnet", use_buffers=use_buffers, steps=steps,
                          input=str(folder / "in.safetensors"), **options)
        expected = {name: tensor.detach() for name, tensor in theirs.state_dict().items()}
        expected["n_averaged"] = expected["n_averaged"].reshape(1)
        self.assertEqual(differences(ours, expected), [])

    def test_moving(self):
        self.compare(use_buffers=False, decay=0.9)

    def test_plain_mean(self):
        self.compare(use_buffers=False)

    def test_buffers_too(self):
        """Also a count of batches, which is a whole number."""
        self.compare(use_buffers=True, decay=0.9)
        self.compare(use_buffers=True)


class CheckpointedParity(unittest.TestCase):
    def test_the_bits_of_pythons(self):
        from torch.utils.checkpoint import checkpoint

        torch.manual_seed(0)
        tensors = {"x": torch.randn(6, 20), "w0": torch.randn(30, 20), "w1": torch.randn(10, 30)}
        with testing.temporary_folder() as folder:
            save(tensors, folder / "in.safetensors")
            ours = parity(folder, mode="checkpointed", seed=11, input=str(folder / "in.safetensors"))
        for reentrant in (True, False):
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}

            def half(weight):
                return lambda x: torch.nn.functional.dropout(torch.tanh(torch.nn.functional.linear(x, weight)), 0.3)

            torch.manual_seed(11)
            hidden = checkpoint(half(leaves["w0"]), leaves["x"], use_reentrant=reentrant)
            output = checkpoint(half(leaves["w1"]), hidden, use_reentrant=reentrant)
            (output * output).sum().backward()
            theirs = {"output": output.detach(), "next": torch.randn(4),
                      **{f"grad.{name}": leaf.grad for name, leaf in leaves.items()}}
            self.assertEqual(differences(ours, theirs), [])


if __name__ == "__main__":
    testing.main()
