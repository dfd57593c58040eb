"""Torch checkpoints, written by torch (tools/golden/torch_pickle.py) and by hand, read by ours."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_models import write_llama
from torch_files import MAGIC_NUMBER, Name, Opcodes, Persistent, Raw, write_legacy, write_zip

from nbflow.checkpoint import open_weights
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.program import build
from nbflow.spec import check, resolve
from nbflow_kernels.errors import UsageError

GOLDEN = Path(__file__).parents[1] / "golden" / "pickle"
VALUES = {"views_legacy": "views", "views_protocol4": "views"}
REBUILD = "torch._utils _rebuild_tensor_v2"


@pytest.mark.parametrize(
    "file",
    ["dtypes.pt", "views.pt", "views_legacy.pt", "views_protocol4.pt", "training.pt",
     "module_legacy.bin"],
)  # fmt: skip
def test_reads_what_torch_wrote(file: str) -> None:
    stem = file.split(".")[0]
    expected = np.load(GOLDEN / f"{VALUES.get(stem, stem)}.npz")
    with open_weights(GOLDEN / file) as weights:
        assert weights.format == "pickle"
        assert sorted(weights.names()) == sorted(expected)
        for name in weights.names():
            got, wanted = weights.array(name), expected[name]
            assert got.dtype == wanted.dtype
            assert got.shape == wanted.shape == weights.shape(name)
            assert got.flags.c_contiguous
            np.testing.assert_array_equal(got, wanted)
            for rows, columns in (((0, 1), None), (None, (1, 2)), ((1, 2), (0, 2))):
                if got.ndim == 2 and got.size:
                    part = weights.array(name, rows=rows, columns=columns)
                    index = slice(*(rows or (None,))), slice(*(columns or (None,)))
                    np.testing.assert_array_equal(part, wanted[index])


def test_types_and_names() -> None:
    with open_weights(GOLDEN / "dtypes.pt") as weights:
        assert weights.dtype("float8_e4m3fn") == "f8_e4m3"
        assert weights.dtype("bfloat16") == "bf16"
        assert weights.n_bytes("bfloat16") == 24
    with open_weights(GOLDEN / "training.pt") as weights:
        names = weights.names()
    assert names[:2] == ["weight", "bias"]  # without "model.", in the file's order
    assert "optimizer.state.0.exp_avg" in names


def test_only_the_bytes_asked_for_are_read() -> None:
    with open_weights(GOLDEN / "views.pt") as weights:
        assert weights.bytes_read == 0
        for name, rows, n_bytes in (
            ("base", (1, 3), 80),
            ("rows", (1, 2), 40),
            ("scalar", None, 4),
            ("transposed", None, 240),  # as it lies, then turned
            ("repeated", None, 12),
            ("empty", None, 0),
        ):
            before = weights.bytes_read
            weights.array(name, rows=rows)
            assert weights.bytes_read - before == n_bytes, name


def test_hashes_are_those_of_the_elements_row_by_row() -> None:
    import hashlib

    expected = np.load(GOLDEN / "views.npz")
    with open_weights(GOLDEN / "views.pt") as weights:
        for name in ("base", "transposed", "every_second", "repeated", "permuted"):
            assert weights.sha256(name) == hashlib.sha256(expected[name].tobytes()).hexdigest()
        assert weights.sha256("base") == weights.sha256("tied")


def test_complex_numbers_are_listed_but_not_read() -> None:
    with open_weights(GOLDEN / "complex.pt") as weights:
        assert (weights.dtype("z"), weights.n_bytes("z")) == ("c64", 16)
        with pytest.raises(UsageError, match="'z' is stored as c64, which cannot be read"):
            weights.array("z")


def test_big_endian_storages(tmp_path: Path) -> None:
    """The file of torch with every storage turned round, as a big-endian machine writes it."""
    sizes = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4,
             "int16": 2, "uint64": 8, "uint32": 4, "uint16": 2}  # fmt: skip
    with zipfile.ZipFile(GOLDEN / "dtypes.pt") as old:
        members = {info.filename: old.read(info) for info in old.infolist()}
    order = list(np.load(GOLDEN / "dtypes.npz"))
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as new:
        for name, data in members.items():
            key = name.split("/")[-1]
            if "/data/" in name:
                data = np.frombuffer(data, f"V{sizes.get(order[int(key)], 1)}")
                data = np.frombuffer(data.tobytes(), f">u{data.itemsize}").astype("<u8")
                data = data.astype(f"<u{sizes.get(order[int(key)], 1)}").tobytes()
            new.writestr(name, b"big" if key == "byteorder" else data)
    expected = np.load(GOLDEN / "dtypes.npz")
    with open_weights(tmp_path / "x.pt") as weights:
        for name in weights.names():
            got = weights.array(name)
            np.testing.assert_array_equal(got, expected[name])
            assert got.dtype.isnative


def tensor(key: str = "0", shape: tuple[int, ...] = (2, 3), **fields: object) -> object:
    """Return the call that makes a tensor, by default six float32 of storage `key`."""
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    values = {
        "kind": "torch FloatStorage", "elements": 6, "offset": 0, "strides": strides,
        "view": (),
    } | fields  # fmt: skip
    identity = ("storage", Name(values["kind"]), key, "cpu", values["elements"], *values["view"])
    return Name(REBUILD)(
        Persistent(identity), values["offset"], shape, values["strides"], False, None
    )


SIX = np.arange(6, dtype=np.float32)


def test_parts_of_legacy_storages(tmp_path: Path) -> None:
    """Before torch 0.4 a storage could be a part of another one."""
    path = tmp_path / "x.bin"
    whole = tensor(shape=(2,), elements=6, offset=1, view=(None,))
    part = tensor(shape=(3,), elements=6, view=(("p", 2, 4),), offset=1)
    write_legacy(path, {"whole": whole, "part": part}, {"0": SIX.tobytes()}, {"0": 6})
    with open_weights(path) as weights:
        np.testing.assert_array_equal(weights.array("whole"), SIX[1:3])
        np.testing.assert_array_equal(weights.array("part"), SIX[3:6])


def test_deep_names_and_wrappers(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    t = tensor()
    cases = [
        (t, ["tensor"]),
        ([t, (t, {})], ["0", "1.0"]),
        ({"a": {"b": t}, 3: t, None: t, b"c": t, True: t}, ["a.b", "3", "None", "c", "True"]),
        ({"state_dict": {"x": t}, "epoch": 3}, ["x"]),
        ({"state_dict": {"x": t}, "x": t}, ["state_dict.x", "x"]),
        ({"model": {"x": t}, "module": {"x": t}}, ["model.x", "module.x"]),
        ({"lr": 0.1}, []),
    ]
    for value, names in cases:
        write_zip(path, value, {"0": SIX.tobytes()})
        with open_weights(path) as weights:
            assert weights.names() == names
            for name in names:
                np.testing.assert_array_equal(weights.array(name), SIX.reshape(2, 3))
    write_zip(path, {"a": {"b": t}, "a.b": t}, {"0": SIX.tobytes()})
    with pytest.raises(UsageError, match=r"two tensors have the name 'a\.b'"):
        open_weights(path)


def test_storages_over_4_gb(tmp_path: Path) -> None:
    """A sparse file: the archive needs zip64, the tensor's offset more than 32 bits."""
    path = tmp_path / "x.pt"
    n = (5 << 30) // 4
    big = tensor(shape=(n,), elements=n)
    last = tensor(shape=(3,), elements=n, offset=n - 3)
    write_zip(path, {"big": big, "last": last}, {"0": SIX.tobytes()}, sparse={"0": 4 * n})
    assert os.stat(path).st_blocks * 512 < 1 << 20
    with open_weights(path) as weights:
        assert weights.n_bytes("big") == 5 << 30
        np.testing.assert_array_equal(weights.array("big", rows=(0, 6)), SIX)
        np.testing.assert_array_equal(weights.array("big", rows=(n - 2, n)), [0, 0])
        np.testing.assert_array_equal(weights.array("last"), [0, 0, 0])
        assert weights.bytes_read == 24 + 8 + 12


def test_a_tensor_that_repeats_elements_is_not_blown_up(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    big = tensor(shape=(1 << 30, 1 << 10), strides=(0, 0), elements=1)
    write_zip(path, {"big": big}, {"0": SIX.tobytes()})
    with open_weights(path) as weights:
        assert weights.shape("big") == (1 << 30, 1 << 10)
        with pytest.raises(UsageError, match="'big' repeats its elements"):
            weights.array("big")
        with pytest.raises(UsageError, match="'big' repeats its elements"):
            weights.sha256("big")
        assert weights.array("big", rows=(7, 9)).shape == (2, 1 << 10)


@pytest.mark.parametrize("seed", range(8))
def test_views_of_any_strides(tmp_path: Path, seed: int) -> None:
    """Random strides, smaller and larger than one read, against NumPy."""
    from numpy.lib.stride_tricks import as_strided

    rng = np.random.default_rng(seed)
    data = rng.integers(0, 1 << 16, 300_000, dtype=np.uint16).astype(np.int16)
    tensors, expected = {}, {}
    for i in range(20):
        shape = tuple(int(n) for n in rng.integers(1, 9, rng.integers(1, 4)))
        scale = 10 ** rng.integers(0, 5)
        strides = tuple(int(s) for s in rng.integers(0, scale + 1, len(shape)))
        offset = int(rng.integers(0, 50))
        tensors[f"t{i}"] = tensor(
            shape=shape, strides=strides, offset=offset, kind="torch ShortStorage",
            elements=len(data),
        )  # fmt: skip
        expected[f"t{i}"] = as_strided(data[offset:], shape, [2 * s for s in strides])
    write_zip(tmp_path / "x.pt", tensors, {"0": data.tobytes()})
    with open_weights(tmp_path / "x.pt") as weights:
        for name, wanted in expected.items():
            np.testing.assert_array_equal(weights.array(name), wanted)
            if wanted.ndim == 2:
                rows, columns = (wanted.shape[0] // 2, wanted.shape[0]), (0, 1)
                np.testing.assert_array_equal(
                    weights.array(name, rows=rows, columns=columns), wanted[slice(*rows), :1]
                )


def test_names_of_python_2(tmp_path: Path) -> None:
    """Strings as bytes, long integers in decimal, an OrderedDict from a list of pairs."""
    ordered = Name("collections OrderedDict")([["a", tensor()]])
    parts = Opcodes().value(ordered).data.replace(b"X\x01\0\0\0a", b"U\x01a")
    parts = parts.replace(b"K\x06", b"L6L\n")
    write_zip(tmp_path / "x.pt", None, {"0": SIX.tobytes()}, pickle=b"\x80\x02" + parts + b".")
    with open_weights(tmp_path / "x.pt") as weights:
        np.testing.assert_array_equal(weights.array("a"), SIX.reshape(2, 3))


def logits(model: Path, spec_file: Path | None = None) -> np.ndarray:
    """Run a model in NumPy, which compiles nothing."""
    spec = resolve(model, spec=spec_file).spec
    program = build(spec)
    with open_weights(model) as file:
        check(spec, file)
        return ReferenceExecutor(program, WeightLoader(program, file, None)).logits(np.arange(9))


def write_state_dict(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write float32 tensors as torch would."""
    calls, storages = {}, {}
    for i, (name, array) in enumerate(tensors.items()):
        calls[name] = tensor(str(i), array.shape, elements=array.size)
        storages[str(i)] = array.astype(np.float32).tobytes()
    write_zip(path, calls, storages)


@pytest.mark.parametrize("layout", ["one file", "shards", "bare file", "wrapped"])
def test_models_run_from_pickles(tmp_path: Path, layout: str) -> None:
    write_llama(tmp_path, n_layers=2, tied_head=False)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = logits(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    target = tmp_path
    if layout == "one file":
        write_state_dict(tmp_path / "pytorch_model.bin", tensors)
    elif layout == "bare file":
        write_state_dict(tmp_path / "checkpoint.pth", tensors)
        target = tmp_path / "checkpoint.pth"
    elif layout == "wrapped":
        calls = {n: tensor(n, a.shape, elements=a.size) for n, a in tensors.items()}
        data = {n: a.astype(np.float32).tobytes() for n, a in tensors.items()}
        write_zip(tmp_path / "pytorch_model.bin", {"state_dict": calls, "epoch": 1}, data)
    else:
        names = list(tensors)
        parts = {"a.bin": names[:5], "b.bin": names[5:]}
        for file, some in parts.items():
            write_state_dict(tmp_path / file, {name: tensors[name] for name in some})
        weight_map = {name: file for file, some in parts.items() for name in some}
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    np.testing.assert_array_equal(logits(target), expected)


def test_an_optimizer_beside_the_weights_is_named_in_the_spec(tmp_path: Path) -> None:
    write_llama(tmp_path, n_layers=2, tied_head=False)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = logits(tmp_path)
    calls = {n: tensor(n, a.shape, elements=a.size) for n, a in tensors.items()}
    data = {n: a.astype(np.float32).tobytes() for n, a in tensors.items()}
    state = {"state": {0: {"exp_avg": tensor("m")}}}
    target = tmp_path / "training.pt"
    write_zip(target, {"model": calls, "optimizer": state}, data | {"m": SIX.tobytes()})
    with pytest.raises(UsageError, match=r"optimizer\.state\.0\.exp_avg \(2, 3\)"):
        logits(target)
    spec = tmp_path / "spec.toml"
    spec.write_text('family = "llama"\n[ignored]\ntensors = ["optimizer.*"]\n')
    np.testing.assert_array_equal(logits(target, spec), expected)


def test_values_without_meaning_are_skipped(tmp_path: Path) -> None:
    float64 = Name("numpy dtype")("f8", False, True)
    built = Raw(Opcodes().value(float64).value((3, "<", None)).data + b"b")
    namespace = Raw(Opcodes().value(Name("argparse Namespace")).data + b")\x81}X\1\0\0\0aK\1sb")
    value = {
        "loss": Name("numpy.core.multiarray scalar")(built, b"12345678"),
        "arguments": namespace,
        "counts": Name("collections Counter")({"a": 1}),
        "lists": Name("collections defaultdict")(Name("__builtin__ list")),
        "kinds": Name("__builtin__ set")(["a"]),
        "device": Name("torch device")("cuda", 0),
        "bytes": Name("_codecs encode")("x", "latin1"),
        "w": tensor(),
    }
    write_zip(tmp_path / "x.pt", value, {"0": SIX.tobytes()})
    with open_weights(tmp_path / "x.pt") as weights:
        assert weights.names() == ["w"]


def test_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    block = text.split("```python\n")[1].split("```")[0]
    write_llama(tmp_path, n_layers=1, tied_head=False)
    write_state_dict(tmp_path / "pytorch_model.bin", load_file(tmp_path / "model.safetensors"))
    monkeypatch.chdir(tmp_path)
    exec(compile(block.replace("(100, 200)", "(50, 100)"), "<checkpoints.md>", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert "lm_head.weight f32 (101, 64) 25856" in lines
    assert len(lines[-1].split()[1]) == 64


def test_magic_number_of_the_helpers() -> None:
    """The hand-made legacy files begin as torch's do."""
    data = (GOLDEN / "views_legacy.pt").read_bytes()
    assert data[4:14] == MAGIC_NUMBER.to_bytes(10, "little")
    assert struct.unpack_from("<H", data, 0)[0] == 0x0280
