"""Fresh models have the names and bits of Python's, and compute the same."""

import unittest
import unittest.mock

import lockstep_testing as testing
from parity_testing import differences, parity, require_linked_torch, save

require_linked_torch()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import parity_models  # noqa: E402

GPT_OF_MANY_KINDS = parity_models.SMALL_GPT + ",dropout=0.2,bias=0"
# Tokens have the number of different ones at the end.
SHAPES = {"mlp": (5, 784), "convnet": (5, 1, 28, 28), "linear": (5, 20), "fashion-cnn": (5, 1, 28, 28),
          "wide": (5, 784), "gpt": (2, 128, 65), parity_models.SMALL_GPT: (3, 9, 13), GPT_OF_MANY_KINDS: (3, 16, 13),
          "resnet18": (1, 3, 64, 64), "resnet18:classes=10": (2, 3, 32, 33)}


def random_input(name):
    shape = SHAPES[name]
    return torch.randint(shape[-1], shape[:-1]) if name.startswith("gpt") else torch.randn(shape)


class ModelParity(unittest.TestCase):
    def test_initial_tensors_have_pythons_names_and_bits(self):
        for name in SHAPES:
            for seed in (0, 1234)[:1 if name in ("gpt", "resnet18") else 2]:
                with self.subTest(model=name, seed=seed), testing.temporary_folder() as folder:
                    ours = parity(folder, mode="init", model=name, seed=seed)
                    theirs = parity_models.make(name, seed).state_dict()
                    self.assertEqual(differences(ours, theirs), [])

    def test_forward_has_pythons_bits(self):
        for name in SHAPES:
            with self.subTest(model=name), testing.temporary_folder() as folder:
                model = parity_models.make(name, 3).eval()
                x = random_input(name)
                save({**model.state_dict(), "input": x}, folder / "in.safetensors")
                ours = parity(folder, mode="forward", model=name, input=str(folder / "in.safetensors"))
                self.assertEqual(differences(ours, {"output": model(x)}), [])

    def test_resnet18_is_torchvisions(self):
        """Names, initial values and, from a .pt file of its weights, the logits."""
        try:
            # A torchvision for CUDA declares operators that a torch without it lacks. The model needs none.
            with unittest.mock.patch("torch.library.register_fake", lambda *_, **__: lambda function: function):
                from torchvision.models import resnet18
        except ImportError as error:
            self.skipTest(f"Python's torchvision is not installed: {error}")
        torch.manual_seed(4)
        model = resnet18(num_classes=7).eval()
        with testing.temporary_folder() as folder:
            self.assertEqual(differences(parity(folder, mode="init", model="resnet18:classes=7", seed=4),
                                         model.state_dict()), [])
            for parameter in model.parameters():
                parameter.data.add_(torch.randn_like(parameter) * 1e-3)
            torch.save(model.state_dict(), folder / "resnet18.pt")
            testing.run(testing.LOCKSTEP, "checkpoint", "convert", folder / "resnet18.pt", folder / "w.safetensors")
            x = torch.randn(2, 3, 64, 64)
            save({**load_file(folder / "w.safetensors"), "input": x}, folder / "in.safetensors")
            ours = parity(folder, mode="forward", model="resnet18:classes=7", input=str(folder / "in.safetensors"))
            self.assertEqual(differences(ours, {"output": model(x)}), [])

    def test_a_step_has_pythons_bits(self):
        """Losses, gradients by way of two steps of SGD, and the statistics of batch norm; in training mode, with
        dropout drawn from the same generator."""
        for name in (parity_models.SMALL_GPT, GPT_OF_MANY_KINDS, "resnet18:classes=10"):
            with self.subTest(model=name), testing.temporary_folder() as folder:
                x = torch.stack([random_input(name) for _ in range(2)])
                y = torch.randint(13, x.shape) if name.startswith("gpt") else torch.randint(10, x.shape[:2])
                save({"x": x, "y": y}, folder / "in.safetensors")
                ours = parity(folder, mode="steps", model=name, seed=7, input=str(folder / "in.safetensors"))
                model = parity_models.make(name, 7)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                losses = []
                for step in range(2):
                    output = model(x[step])
                    loss = F.cross_entropy(output.flatten(0, -2), y[step].flatten())
                    losses.append(loss.detach())
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                self.assertEqual(differences(ours, {"losses": torch.stack(losses), **model.state_dict()}), [])


if __name__ == "__main__":
    testing.main()
