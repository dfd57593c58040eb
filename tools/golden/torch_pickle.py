#!/usr/bin/env python3
"""Write the torch checkpoints of tests/golden/pickle, and the values torch reads from them.

    pip install torch==2.13.0 numpy
    python tools/golden/torch_pickle.py tests/golden/pickle

Every file has an ``.npz`` of the same name with its values, as float32 or NumPy's own type.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "int64", "int32", "int16", "int8",
    "uint64", "uint32", "uint16", "uint8", "bool",
]  # fmt: skip
WIDE = ("bfloat16", *(name for name in DTYPES if name.startswith("float8")))


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    write(out / "dtypes.pt", dtypes())
    write(out / "views.pt", views())
    write(out / "views_legacy.pt", views(), _use_new_zipfile_serialization=False)
    write(out / "views_protocol4.pt", views(), pickle_protocol=4)
    write(out / "training.pt", training(), strip="model.")
    write(out / "module_legacy.bin", module(), _use_new_zipfile_serialization=False)
    torch.save({"z": torch.ones(2, dtype=torch.complex64)}, out / "complex.pt")


def dtypes() -> dict[str, torch.Tensor]:
    """Return a tensor of every type that can be read; 8-bit floats with all codes."""
    tensors = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        if name.startswith("float8"):
            tensors[name] = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(16, 16)
        else:
            tensors[name] = torch.arange(12).reshape(3, 4).to(dtype)
    return tensors


def views() -> OrderedDict[str, torch.Tensor]:
    """Return tensors that share storages in every way."""
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    halves = torch.arange(24, dtype=torch.bfloat16)
    return OrderedDict(
        base=base,
        tied=base,
        rows=base[2:5],
        columns=base[:, 3:7],
        every_second=base[::2, ::3],
        transposed=base.t(),
        permuted=torch.arange(24, dtype=torch.int16).reshape(2, 3, 4).permute(2, 0, 1),
        scalar=base[5, 9],
        empty=torch.zeros(0, 4),
        repeated=base[0, :3].expand(5, 3),
        windows=base.flatten().as_strided((4, 3), (1, 2), 7),
        tail=halves[20:],
        parameter=torch.nn.Parameter(halves.reshape(4, 6)[1:3]),
    )


def training() -> dict[str, object]:
    """Return a training checkpoint: weights and optimizer state."""
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 17,
        "loss": 0.5,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "dtype": torch.float32,
        "names": {"a", "b"},
        "betas": (0.9, 0.95),
        "big": 1 << 70,
        "raw": b"bytes",
    }


def module() -> dict[str, torch.Tensor]:
    """Return the state dict of a module with a tied weight and a buffer."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False))
    net[1].weight = net[0].weight
    net.register_buffer("positions", torch.arange(4))
    return net.half().state_dict()


def write(path: Path, value: object, strip: str = "", **options: object) -> None:
    """Save a value with torch, and its tensors by name with NumPy."""
    torch.save(value, path, **options)
    if path.stem.startswith("views_"):  # the values are those of views
        return
    found: dict[str, np.ndarray] = {}
    collect(torch.load(path, weights_only=False), "", found)
    np.savez(path.with_suffix(".npz"), **{k.removeprefix(strip): v for k, v in found.items()})


def collect(value: object, name: str, found: dict[str, np.ndarray]) -> None:
    """Add the tensors below a value by name."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if str(value.dtype).removeprefix("torch.") in WIDE:
            value = value.to(torch.float32)
        found[name.removeprefix(".")] = value.numpy()
    elif isinstance(value, dict):
        for key, child in value.items():
            collect(child, f"{name}.{key}", found)
    elif isinstance(value, (list, tuple)):
        for i, child in enumerate(value):
            collect(child, f"{name}.{i}", found)


if __name__ == "__main__":
    main()
