"""One rank of a Python job that saves checkpoints in all layouts of torch.distributed.checkpoint.

checkpoint_writer.py RANK WORLD_SIZE FILE-FOR-MEETING OUT-FOLDER
checkpoint_writer.py RANK WORLD_SIZE FILE-FOR-MEETING OUT-FOLDER HF-FOLDER
    Reads the tensors of OUT-FOLDER/whole.safetensors from HF-FOLDER instead, sharded in rows, into
    OUT-FOLDER/read.safetensors.
"""

import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def sharded_tensor(whole, rank, world_size):
    """An older kind of sharded tensor, in rows."""
    rows = torch.arange(len(whole)).chunk(world_size)[rank].tolist()
    shard = LocalShard.from_tensor_and_offsets(whole[rows].contiguous(), [rows[0], 0], rank)
    return init_from_local_shards([shard], *whole.shape)


def read(folder, out, rank, line):
    wanted = load_file(out / "whole.safetensors")
    state = {name: distribute_tensor(torch.zeros_like(tensor), line, [Shard(0)]) if tensor.dim() > 1 else
             torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    whole = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
             for name, tensor in state.items()}
    if rank == 0:
        save_file(whole, out / "read.safetensors")


def main():
    rank, world_size, out = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world_size)
    line = init_device_mesh("cpu", (world_size,))
    if len(sys.argv) > 5:
        return read(sys.argv[5], out, rank, line)
    square = init_device_mesh("cpu", (2, 2)) if world_size == 4 else None
    torch.manual_seed(0)
    whole = {
        "layers.0.weight": torch.rand(7, 5), "layers.0.bias": torch.rand(7).to(torch.bfloat16),
        "columns": torch.rand(3, 9, dtype=torch.float64), "few": torch.rand(3, 2).to(torch.float16),
        "replicated": torch.rand(4, 4), "square": torch.rand(5, 6), "plain": torch.rand(2, 3, 4),
        "scalar": torch.tensor(3.5), "old": torch.rand(8, 3)
    }
    placed = {"layers.0.weight": [Shard(0)], "layers.0.bias": [Shard(0)], "columns": [Shard(1)], "few": [Shard(0)],
              "replicated": [Replicate()]}
    state = {name: distribute_tensor(tensor, line, placed[name]) if name in placed else tensor
             for name, tensor in whole.items()}
    if square:
        state["square"] = distribute_tensor(whole["square"], square, [Shard(0), Shard(1)])
    files = dict(state)
    state["old"] = sharded_tensor(whole["old"], rank, world_size)
    whole |= {"count": torch.arange(5), "flags": torch.tensor([True, False, True]), "empty": torch.zeros(0, 4)}
    state |= {name: whole[name] for name in ("count", "flags", "empty")}
    listed = torch.rand(2)
    dcp.save({"model": state, "optim": {"lr": 0.25, "step": 3, "betas": (0.5, 0.75), "name": "adam", "none": None,
                                        "list": [listed, {"x": listed + 1}]}}, checkpoint_id=out / "dcp")
    dcp.save(files, storage_writer=HuggingFaceStorageWriter(out / "hf_sharded", save_distributed=True))
    del files["scalar"]  # Consolidation makes 0 of it, in PyTorch 2.13.
    dcp.save(files, storage_writer=HuggingFaceStorageWriter(out / "hf_consolidated", save_distributed=True,
                                                            enable_consolidation=True))
    if rank == 0:
        dcp.save(whole, no_dist=True, storage_writer=HuggingFaceStorageWriter(
            out / "hf_files", {name: 1 + i % 3 for i, name in enumerate(whole)}))
        torch.save(whole, out / "whole.pt")
        save_file(whole, out / "whole.safetensors")
        save_file({name: whole[name] for name in files}, out / "consolidated.safetensors")
        save_file({name: whole[name] for name in [*files, "scalar"]}, out / "files.safetensors")
        save_file({**{f"model.{name}": tensor for name, tensor in whole.items()},
                   "optim.list.0": listed, "optim.list.1.x": listed + 1}, out / "dcp.safetensors")
    dist.barrier()


main()
sys.stdout.flush()
os._exit(0)  # Python's torch aborts once in some hundred runs while the interpreter goes down.
