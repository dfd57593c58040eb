"""Formats of users: from a class of scalar functions to everything a built-in format can do."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
import uuid

import numpy as np
import pytest
from user_formats import Base3, Nibbles, NoForm

import nbflow_kernels as nk
from nbflow_kernels.benchmarks.formats import measure_speed
from nbflow_kernels.benchmarks.ops import choose
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS, QuantTensor, dequantize
from nbflow_kernels.formats.floats import FloatFormat
from nbflow_kernels.formats.user import register_format, unregister_format
from nbflow_kernels.plugins import load_plugin
from nbflow_kernels.quantized_matmul import cpu, cpu_user_formats, qmatmul, reference
from nbflow_kernels.quantized_matmul.cases import user_cases
from nbflow_kernels.quantizers import quantize
from nbflow_kernels.testing.checks import CheckError, check
from nbflow_kernels.testing.format_checks import check_format


@pytest.fixture
def register():
    names = []

    def add(user_class):
        names.append(user_class.name)
        return register_format(user_class)

    yield add
    for name in names:
        if name in FORMATS:
            unregister_format(name)


def weights(*shape):
    return np.random.default_rng(4).normal(0, 0.02, shape).astype(np.float32)


@pytest.mark.parametrize("user_class", [Base3, Nibbles, NoForm])
def test_battery(register, user_class):
    format = register(user_class)
    report = check_format(format.name)
    assert report.bits_per_weight == 8 * user_class.block_bytes / user_class.block_size
    # N(0, 1) with 3 levels at the best places: relative RMS 0.436; with 16 of q4_0's: 0.086
    limits = {"base3_b20": (0.42, 0.46), "nibbles_b32": (0.08, 0.09), "noform_b32": (0.08, 0.09)}
    low, high = limits[format.name]
    assert low < report.error < high
    assert 0.002 < report.int8_error < 0.02


@pytest.mark.parametrize("name", ["q4_0", "bf16"])
def test_built_in_formats_pass_the_same_battery(name):
    report = check_format(name, quantizer="reference")
    assert report.bits_per_weight == FORMATS[name].bits_per_weight


def test_with_an_integer_form_products_are_the_built_in_ones(register):
    # the same bytes as q4_0: the same packed layout, the same kernel, the same bits
    register(Nibbles)
    w = quantize(weights(40, 128), "nibbles_b32")
    same = QuantTensor.from_bytes(w.tobytes(), "q4_0", w.shape)
    assert np.array_equal(dequantize(w), dequantize(same))
    assert w.packed().form == same.packed().form
    assert np.array_equal(w.packed().data, same.packed().data)
    x = np.random.default_rng(5).standard_normal((3, 128), dtype=np.float32)
    assert np.array_equal(qmatmul(x, w), qmatmul(x, same))


def test_without_it_no_second_copy_of_the_weights_is_made(register):
    register(NoForm)
    w = quantize(weights(40, 128), "noform_b32")
    x = np.ones((2, 128), np.float32)
    before = qmatmul(x, w)
    w.drop_storage()
    assert w.packed_nbytes == 0
    assert w.data.nbytes == w.nbytes
    assert np.array_equal(qmatmul(x, w), before)
    with pytest.raises(UsageError, match="stores no integers"):
        w.packed()


@pytest.mark.parametrize("columns", [64, 100, 2100])
def test_bfloat16_products(register, columns):
    register(Base3)
    w = quantize(weights(19, columns), "base3_b20")
    x = np.random.default_rng(6).standard_normal((5, columns), dtype=np.float32)
    out = np.full((5, 19), np.nan, np.float32)
    cpu_user_formats.matmul(x, w, None, False, out, bf16=True)
    wanted = reference.qmatmul(x, w)
    # each factor is off by 2**-9 of itself at most; the errors of K products add at random
    size = np.sqrt(columns) * 2 * 2.0**-9 * np.abs(reference.weights(w)).max()
    assert np.abs(out - wanted).max() < 4 * size
    one = np.full((1, 19), np.nan, np.float32)
    cpu_user_formats.matmul(x[2:3], w, None, False, one, bf16=True)
    assert np.array_equal(one[0], out[2])


def test_importance_reaches_the_users_quantizer(register):
    register(NoForm)
    x = weights(8, 64)
    important = np.where(np.arange(64) % 32 < 4, 1000, 1).astype(np.float32)
    plain, weighted = (
        np.square(dequantize(quantize(x, "noform_b32", importance=i)) - x)[:, :4].sum()
        for i in (None, important)
    )
    assert weighted < plain
    register(Base3)
    with pytest.raises(UsageError, match=r"knows no importance; .*quantize_block_weighted"):
        quantize(x, "base3_b20", importance=important)


def test_names_are_protected_and_registering_again_is_harmless(register):
    format = register(Base3)
    assert register(Base3) is format
    assert "base3_b20" in FORMATS
    assert copy.deepcopy(format) is format
    other = type("Other", (Base3,), {"__module__": "nowhere"})
    with pytest.raises(UsageError, match="'base3_b20' is registered already, with another class"):
        register_format(other)
    for name in ("q4_0", "q4", "fp16"):
        with pytest.raises(UsageError, match=f"'{name}' is a built-in format"):
            register_format(type("X", (Base3,), {"name": name}))
    with pytest.raises(UsageError, match="'q4' is a built-in format, which cannot be unregistered"):
        unregister_format("q4")
    unregister_format("base3_b20")
    with pytest.raises(UsageError, match="unknown format 'base3_b20'"):
        quantize(weights(1, 20), "base3_b20")


def test_pickling_finds_the_format_by_name(register):
    register(Base3)
    w = quantize(weights(3, 40), "base3_b20")
    data = pickle.dumps(w)
    back = pickle.loads(data)
    assert back.format is w.format
    assert back.tobytes() == w.tobytes()
    unregister_format("base3_b20")
    with pytest.raises(UsageError, match="unknown format 'base3_b20'"):
        pickle.loads(data)


def changed(**parts):
    return type("Changed", (NoForm,), {"name": "changed", **parts})


def bad_line(x, out):
    out[0] = x.nonsense()


def out_of_bounds(x, out):
    out[len(out)] = 1


def writes_weights(x, out):
    x[0] = 1


def leaves_bytes(x, out):
    out[0] = 1


def gives_nan(block, out):
    out[:] = np.nan


def leaves_weights(block, out):
    out[0] = 1.0


def raises(x, out):
    if x[0] > 1e30 or x[0] < 1e30:
        raise ValueError("too hard")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"name": "Bad Name"}, "name must be lower-case letters"),
        ({"block_size": 0}, "block_size must be an integer in 1..4096, got 0"),
        ({"block_bytes": 2.5}, "block_bytes must be an integer"),
        ({"quantize_block": 3}, "quantize_block must be a function, got int"),
        ({"quantize_block": staticmethod(lambda x: x)}, "must take 2 arguments, it takes 1"),
        ({"integer_form": 4}, "integer_form must be a .*CodecSpec, got int"),
        (
            {"quantize_block": staticmethod(bad_line)},
            rf"quantize_block, line {bad_line.__code__.co_firstlineno + 1}: .*Unknown attribute",
        ),
        (
            {"quantize_block": staticmethod(out_of_bounds)},
            "quantize_block.*: IndexError: index is out of bounds",
        ),
        ({"quantize_block": staticmethod(writes_weights)}, "line .* must not be written"),
        ({"quantize_block": staticmethod(leaves_bytes)}, "it must write every byte of out"),
        ({"quantize_block": staticmethod(raises)}, "ValueError: too hard"),
        (
            {"dequantize_block": staticmethod(gives_nan)},
            "gives nan for weight 0",
        ),
        ({"dequantize_block": staticmethod(leaves_weights)}, "gives nan for weight 1"),
    ],
)
def test_errors_of_a_class_say_where(parts, message):
    with pytest.raises(UsageError, match=message):
        register_format(changed(**parts))
    assert "changed" not in FORMATS


def test_missing_parts_are_named():
    with pytest.raises(TypeError, match="register_format takes a class, got int"):
        register_format(3)
    with pytest.raises(UsageError, match="class int: a format needs name; it has none"):
        register_format(int)
    with pytest.raises(UsageError, match="with this integer_form it needs a static method code"):
        register_format(changed(integer_form=Nibbles.integer_form))


def test_an_integer_form_that_says_something_else_is_refused():
    def other_code(block, i):
        return 15 - ((block[2 + i % 16] >> (i // 16 * 4)) & 15)

    wrong = type("Wrong", (Nibbles,), {"name": "wrong", "code": staticmethod(other_code)})
    with pytest.raises(UsageError, match="the integer form gives"):
        register_format(wrong)


def test_the_battery_finds_a_format_whose_result_depends_on_other_rows():
    class Moody(FloatFormat):
        def quantize_rows(self, x, n_columns, quantizer, importance=None):
            return super().quantize_rows(x * np.float32(len(x)), n_columns, quantizer, importance)

    old = FORMATS["f32"]
    moody = Moody(**{f: getattr(old, f) for f in old.__dataclass_fields__})
    with pytest.raises(CheckError, match="a row's bytes depend on the other rows"):
        check_format(moody)


SOURCE = """
import numpy as np
import nbflow_kernels as nk

class Bytes:
    name = "bytes_b8"
    block_size = 8
    block_bytes = 8

    @staticmethod
    def quantize_block(x, out):
        for i in range(8):
            out[i] = np.uint8(min(max(round(x[i] * SCALE) + 128, 0), 255))

    @staticmethod
    def dequantize_block(block, out):
        for i in range(8):
            out[i] = (np.float32(block[i]) - 128) / SCALE

nk.register_format(Bytes)
"""


def test_files_are_executed_once_and_edits_are_seen(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE.replace("class Bytes", "SCALE = np.float32(64)\n\nclass Bytes"))
    plugin = load_plugin(file)
    try:
        assert load_plugin(file) is plugin
        assert list(map(str, plugin.registered)) == ["format bytes_b8"]
        x = np.float32([[0.5] * 8])
        assert quantize(x, "bytes_b8").data[0, 0] == 128 + 32
        file.write_text(file.read_text().replace("float32(64)", "float32(32)"))
        with pytest.raises(UsageError, match="registered already, with another class"):
            load_plugin(file)
        unregister_format("bytes_b8")
        load_plugin(file)
        assert quantize(x, "bytes_b8").data[0, 0] == 128 + 16
    finally:
        unregister_format("bytes_b8")


def test_files_that_are_not_plugins(tmp_path):
    with pytest.raises(UsageError, match="cannot read the plugin"):
        load_plugin(tmp_path / "absent.py")
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(UsageError, match="registers nothing; a plugin calls register_format"):
        load_plugin(tmp_path / "empty.py")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UsageError, match="raised ZeroDivisionError: division by zero"):
        load_plugin(tmp_path / "broken.py")


def test_kernels_of_a_file_are_kept_on_disk(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE.replace("class Bytes", "SCALE = np.float32(64)\n\nclass Bytes"))
    with file.open("a") as stream:
        stream.write(f"# {uuid.uuid4()}\n")  # no earlier run has compiled it
    script = textwrap.dedent(f"""
        import numpy as np
        import nbflow_kernels as nk
        from nbflow_kernels.quantized_matmul import cpu_user_formats
        from nbflow_kernels.formats import user_jit as user_code
        f = nk.FORMATS[nk.load_plugin({str(file)!r}).registered[0].name]
        w = nk.quantize(np.ones((3, 24), np.float32), f)
        nk.qmatmul(np.ones((1, 24), np.float32), w)
        kernels = user_code.quantizer(f.code), cpu_user_formats._gemm(f.code)
        print(*(k.stats.cache_hits.total() > 0 for k in kernels))
    """)
    for wanted in ("False False", "True True"):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == wanted


def test_a_class_without_a_file_works_in_memory(register):
    scope = {}
    exec(
        compile(
            SOURCE.replace("nk.register_format(Bytes)", "SCALE = np.float32(64)"), "<cell>", "exec"
        ),
        scope,
    )
    format = register(scope["Bytes"])
    assert not format.code.on_disk
    w = quantize(np.float32([[0.5, -0.25] * 12]), "bytes_b8")
    assert np.array_equal(dequantize(w)[0, :2], np.float32([0.5, -0.25]))
    assert qmatmul(np.ones((1, 24), np.float32), w) == np.float32([[3.0]])


def test_a_registered_format_can_be_benchmarked(register):
    register(Base3)
    names = [case.id for case in choose(["qmatmul-llama2_7b_base3_b20_1_int8"])]
    assert names == ["qmatmul-llama2_7b_base3_b20_1_int8"]
    odd = [case for case in user_cases() if case.name.startswith("base3_b20_odd")]
    assert len(odd) == 3
    assert all(check(case) <= 1 for case in odd)
    speed = measure_speed("base3_b20", (40, 100), 2)
    assert speed["gemv_int8_share_of_read"] > 0
    assert speed["quantize_search_mweights_per_s"] > 0


def test_int8_rows_are_widened_to_what_they_stand_for():
    x = np.random.default_rng(7).standard_normal((3, 50), dtype=np.float32)
    rows = cpu.Int8Rows.empty(3, 50)
    cpu.quantize_activations(x, rows)
    out = np.full((3, 50), np.nan, np.float32)
    cpu_user_formats.dequantize_activations(rows, out)
    assert np.abs(out - x).max() <= 0.51 * rows.scales.max()
    assert nk.get_num_threads() >= 1
