"""Optimizers, clipping and schedules against torch.optim and torch.nn.utils."""

import math
import unittest

import lockstep_testing as testing
from parity_testing import differences, parity, require_linked_torch, save

require_linked_torch()

import torch  # noqa: E402

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
        ("adam", torch.optim.Adam, {}),
        ("adam", torch.optim.Adam, {"weight_decay": 0.01, "amsgrad": True}),
        ("adam", torch.optim.Adam, {"beta1": 0.5, "beta2": 0.9, "eps": 1e-5}),
        ("adamw", torch.optim.AdamW, {}),
        ("adamw", torch.optim.AdamW, {"weight_decay": 0.1}),
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
        python = dict(options)
        if "beta1" in python:
            python["betas"] = (python.pop("beta1"), python.pop("beta2"))
        theirs = in_python(lambda p: make(p, **python), tensors)
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


if __name__ == "__main__":
    testing.main()
