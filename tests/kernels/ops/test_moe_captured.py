"""Layers of experts in a captured graph: bitwise those of `fused_moe`, whatever the router says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.cpu import graph, interpreter
from nbflow_kernels.cpu.graph import CpuGraph
from nbflow_kernels.cpu.parallel_for import capture, run_graph, set_num_threads
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.csr import CsrMatrix
from nbflow_kernels.moe.cpu_captured import MAX_PAIRS, ExpertLayer, Scratch
from nbflow_kernels.quantized_matmul.int8_activations import Int8Rows

pytestmark = pytest.mark.skipif(interpreter.is_on(), reason="graphs need machine code")

RNG = np.random.default_rng(5)
E, K, H, F = 6, 3, 128, 48
SCRATCH = Scratch(lambda name, *shape: np.full(shape, np.nan, np.float32), Int8Rows.empty)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def matrices(kind: str, rows: int, columns: int) -> list[Any]:
    made: list[Any] = list(normal(E, rows, columns) / np.float32(columns**0.5))
    if kind == "float16":
        return [w.astype(np.float16) for w in made]
    if kind == "float32":
        return made
    name = kind.removesuffix(" outliers")
    made = [nk.quantize(w, name, quantizer="reference") for w in made]
    if name != kind:  # another number of them in each matrix
        for i, w in enumerate(made):
            dense = np.zeros((rows, columns), np.float32)
            dense[:: 7 + i, ::5] = normal(*dense[:: 7 + i, ::5].shape)
            made[i] = nk.QuantTensor(w.format, w.shape, w.data, CsrMatrix.from_dense(dense))
    return made


class Case:
    """A layer captured for a number of tokens, and the same by `fused_moe`."""

    def __init__(
        self, n_tokens: int, layer: dict[str, Any], first: int = 0, **options: Any
    ) -> None:
        self.first, self.options, self.arguments = first, {"top_k": K, **options}, layer
        n = 8  # experts of all ranks
        self.x, self.logits = normal(n_tokens, H), normal(n_tokens, n)
        self.bias, self.scale = normal(n) / 4, normal(n)
        self.out = np.full((n_tokens, H), np.nan, np.float32)
        made = ExpertLayer(**layer)
        assert made.can_capture(n_tokens * K)
        with capture() as captured:
            made.launch(
                self.x, self.logits, self.options, self.bias, self.scale, first, SCRATCH, self.out
            )
        assert captured.complete
        self.calls = captured.calls

    def wanted(self) -> np.ndarray:
        weights, ids = nk.moe_routing(self.logits, correction_bias=self.bias, **self.options)
        weights *= self.scale[ids]
        ids -= np.int32(self.first)
        ids[(ids < 0) | (ids >= E)] = -1
        found: np.ndarray = nk.fused_moe(
            self.x, topk_weights=weights, topk_ids=ids, **self.arguments
        )
        return found

    def check(self, n_threads: int) -> None:
        made = CpuGraph(self.calls, n_threads)
        set_num_threads(n_threads)
        for _ in range(3):
            self.x[...], self.logits[...] = normal(*self.x.shape), normal(*self.logits.shape)
            self.out[...] = np.nan
            run_graph(made)
            np.testing.assert_array_equal(self.out, self.wanted())


@pytest.fixture(autouse=True)
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MIN_WORK_PER_PART", 1)
    monkeypatch.setattr(graph, "DYNAMIC_WORK", 100_000)


@pytest.mark.parametrize("n_tokens", [1, 2, 21])
@pytest.mark.parametrize(
    ("kind", "activations"),
    [
        ("float32", "f32"), ("float16", "int8"), ("f16", "f32"), ("bf16", "bf16"),
        ("q4_0", "int8"), ("q4_0", "f32"), ("q4_0", "bf16"), ("q8_0 outliers", "int8"),
        ("q8_0 outliers", "f32"),
    ],
)  # fmt: skip
def test_bitwise_the_layer_of_every_arithmetic(kind: str, activations: str, n_tokens: int) -> None:
    layer = {
        "gate_up": matrices(kind, F, H),
        "up": matrices(kind, F, H),
        "down": matrices(kind, H, F),
        "activation": "silu",
        "activations": activations,
    }
    Case(n_tokens, layer).check(2)


@pytest.mark.parametrize("weigh_inputs", [False, True])
@pytest.mark.parametrize("form", ["apart", "joined", "without gate", "several formats of parts"])
def test_bitwise_the_layer_of_every_form(form: str, weigh_inputs: bool) -> None:
    """Biases, experts of other ranks, and groups of experts in all."""
    layer = {
        "gate_up": matrices("q4_0", F, H),
        "gate_up_bias": normal(E, F),
        "down": matrices("q8_0", H, F),
        "down_bias": normal(E, H),
        "activation": "relu2" if form == "without gate" else "swigluoai",
        "gated": form != "without gate",
        "weigh_inputs": weigh_inputs,
        "activations": "int8",
    }
    if form == "joined":
        layer |= {"gate_up": matrices("q4_0", 2 * F, H), "gate_up_bias": normal(E, 2 * F)}
    elif form != "without gate":
        kind = "float32" if form == "several formats of parts" else "q4_0"
        layer |= {"up": matrices(kind, F, H), "up_bias": normal(E, F)}
    groups = {"scoring": "sigmoid", "n_groups": 4, "top_k_groups": 2, "renormalize": False}
    for n_threads in (1, 3):
        Case(5, layer, first=2, **groups).check(n_threads)


def test_logits_without_a_choice_are_named() -> None:
    parts = {"gate_up": matrices("f16", F, H), "down": matrices("f16", H, F // 2)}
    case = Case(2, {**parts, "activation": "silu"})
    case.logits[1, 3] = np.nan
    with pytest.raises(UsageError, match="router's logits of a token must not have a NaN"):
        run_graph(CpuGraph(case.calls, 1))


def test_what_a_graph_cannot_choose_among_is_not_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    down, mixed = matrices("q4_0", H, F), matrices("q4_0", F, H)
    mixed[3] = matrices("q8_0", F, H)[0]
    same = {"gate_up": matrices("q4_0", F, H), "activation": "silu", "gated": False}
    assert not ExpertLayer(**same | {"gate_up": mixed, "down": down}).can_capture(1)
    layer = ExpertLayer(**same, down=down)
    assert layer.can_capture(1)
    assert layer.can_capture(MAX_PAIRS)
    assert not layer.can_capture(MAX_PAIRS + 1)
    monkeypatch.setattr(interpreter, "is_on", lambda: True)
    assert not layer.can_capture(1)
