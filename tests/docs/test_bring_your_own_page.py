"""The plugins of docs/bring_your_own.md, in processes outside of the checkout."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from mpirun import PYTHONPATH, mpirun
from safetensors.numpy import load_file, save_file
from small_models import make_spec, write_llama

import nbflow
from nbflow import cli
from nbflow.checkpoint import open_weights
from nbflow.executor import ReferenceExecutor
from nbflow.executor.weight_loader import WeightLoader
from nbflow.program import build
from nbflow.spec import resolve
from nbflow.spec.plugin_ops import OPS
from nbflow_kernels.attention.variants import ATTENTION
from nbflow_kernels.errors import UsageError
from nbflow_kernels.plugins import load_plugin

PAGE = Path(__file__).parents[2] / "docs" / "bring_your_own.md"
FILES = dict(re.findall(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```", PAGE.read_text(), re.M | re.S))
"""Files of the page by name."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def nbflow_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nbflow", *words], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH}, check=False,
    )  # fmt: skip


@pytest.mark.mpi
def test_a_strategy_on_the_command_line_and_on_ranks(folder: Path) -> None:
    words = ["run", "tiny_python", "-p", "def ", "-n", "6", "--json", "--seed", "3"]
    words += ["--plugins", str(folder / "edt.py"), "--decoding", "edt:theta=0.5,t0=1.5"]
    alone = nbflow_in(folder, *words)
    assert alone.returncode == 0, alone.stderr
    ranks = mpirun(2, "-m", "nbflow", *words, "--partition", "0&1")
    assert ranks.returncode == 0, ranks.stderr
    assert json.loads(ranks.stdout)["ids"] == json.loads(alone.stdout)["ids"]
    (folder / "other").mkdir()
    (folder / "other" / "edt.py").write_text(FILES["edt.py"] + "# of another host\n")
    code = "import os, sys, nbflow; rank = os.environ.get('PMI_RANK') or os.environ.get("
    code += "'OMPI_COMM_WORLD_RANK'); nbflow.load('tiny_python', partition='0&1', "
    code += f"plugins=[{str(folder)!r} + ('/other' if rank == '1' else '') + '/edt.py'])"
    differs = mpirun(2, "-c", code)
    assert differs.returncode != 0
    assert "plugin edt.py is not the same file on rank 1 and on rank 0" in differs.stderr
    refused = nbflow_in(folder, *words[:-1], "edt:theta=11")
    assert refused.returncode == 2
    assert "decoding 'edt': theta must be in 0..10, got 11" in refused.stderr


def test_a_measure_in_a_sweep(folder: Path) -> None:
    done = nbflow_in(folder, "sweep", "likely.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    out = folder / "runs" / "likely"
    table = pd.read_csv(out / "points.csv", dtype={"partition": str})
    assert list(table.status) == ["done", "done"]
    assert table.likely_share.between(0, 1, inclusive="neither").all()
    (launch,) = (json.loads(p.read_text()) for p in (out / "launches").glob("*.json"))
    digest = hashlib.sha256((folder / "likely.py").read_bytes()).hexdigest()
    assert launch["ranks"][0]["plugins"] == [
        {"path": str(folder / "likely.py"), "sha256": digest, "registers": ["measure likely"]}
    ]
    assert json.loads((out / "sweep.json").read_text())["about"]["likely"].startswith("Share of")
    # an edited plugin makes other points
    (folder / "likely.py").write_text(FILES["likely.py"] + "# edited\n")
    again = nbflow_in(folder, "sweep", "likely.toml", "--resume", "--dry-run")
    assert again.returncode == 0, again.stderr
    ids = set(re.findall(r"\b[0-9a-f]{12}\b", again.stdout))
    assert not ids & set(table.point)


def test_a_variant_in_a_model(folder: Path) -> None:
    """Prompts, decode steps and shards agree with the float64 reference."""
    with pytest.raises(UsageError, match=r"unknown attention variant 'sigmoid'.*--plugins"):
        resolve("tiny_python", spec=folder / "sigmoid.toml")
    load_plugin(folder / "sigmoid.py")
    try:
        resolved = resolve("tiny_python", spec=folder / "sigmoid.toml")
        program = build(resolved.spec)
        ids = np.arange(3, 43) % resolved.spec.vocab_size
        with open_weights(resolved.path) as file:
            want = ReferenceExecutor(program, WeightLoader(program, file, None)).logits(ids)
        plain = nbflow.load("tiny_python", kv="f32")
        with plain:
            assert np.abs(plain.logits(ids) - want).max() > 0.1
        for partition in ("0", "0&1", "0;1"):
            with nbflow.load(
                "tiny_python", spec=folder / "sigmoid.toml", kv="f32", partition=partition
            ) as model:
                got = model.logits(ids)
                # float32 through 4 layers, as the models of tests/models
                np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())
                out = model.generate(ids, max_tokens=4, ignore_eos=True)
                whole = model.logits([*ids, *out.ids])[len(ids) - 1 : -1]
                assert list(whole.argmax(axis=1)) == out.ids  # decode steps know their positions
    finally:
        ATTENTION.remove("sigmoid")


def write_ema(folder: Path) -> Path:
    """Write a random checkpoint of the page's ema.toml."""
    model = folder / "model"
    write_llama(model)  # three layers
    file = model / "model.safetensors"
    tensors = load_file(file)
    rng = np.random.default_rng(5)
    kept = {
        name: array
        for name, array in tensors.items()
        if not name.startswith(("model.layers.0.self_attn", "model.layers.2.mlp"))
    }
    E = kept["model.norm.weight"].shape[0]
    for name, shape in (
        ("0.ema.rate", (E,)), ("0.ema.out.weight", (E, E)), ("2.mlp.up.weight", (64, E)),
        ("2.mlp.down.weight", (E, 64)),
    ):  # fmt: skip
        kept[f"model.layers.{name}"] = (rng.standard_normal(shape) / shape[-1] ** 0.5).astype("f4")
    save_file(kept, file)
    return model


def test_ops_in_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mixer with a state and a feed-forward network: chunks, batches, pipelines, errors."""
    model_path, spec = write_ema(folder), folder / "ema.toml"
    with pytest.raises(UsageError, match=r"unknown op 'ema'.*--plugins"):
        resolve(model_path, spec=spec)
    for name, message in (("ema.toml", "[layer.ema]: unknown op 'ema'"),
                          ("sigmoid.toml", "attention: unknown attention variant")):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            cli.main(["spec", str(folder / name)])
        assert message in capsys.readouterr().err
    load_plugin(folder / "ema.py")
    try:
        resolved = resolve(model_path, spec=spec)
        program = build(resolved.spec)
        ids = np.arange(3, 33)
        with open_weights(resolved.path) as file:
            want = ReferenceExecutor(program, WeightLoader(program, file, None)).logits(ids)
        for options in ({}, {"max_step_tokens": 7}, {"partition": "0;1"}, {"weights": "q8_0"}):
            with nbflow.load(model_path, spec=spec, kv="f32", **options) as model:
                error = np.abs(model.logits(ids) - want).max() / np.abs(want).max()
                # float32; with q8_0 the other matrices round to 1 / 254 of a block's largest
                assert error < (2e-2 if "weights" in options else 2e-5)
                prompts = [ids[:9].tolist(), ids[4:20].tolist()]
                together = model.generate_batch(prompts, max_tokens=5, ignore_eos=True)
                for prompt, out in zip(prompts, together, strict=True):
                    assert model.generate(prompt, max_tokens=5, ignore_eos=True).ids == out.ids
        ema = OPS["ema"]
        nbflow.register_op("ema", reference=ema.reference, weights=ema.weights, state=ema.state)
        with pytest.raises(UsageError, match="op 'ema' of a plugin cannot be divided among ranks"):
            nbflow.load(model_path, spec=spec, partition="0&1")
        spec.write_text(FILES["ema.toml"].replace('op = "squares"', 'op = "ema"'))
        with pytest.raises(UsageError, match="op 'ema' has a state: it can be a mixer"):
            resolve(model_path, spec=spec)
        spec.write_text(FILES["ema.toml"].replace('op = "ema"', 'op = "ema"\nmixer = "none"'))
        with pytest.raises(UsageError, match="op stands in the place of mixer"):
            resolve(model_path, spec=spec)
    finally:
        for name in ("ema", "squares"):
            OPS.remove(name)


ON_RANKS = """
import sys
import numpy as np
import nbflow
from nbflow.distributed import SelfComm, world

path, spec, plugin, *partitions = sys.argv[1:]
ids, options = np.arange(3, 33), {"spec": spec, "plugins": [plugin], "kv": "f32"}
with nbflow.load(path, comm=SelfComm(), **options) as model:
    want = model.logits(ids)
    texts = [model.generate(ids[i:9].tolist(), max_tokens=6, ignore_eos=True).ids for i in (0, 4)]
for partition in partitions:
    with nbflow.load(path, partition=partition, **options) as model:
        error = np.abs(model.logits(ids) - want).max() / np.abs(want).max()
        assert error < 1e-5, (partition, error)  # float32 sums in another order
        prompts = [ids[i:9].tolist() for i in (0, 4)]
        batch = model.generate_batch(prompts, max_tokens=6, ignore_eos=True)
        assert [out.ids for out in batch] == texts
        traffic = model.traffic()
        assert traffic["measured_bytes"] == traffic["predicted_bytes"] > 0, traffic
        memory = model.memory()
        if world().rank == 0:
            print(partition, *(m["weight_bytes"] for m in memory))
"""


@pytest.mark.mpi
def test_ops_on_ranks(folder: Path) -> None:
    """Two MPI ranks agree with one: ops that are split, replicated, and one of each."""
    model, plugin = write_ema(folder), folder / "ema.py"
    words = ["-m", "mpi4py", "-c", ON_RANKS, str(model), str(folder / "ema.toml")]
    split = mpirun(2, *words, str(plugin), "0&1", "0:3&1")
    assert split.returncode == 0, split.stderr
    text, rule = FILES["ema.py"], r"partition=nbflow\.OpPartition\(.*?\n    \)"
    plugin.write_text(re.sub(rule, 'partition="replicated"', text, flags=re.S))
    whole = mpirun(2, *words, str(plugin), "0&1")
    assert whole.returncode == 0, whole.stderr
    bytes_split, bytes_whole = (
        list(map(int, done.stdout.splitlines()[0].split()[1:])) for done in (split, whole)
    )
    hidden = 64
    saved = 4 * (hidden * hidden + hidden) // 2  # half of `rate` and `out` in float32
    assert [b - a for a, b in zip(bytes_split, bytes_whole, strict=True)] == [saved, saved]


def test_an_op_that_more_ranks_than_heads_share() -> None:
    spec = make_spec(n_heads=8, n_kv_heads=4)
    weights = {"q": ("n_heads * head_dim", "hidden_size"), "o": ("hidden_size", 256)}
    cuts = {"q": "rows", "o": "columns"}
    found = nbflow.register_op(
        "mine", reference=len, weights=weights,
        partition=nbflow.OpPartition(heads="n_heads", weights=cuts),
    )  # fmt: skip
    try:
        assert found.shard(spec, (1, 3), "q") == ((32, 96), None)
        assert found.shard(spec, (1, 3), "o") == (None, (32, 96))
        assert found.shard(spec, (1, 3), "x") == (None, None)
        odd = dataclasses.replace(found, partition=nbflow.OpPartition(heads=3, weights=cuts))
        with pytest.raises(
            UsageError, match=r"q has 256 rows, which must be a multiple of heads = 3"
        ):
            odd.n_heads(spec)
    finally:
        OPS.remove("mine")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"partition": "rows"}, "partition must be an nbflow.OpPartition or 'replicated'"),
        ({"partition": nbflow.OpPartition(4, {})}, "splits no weight; use partition='replicated'"),
        ({"partition": nbflow.OpPartition(4, {"v": "rows"})}, "unknown .*weight 'v'"),
        ({"partition": nbflow.OpPartition(4, {"w": "columns"})}, r"of w, \(8,\), must be 'rows'"),
        ({"partition": nbflow.OpPartition(4, {"w": "rows"}, "rows")}, "the op has none"),
        ({"partition": nbflow.OpPartition("?", {"w": "rows"})}, "heads of partition must be"),
        ({"partition": nbflow.OpPartition(4, {"w": "rows"}, x="rows")}, "of x, .* 'columns', got"),
        ({"weights": {"x": (8,)}, "partition": nbflow.OpPartition(4, {"x": "rows"})},
         "a weight cannot be named 'x'"),
    ],
)  # fmt: skip
def test_wrong_partitions_are_named(words: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        nbflow.register_op("mine", **{"reference": len, "weights": {"w": (8,)}, **words})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"reference": 1}, "reference must be a function"),
        ({"weights": {"W": ("hidden_size",)}}, "names of weights are lower-case"),
        ({"weights": {"w": "hidden_size"}}, "w must have a shape such as"),
        ({"state": ()}, "state must have a shape such as"),
    ],
)
def test_wrong_ops_are_named(words: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        nbflow.register_op("mine", **{"reference": len, **words})
