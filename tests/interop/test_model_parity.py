"""Fresh models have the names and bits of Python's, and compute the same."""

import unittest

import lockstep_testing as testing
from parity_testing import differences, parity, require_linked_torch, save

require_linked_torch()

import torch  # noqa: E402

import parity_models  # noqa: E402

SHAPES = {"mlp": (5, 784), "convnet": (5, 1, 28, 28), "linear": (5, 20), "fashion-cnn": (5, 1, 28, 28),
          "wide": (5, 784)}


class ModelParity(unittest.TestCase):
    def test_initial_tensors_have_pythons_names_and_bits(self):
        for name in SHAPES:
            for seed in (0, 1234):
                with self.subTest(model=name, seed=seed), testing.temporary_folder() as folder:
                    ours = parity(folder, mode="init", model=name, seed=seed)
                    theirs = parity_models.make(name, seed).state_dict()
                    self.assertEqual(differences(ours, theirs), [])

    def test_forward_has_pythons_bits(self):
        for name, shape in SHAPES.items():
            with self.subTest(model=name), testing.temporary_folder() as folder:
                model = parity_models.make(name, 3).eval()
                x = torch.randn(shape)
                save({**model.state_dict(), "input": x}, folder / "in.safetensors")
                ours = parity(folder, mode="forward", model=name, input=str(folder / "in.safetensors"))
                self.assertEqual(differences(ours, {"output": model(x)}), [])


if __name__ == "__main__":
    testing.main()
