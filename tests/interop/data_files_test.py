"""Files that Python writes and we read, and the other way round: safetensors, npy, npz, MNIST, random."""

import collections
import dataclasses
import gzip
import importlib.util
import struct
import sys
import unittest

import lockstep_testing as lt

TOOL = lt.BUILD_DIR / "tests" / "data_files_tool"

for package in ("torch", "numpy", "safetensors"):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: Python's {package} is not installed")
        sys.exit(77)

import numpy
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.serialization import config as serialization

DTYPES = ("bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
          "float8_e4m3fn float8_e5m2 complex64").split()


class AttributeDict(dict):
    pass


class Ordered(collections.OrderedDict):
    pass


class MyList(list):
    pass


class Subclass(torch.Tensor):
    pass


Pair = collections.namedtuple("Pair", "mean std")


@dataclasses.dataclass
class Stats:
    mean: torch.Tensor
    std: torch.Tensor


class Whole(torch.nn.Module):
    """With what is no part of its state_dict, and a cycle."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.register_buffer("later", None)
        self.cache, self.seen = torch.zeros(3), [torch.zeros(2)]
        self.layers.__dict__["owner"] = [self]


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


class Files(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(lt.temporary_folder())
        self.out = self.folder / "out.safetensors"

    def copied(self, path):
        lt.run(TOOL, "copy", path, self.out)
        return safetensors.torch.load_file(self.out)

    def assert_same(self, got, wanted):
        self.assertEqual(set(got), set(wanted))
        for name, tensor in wanted.items():
            self.assertEqual(got[name].dtype, tensor.dtype, name)
            self.assertEqual(got[name].shape, tensor.shape, name)
            self.assertTrue(torch.equal(bits(got[name]), bits(tensor)), name)

    def test_safetensors_of_every_dtype_there_and_back(self):
        generator = torch.Generator().manual_seed(0)
        tensors = {d: (torch.rand(3, 5, generator=generator) * 100).to(getattr(torch, d)) for d in DTYPES}
        tensors.update(scalar=torch.tensor(1.5), empty=torch.zeros(0, 4), odd=torch.ones(7, dtype=torch.uint8))
        tensors["layer.0.weight \"ü\""] = torch.arange(6.0).reshape(2, 3)
        path = self.folder / "in.safetensors"
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt", "note": "a\nb"})
        self.assert_same(self.copied(path), tensors)
        with safetensors.safe_open(self.out, "pt") as file:
            self.assertEqual(file.metadata(), {"format": "pt", "note": "a\nb"})

    def check_pt(self, value, wanted, **options):
        path = self.folder / "in.pt"
        torch.save(value, path, **options)
        self.assert_same(self.copied(path), wanted)

    def test_pt_of_every_dtype_and_protocol(self):
        tensors = {d: (torch.rand(3, 5) * 100).to(getattr(torch, d)) for d in DTYPES}
        tensors.update(scalar=torch.tensor(1.5), empty=torch.zeros(0, 4), strided=torch.rand(4, 6).t()[1:, ::2])
        for protocol in (2, 3, 4, 5):
            self.check_pt(collections.OrderedDict(tensors), tensors, pickle_protocol=protocol)

    def test_pt_of_modules_optimizers_and_checkpoints(self):
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        module.register_parameter("tied", module[0].weight)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        module(torch.rand(2, 3)).sum().backward()
        optimizer.step()
        state = module.state_dict()
        self.check_pt(state, state)
        self.check_pt(module, state)  # the whole module: nothing of its class is run
        states = {f"o.state.{i}.{k}": v for i, of in optimizer.state_dict()["state"].items() for k, v in of.items()}
        self.check_pt({"epoch": 3, "m": state, "o": optimizer.state_dict(), "x": [None, True, {"y": (1.5, "z")}]},
                      {**{f"m.{k}": v for k, v in state.items()}, **states})

    def test_pt_of_containers_and_keys_of_any_kind(self):
        def t(value):
            return torch.full((2,), float(value))

        own = AttributeDict(w=t(1))
        own.__dict__ = own
        self.check_pt({"attr": AttributeDict(w=t(0), lr=0.1), "own": own, "ordered": Ordered(w=t(2)), "pair": Pair(t(3), t(4)),
                       "stats": Stats(t(5), t(6)), "list": MyList([t(7)]), "deque": collections.deque([t(8)]),
                       "default": collections.defaultdict(list, w=t(9)), "set": {1, 2}, "array": numpy.arange(4.0)},
                      {"attr.w": t(0), "own.w": t(1), "ordered.w": t(2), "pair.0": t(3), "pair.1": t(4), "stats.mean": t(5),
                       "stats.std": t(6), "list.0": t(7), "deque.0": t(8), "default.w": t(9)})
        self.check_pt({0.99: t(0), (0, 1): t(1), (1, 0): t(2), True: t(3), None: t(4), 7: t(5), "7": t(6)},
                      {"0.99": t(0), "(0, 1)": t(1), "(1, 0)": t(2), "True": t(3), "None": t(4), "7": t(5), "7#6": t(6)})

    def test_pt_with_two_tensors_of_one_name_is_refused(self):
        path = self.folder / "in.pt"
        torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}, path)
        failed = lt.run(TOOL, "copy", path, self.out, check=False)
        self.assertEqual(failed.returncode, 1)
        self.assertIn("'a.b'", failed.stderr)

    def test_pt_whose_tensors_are_conjugated_or_negated_when_they_are_read(self):
        z = torch.randn(3, 2, dtype=torch.cfloat)
        lazy = {"conj": z.conj(), "imag": z.clone().conj().imag, "neg": torch._neg_view(torch.tensor([1.0, 3.0])),
                "both": torch._neg_view(z.t().conj()), "plain": z}
        self.assertTrue(lazy["conj"].is_conj() and lazy["imag"].is_neg())
        wanted = {name: tensor.resolve_conj().resolve_neg().clone() for name, tensor in lazy.items()}
        self.check_pt(lazy, wanted)
        path = self.folder / "in.pt"
        lt.run(TOOL, "source", path, self.out)
        self.assert_same(safetensors.torch.load_file(self.out), wanted)
        dcp.save(lazy, checkpoint_id=self.folder / "dcp")
        lt.run(TOOL, "source", self.folder / "dcp", self.out)
        self.assert_same(safetensors.torch.load_file(self.out), wanted)

    def test_pt_and_dcp_without_checksums(self):
        tensors = {"a": torch.rand(3, 4), "b": torch.rand(5)}
        serialization.save.compute_crc32 = False
        self.addCleanup(setattr, serialization.save, "compute_crc32", True)
        self.check_pt(tensors, tensors)
        dcp.save(tensors, checkpoint_id=self.folder / "dcp")
        lt.run(TOOL, "source", self.folder / "dcp", self.out)
        self.assert_same(safetensors.torch.load_file(self.out), tensors)

    def test_what_is_no_weight_does_not_refuse_a_pt(self):
        w, attribute, parameter = torch.rand(2, 3), torch.rand(2), torch.nn.Parameter(torch.rand(2))
        attribute.tag = parameter.tag = "a"
        subclass = torch.rand(3).as_subclass(Subclass)
        self.check_pt({"w": w, "attribute": attribute, "parameter": parameter, "subclass": subclass, "seed": 2**63 + 5,
                       "huge": -2**3000, "generator": numpy.random.default_rng(0).bit_generator.state,
                       "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
                       "sparse": torch.eye(3).to_sparse(), "meta": torch.empty(3, device="meta"),
                       "half": torch.zeros(2, dtype=torch.complex32)},
                      {"w": w, "attribute": attribute, "parameter": parameter.detach(), "subclass": subclass.as_subclass(torch.Tensor)})
        self.check_pt({"w": w, "bytes": bytearray(b"xy" * 200)}, {"w": w}, pickle_protocol=5)

    def test_pt_of_a_module_has_what_its_state_dict_has(self):
        module = Whole()
        self.check_pt(module, module.state_dict())
        self.check_pt(module, module.state_dict(), pickle_protocol=4)
        cycle = [torch.ones(1)]
        cycle.append(cycle)
        self.check_pt(cycle, {"0": torch.ones(1)})

    def test_python_loads_our_pt(self):
        tensors = {d: (torch.rand(3, 5) * 100).to(getattr(torch, d)) for d in DTYPES}
        tensors.update(scalar=torch.tensor(1.5), empty=torch.zeros(0, 4))
        path, out = self.folder / "in.safetensors", self.folder / "out.pt"
        safetensors.torch.save_file(tensors, path)
        lt.run(TOOL, "copy", path, out)
        self.assert_same(torch.load(out, weights_only=True), tensors)
        self.assert_same(self.copied(out), tensors)

    def test_numpy_reads_ours(self):
        path = self.folder / "in.safetensors"
        safetensors.numpy.save_file({"a": numpy.arange(6.0).reshape(2, 3)}, path)
        self.copied(path)
        numpy.testing.assert_array_equal(safetensors.numpy.load_file(self.out)["a"],
                                         numpy.arange(6.0).reshape(2, 3))

    def arrays(self):
        for kind in "b1 u1 u2 u4 u8 i1 i2 i4 i8 f2 f4 f8 c8".split():
            for order in "<>":
                array = (numpy.arange(24) % 7 - (kind[0] in "ifc")).reshape(2, 3, 4).astype(order + kind)
                yield f"{kind}{order}", array
                yield f"{kind}{order}F", numpy.asfortranarray(array)
        yield "scalar", numpy.array(2.5)
        yield "empty", numpy.zeros((0, 3), "f4")
        yield "view", numpy.arange(24.0).reshape(4, 6)[::2, 1::2]

    def as_tensor(self, array):
        native = numpy.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape)
        return torch.from_numpy(native.copy())

    def test_npz_of_every_dtype_and_order(self):
        arrays = dict(self.arrays())
        wanted = {name: self.as_tensor(array) for name, array in arrays.items()}
        for save in (numpy.savez, numpy.savez_compressed):
            path = self.folder / "in.npz"
            save(path, **arrays)
            self.assert_same(self.copied(path), wanted)

    def test_npy_of_each_format_version(self):
        array = numpy.asfortranarray(numpy.arange(6, dtype=">i4").reshape(2, 3))
        path = self.folder / "in.npy"
        for version in ((1, 0), (2, 0), (3, 0)):
            with open(path, "wb") as file:
                numpy.lib.format.write_array(file, array, version=version)
            self.assert_same(self.copied(path), {"array": self.as_tensor(array)})

    def test_objects_are_refused_by_name(self):
        path = self.folder / "in.npy"
        numpy.save(path, numpy.array([{}], dtype=object), allow_pickle=True)
        failed = lt.run(TOOL, "copy", path, self.out, check=False)
        self.assertEqual(failed.returncode, 1)
        self.assertIn(f"{path}, byte ", failed.stderr)
        self.assertIn("'|O'", failed.stderr)

    def dataset(self, name, data_dir, seed=0):
        lt.run(TOOL, "dataset", name, data_dir, seed, self.out)
        return safetensors.torch.load_file(self.out)

    def test_random_regression_is_what_python_draws(self):
        for seed in (0, 1, 2**40 + 3):
            torch.manual_seed(seed)
            pairs = [(torch.rand(20), torch.rand(1)) for _ in range(2048)]
            got = self.dataset("random", self.folder, seed)
            self.assertTrue(torch.equal(got["data"], torch.stack([x for x, _ in pairs])), seed)
            self.assertTrue(torch.equal(got["targets"], torch.stack([y for _, y in pairs])), seed)

    def test_digits_train_the_mlp_to_97_percent_but_not_at_once(self):
        got = self.dataset("digits", self.folder)
        x, test_x = ((got[n].reshape(-1, 784) / 255 - 0.1307) / 0.3081 for n in ("data", "test_data"))
        y, test_y = got["targets"], got["test_targets"]
        torch.manual_seed(1)
        torch.set_num_threads(1)
        model = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64),
                                    torch.nn.ReLU(), torch.nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        accuracies = []
        for _ in range(8):
            for batch in torch.randperm(len(x)).split(64):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
            with torch.no_grad():
                accuracies.append((model(test_x).argmax(1) == test_y).float().mean().item())
        self.assertGreater(accuracies[0], 0.85, accuracies)
        self.assertLess(accuracies[0], 0.965, accuracies)
        self.assertGreaterEqual(max(accuracies), 0.97, accuracies)

    def test_mnist_is_what_a_reader_in_python_sees(self):
        data_dir = lt.data_dir()
        if data_dir is None:
            self.skipTest(lt.NO_DATA)
        got = self.dataset("mnist", data_dir)
        for name, key in (("train-images-idx3", "data"), ("train-labels-idx1", "targets"),
                          ("t10k-images-idx3", "test_data"), ("t10k-labels-idx1", "test_targets")):
            with gzip.open(data_dir / "mnist" / f"{name}-ubyte.gz") as file:
                content = file.read()
            sizes = struct.unpack(f">{content[3]}I", content[4 : 4 + 4 * content[3]])
            wanted = numpy.frombuffer(content, numpy.uint8, offset=4 + 4 * content[3]).reshape(sizes)
            numpy.testing.assert_array_equal(got[key].numpy(), wanted)


if __name__ == "__main__":
    unittest.main(verbosity=2)
