"""Mixture of experts: routers of known models, batch invariance, shared threads, errors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.cpu import parallel_for
from nbflow_kernels.errors import MissingExtraError, UsageError
from nbflow_kernels.moe import cpu, reference

RNG = np.random.default_rng(12)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


# ---- routing ----------------------------------------------------------------------------------


def test_mixtral_is_the_softmax_of_the_chosen_logits() -> None:
    logits = normal(50, 8)
    weights, ids = nk.moe_routing(logits, 2)
    chosen = np.sort(logits, axis=1)[:, :-3:-1].astype(float)
    wanted = np.exp(chosen) / np.exp(chosen).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(np.take_along_axis(logits, ids, 1), chosen)
    np.testing.assert_allclose(weights, wanted, rtol=1e-6)  # a few float32 roundings


def test_deepseek_v3_chooses_by_the_bias_and_weighs_without_it() -> None:
    logits, bias = normal(40, 16), np.zeros(16, np.float32)
    bias[5] = 10.0  # always chosen, in a group that is always chosen
    weights, ids = nk.moe_routing(
        logits, 4, scoring="sigmoid", correction_bias=bias, n_groups=4, top_k_groups=2,
        group_score="top2_sum", routed_scaling_factor=2.5,
    )  # fmt: skip
    assert (ids[:, 0] == 5).all()
    assert all(len(set((row // 4).tolist())) <= 2 for row in ids)
    np.testing.assert_allclose(weights.sum(axis=1), 2.5, rtol=1e-6)
    scores = 1 / (1 + np.exp(-np.take_along_axis(logits, ids, 1).astype(float)))
    np.testing.assert_allclose(weights, 2.5 * scores / scores.sum(1, keepdims=True), rtol=1e-6)


def test_equal_experts_go_by_number_and_excluded_ones_are_not_used() -> None:
    logits = np.zeros((1, 6), np.float32)
    assert nk.moe_routing(logits, 3)[1].tolist() == [[0, 1, 2]]
    logits[0, [0, 2, 3, 4]] = -np.inf
    weights, ids = nk.moe_routing(logits, 3)
    assert ids.tolist() == [[1, 5, -1]]
    assert weights.tolist() == [[0.5, 0.5, 0.0]]


def test_small_scores_are_skipped_and_the_others_renormalized() -> None:
    logits = np.log(np.array([[0.9, 0.09, 1e-6, 0.01]], np.float32))
    weights, ids = nk.moe_routing(logits, 4, min_score=1e-5)
    assert ids.tolist() == [[0, 1, 3, -1]]
    np.testing.assert_allclose(weights, [[0.9, 0.09, 0.01, 0.0]], rtol=1e-5)


def test_permutation_sends_every_pair_to_its_expert() -> None:
    ids = RNG.integers(-1, 5, (30, 3)).astype(np.int32)
    rows, indptr, inverse = nk.moe_permute(ids, 5)
    for t in range(30):
        for j in range(3):
            e, place = ids[t, j], inverse[t, j]
            if e < 0:
                assert place == -1
            else:
                assert indptr[e] <= place < indptr[e + 1]
                assert rows[place] == t
    assert np.bincount(rows, minlength=30).tolist() == [3] * 30
    for e in range(5):
        assert (np.diff(rows[indptr[e] : indptr[e + 1]]) >= 0).all()  # in order of tokens


# ---- grouped GEMM -----------------------------------------------------------------------------


def stacks() -> dict[str, Any]:
    dense = normal(4, 20, 64) / 8
    return {
        "float32": dense,
        "float16": dense.astype(np.float16),
        "q4": nk.quantize(dense, "q4", quantizer="reference"),
        "f16": nk.quantize(dense, "f16"),
    }


@pytest.mark.parametrize("kind", ["float32", "float16", "q4", "f16"])
@pytest.mark.usefixtures("split_everything")
def test_rows_are_those_of_the_single_products(kind: str) -> None:
    weights, x = stacks()[kind], normal(9, 64)
    indptr = np.array([0, 1, 1, 6, 9], np.int32)
    parallel_for.set_num_threads(3)
    y = nk.grouped_matmul(x, weights, indptr)
    matrices = weights.matrices() if isinstance(weights, nk.QuantTensor) else weights
    product: Any = nk.qmatmul if isinstance(weights, nk.QuantTensor) else nk.matmul
    for e in range(4):
        part = slice(indptr[e], indptr[e + 1])
        np.testing.assert_array_equal(y[part], product(x[part], matrices[e]))
    for r in range(9):  # bitwise the same alone
        e = int(np.searchsorted(indptr, r, side="right")) - 1
        np.testing.assert_array_equal(y[r], product(x[r : r + 1], matrices[e])[0])


def test_matrices_of_a_tensor_are_made_once() -> None:
    stack = stacks()["q4"]
    assert stack.matrices() is stack.matrices()
    assert [m.shape for m in stack.matrices()] == [(20, 64)] * 4
    np.testing.assert_array_equal(nk.dequantize(stack.matrices()[2]), nk.dequantize(stack)[2])
    with pytest.raises(UsageError, match="matrices need a tensor of shape"):
        stack.matrices()[0].matrices()


def test_empty_segments_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = cpu.matmul

    def count(x: Any, *arguments: Any, **options: Any) -> None:
        seen.append(len(x))
        original(x, *arguments, **options)

    monkeypatch.setattr(cpu, "matmul", count)
    nk.grouped_matmul(normal(3, 64), normal(6, 5, 64), np.array([0, 0, 2, 2, 2, 3, 3], np.int32))
    assert seen == [2, 1]


def test_segment_wrapper_takes_both_orders() -> None:
    x, weights = normal(5, 8), normal(3, 4, 8)
    order, lens = np.array([2, 0]), np.array([1, 4])
    wanted = np.concatenate([x[:1] @ weights[2].T, x[1:] @ weights[0].T])
    wrapper = nk.SegmentGEMMWrapper(np.empty(1, np.int8), backend="auto")
    out = np.empty((5, 4), np.float32)
    for w, column_major in ((weights, True), (weights.transpose(0, 2, 1).copy(), False)):
        for options in ({"seg_lens": lens}, {"seg_indptr": np.array([0, 1, 5])}):
            got = wrapper.run(x, w, 2, column_major, out=out, weight_indices=order, **options)
            assert got is out
            np.testing.assert_allclose(got, wanted, atol=1e-5)  # 8 products of order 1


# ---- the layer --------------------------------------------------------------------------------


def layer(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    gate_up, down, router = normal(6, 64, 64) / 8, normal(6, 64, 32) / 6, normal(6, 64)
    if kind != "float32":
        gate_up, down = (nk.quantize(w, kind, quantizer="reference") for w in (gate_up, down))
    shared = nk.SharedExpert(normal(64, 64) / 8, normal(64, 32) / 6, gate=normal(64) / 8)

    def run(x: np.ndarray) -> np.ndarray:
        weights, ids = nk.moe_routing(nk.matmul(x, router), 2)
        result: np.ndarray = nk.fused_moe(x, gate_up, down, weights, ids, shared=shared)
        return result

    return run


@pytest.mark.parametrize("kind", ["float32", "q4"])
@pytest.mark.usefixtures("split_everything")
def test_a_token_does_not_depend_on_the_others(kind: str) -> None:
    run, x = layer(kind), normal(20, 64)
    parallel_for.set_num_threads(2)
    whole = run(x)
    parallel_for.set_num_threads(1)
    np.testing.assert_array_equal(run(x), whole)
    np.testing.assert_array_equal(run(x[::-1].copy()), whole[::-1])
    for t in (0, 7, 19):
        np.testing.assert_array_equal(run(x[t : t + 1])[0], whole[t])


def test_separate_gate_and_up_are_the_same_layer() -> None:
    gate_up, down, x = normal(3, 48, 16), normal(3, 16, 24), normal(4, 16)
    weights, ids = nk.moe_routing(normal(4, 3), 2)
    together = nk.fused_moe(x, gate_up, down, weights, ids)
    gate, up = (np.ascontiguousarray(half) for half in np.split(gate_up, 2, axis=1))
    np.testing.assert_array_equal(nk.fused_moe(x, gate, down, weights, ids, up=up), together)
    pieces = nk.fused_moe(x, list(gate), list(down), weights, ids, up=list(up))
    np.testing.assert_array_equal(pieces, together)


def test_tokens_without_experts_get_nothing() -> None:
    ids = np.array([[-1, -1], [0, -1]], np.int32)
    out = nk.fused_moe(
        normal(2, 16), normal(2, 8, 16), normal(2, 16, 4), np.ones((2, 2), np.float32), ids
    )
    assert (out[0] == 0).all()
    assert (out[1] != 0).any()


# ---- calls shared together --------------------------------------------------------------------


def _ranges(n_threads: int, sizes: list[tuple[int, float]]) -> list[list[tuple[int, int]]]:
    """Return the ranges of rows of each call."""
    parallel_for.set_num_threads(n_threads)
    made: list[list[tuple[int, int]]] = [[] for _ in sizes]
    with parallel_for.together():
        for mine, (n_rows, work) in zip(made, sizes, strict=True):
            parallel_for.parallel_for(lambda a, b, to=mine: to.append((a, b)), n_rows, work)
        assert not any(made), "nothing runs before the end"
    return [sorted(ranges) for ranges in made]


@pytest.mark.parametrize("n_threads", [1, 2, 3, 7])
@pytest.mark.usefixtures("split_everything")
def test_calls_together_cover_every_row_once(n_threads: int) -> None:
    sizes = [(5, 1e3), (1, 7.0), (1000, 1e6), (3, 0.0), (0, 5.0), (17, 123456.7)]
    made = _ranges(n_threads, sizes)
    for ranges, (n_rows, _) in zip(made, sizes, strict=True):
        assert [row for a, b in ranges for row in range(a, b)] == list(range(n_rows))
    assert sum(len(ranges) for ranges in made) <= len(sizes) + n_threads - 1


def test_calls_together_stay_single_calls_in_a_capture() -> None:
    with parallel_for.capture() as seen:
        with parallel_for.together():
            parallel_for.parallel_for(lambda a, b: None, 3, 1.0)
            parallel_for.parallel_for(lambda a, b: None, 3, 1.0)
        nk.grouped_matmul(normal(2, 16), normal(1, 3, 16), np.array([0, 2], np.int32))
    assert [call.n_rows for call in seen.calls[:2]] == [3, 3]
    assert not seen.complete  # the products depend on the values of indptr


def test_an_error_among_calls_together_ends_them() -> None:
    def fails(a: int, b: int) -> None:
        raise RuntimeError("broken kernel")

    with pytest.raises(RuntimeError, match="broken kernel"), parallel_for.together():
        parallel_for.parallel_for(fails, 3, 1.0)
    with pytest.raises(KeyError), parallel_for.together():
        parallel_for.parallel_for(fails, 3, {}["an error before the end: nothing is run"])
    ran = []
    parallel_for.parallel_for(lambda a, b: ran.append((a, b)), 3, 1.0)
    assert ran == [(0, 3)]


# ---- errors -----------------------------------------------------------------------------------

X, IDS, W = normal(2, 8), np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32)
UP, DOWN = normal(2, 6, 8), normal(2, 8, 3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: nk.moe_routing(X, 9), UsageError, r"top_k must be 1\.\.8, .* got 9"),
        (lambda: nk.moe_routing(X, 1, n_groups=3), UsageError, "n_groups must divide .* 8, got 3"),
        (lambda: nk.moe_routing(X, 1, top_k_groups=2), UsageError, "top_k_groups must be 1"),
        (lambda: nk.moe_routing(X, 5, n_groups=2), UsageError, r"top_k must be 1\.\.4"),
        (lambda: nk.moe_routing(X, 1, scoring="relu"), UsageError, "unknown scoring 'relu'"),
        (lambda: nk.moe_routing(X, 1, group_score="min"), UsageError, "unknown group_score"),
        (
            lambda: nk.moe_routing(X, 1, n_groups=8, group_score="top2_sum"),
            UsageError,
            "at least two experts",
        ),
        (lambda: nk.moe_routing(X, 1, correction_bias=X[0, :3]), UsageError, "correction_bias"),
        (lambda: nk.moe_routing(X * np.nan, 1), UsageError, "logits: row 0"),
        (lambda: nk.moe_routing(X - np.inf, 1), UsageError, "logits: row 0"),
        (lambda: nk.moe_permute(IDS + 2, 2), UsageError, r"ids must lie in -1\.\.1, got 2"),
        (
            lambda: nk.grouped_matmul(X, UP, np.array([0, 3, 2], np.int32)),
            UsageError,
            "indptr must rise",
        ),
        (
            lambda: nk.grouped_matmul(X, UP, np.array([0, 1], np.int32)),
            UsageError,
            r"indptr must have shape \(3\)",
        ),
        (
            lambda: nk.grouped_matmul(
                X, UP, np.array([0, 1, 2], np.int32), rows=np.array([0, 2], np.int32)
            ),
            UsageError,
            r"rows must lie in 0\.\.1, got 0\.\.2",
        ),
        (
            lambda: nk.grouped_matmul(X, [UP[0], UP[1, :2]], np.array([0, 1, 2], np.int32)),
            UsageError,
            r"a matrix of weights must have shape \(6, 8\)",
        ),
        (lambda: nk.grouped_matmul(X, [], np.zeros(1, np.int32)), UsageError, "at least one"),
        (
            lambda: nk.grouped_matmul(X, nk.quantize(UP[0], "f32"), np.zeros(3, np.int32)),
            UsageError,
            r"weights must have shape \(E, N, K\)",
        ),
        (lambda: nk.fused_moe(X, UP[:, :5].copy(), DOWN, W, IDS), UsageError, "an even number"),
        (lambda: nk.fused_moe(X, UP, DOWN[:1], W, IDS), UsageError, r"of the same experts"),
        (lambda: nk.fused_moe(X, UP, DOWN[:, :7].copy(), W, IDS), UsageError, "to 7 columns"),
        (
            lambda: nk.fused_moe(X, UP, DOWN, W, IDS, activation="tanh"),
            UsageError,
            "unknown activation 'tanh'",
        ),
        (lambda: nk.fused_moe(X, UP, DOWN, W, IDS, out=X), UsageError, "out must not overlap x"),
        (
            lambda: nk.fused_moe(X, UP, DOWN, W, IDS, up=UP, gated=False),
            UsageError,
            "leave up out",
        ),
        (
            lambda: nk.fused_moe(X, UP, DOWN, W, IDS, gated=False, gate_first=False),
            UsageError,
            "gate_first=False needs gated experts",
        ),
        (
            lambda: nk.fused_moe(X, UP, DOWN, W, IDS, gated=False, activation="swigluoai"),
            UsageError,
            "unknown activation 'swigluoai'",
        ),
        (lambda: nk.moe_combine(X, W, IDS, accumulate=True), UsageError, "accumulate=True needs"),
        (lambda: nk.moe_combine(X, W, IDS + 2), UsageError, r"inverse must lie in -1\.\.1"),
        (lambda: nk.SegmentGEMMWrapper(4), TypeError, "workspace_buffer must be an array or None"),
        (lambda: nk.SegmentGEMMWrapper(backend="sm80"), UsageError, "backend must be 'auto'"),
        (lambda: nk.SegmentGEMMWrapper().run(X, UP, 2, True), UsageError, "give one of seg_lens"),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


class OnDevice(np.ndarray):
    """Stands for an array on a CUDA device."""

    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012


def test_device_arrays_are_refused_with_the_way_out() -> None:
    for call in (
        lambda: nk.moe_combine(X.view(OnDevice), W, IDS),
        lambda: nk.grouped_matmul(X.view(OnDevice), UP, np.array([0, 1, 2], np.int32)),
        lambda: nk.fused_moe(X.view(OnDevice), UP, DOWN, W, IDS),
    ):
        with pytest.raises(UsageError, match="is on a CUDA device and"):
            call()
    if importlib.util.find_spec("cupy") is None:
        for alone in (
            lambda: nk.moe_routing(X.view(OnDevice), 1),
            lambda: nk.moe_permute(IDS.view(OnDevice), 2),
        ):
            with pytest.raises(MissingExtraError, match="need CuPy"):
                alone()


# ---- int8 and bfloat16 arithmetic -------------------------------------------------------------


@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize("kind", ["q4", "q2_k", "f16", "float32"])
@pytest.mark.usefixtures("split_everything")
def test_rows_have_the_arithmetic_of_the_single_products(kind: str, activations: str) -> None:
    """Segments of 0 to 40 rows: GEMV and GEMM, which may read rows of the next segment."""
    dense = normal(5, 20, 256) / 16
    weights = dense if kind == "float32" else nk.quantize(dense, kind, quantizer="reference")
    indptr = np.array([0, 1, 1, 4, 44, 51], np.int32)
    x = normal(53, 256)
    x[44:] = np.nan  # of other segments: must not reach the rows before
    x[44:51] = normal(7, 256)
    parallel_for.set_num_threads(3)
    y = nk.grouped_matmul(x, weights, indptr, activations=activations)
    for e in range(5):
        part = slice(indptr[e], indptr[e + 1])
        if kind == "float32":
            wanted = nk.matmul(x[part], weights[e])
        else:
            own = "f32" if kind == "f16" and activations == "int8" else activations
            wanted = nk.qmatmul(x[part], weights.matrices()[e], activations=own)
        np.testing.assert_array_equal(y[part], wanted)
    assert (y[51:] == 0).all()


@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize("apart", [False, True])
def test_layer_has_the_arithmetic_of_its_reference(apart: bool, activations: str) -> None:
    T, E, k, H, F = 6, 5, 2, 256, 64
    gate_up, up, down = normal(E, (1 if apart else 2) * F, H), normal(E, F, H), normal(E, H, F)
    arguments = {
        "x": normal(T, H),
        "gate_up": nk.quantize(gate_up / 16, "q4", quantizer="reference"),
        "down": nk.quantize(down / 8, "q4", quantizer="reference"),
        "topk_weights": np.full((T, k), 0.5, np.float32),
        "topk_ids": RNG.integers(0, E, (T, k)).astype(np.int32),
        "activation": "silu",
        "activations": activations,
    }
    if apart:
        arguments["up"] = nk.quantize(up / 16, "q4", quantizer="reference")
    wanted = reference.fused_moe(**arguments)
    exact = reference.fused_moe(**arguments | {"activations": "f32"})
    # float32 sums are off by some 1e-6; where that moves a rounding of the hidden vector, one
    # number of at most 8 changes by 8 / 127 (int8) or 8 * 2**-8 (bf16), times a weight of 0.3
    found = nk.fused_moe(**arguments)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.02)
    assert np.abs(found - wanted).mean() < 0.1 * np.abs(exact - wanted).mean()


def test_unknown_arithmetic_is_refused() -> None:
    x, w = normal(2, 64), stacks()["q4"]
    with pytest.raises(UsageError, match="unknown kind of activations 'int4'"):
        nk.grouped_matmul(x, w, np.array([0, 1, 1, 1, 2], np.int32), activations="int4")
