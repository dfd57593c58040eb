"""Error guarantees of GPTQ and HQQ, against float64 references."""

from __future__ import annotations

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS
from nbflow_kernels.formats.affine_format import AffineFormat
from nbflow_kernels.formats.ggml.k_format import KQuantFormat
from nbflow_kernels.quantizers import gptq_reference, quantize_calibrated
from nbflow_kernels.quantizers.affine_grid import affine_grid, is_affine, with_codes
from nbflow_kernels.quantizers.gptq import Hessian, gptq_rows
from nbflow_kernels.quantizers.hqq import HqqOptions, hqq_rows, lp_errors
from nbflow_kernels.quantizers.registry import quantize_rows

AFFINE = [name for name in FORMATS if is_affine(FORMATS[name])]
K = 256


def inputs(columns: int = K, rows: int = 400) -> np.ndarray:
    """Return correlated inputs with columns of different sizes."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, 24)) @ rng.normal(size=(24, columns))
    x += rng.normal(size=(rows, columns))
    return x * np.exp(rng.normal(size=columns))


def weights(rows: int = 24, columns: int = K) -> np.ndarray:
    return np.random.default_rng(2).normal(0, 0.02, (rows, columns)).astype(np.float32)


def losses(qt: nk.QuantTensor, w: np.ndarray, x: np.ndarray) -> np.ndarray:
    error = nk.dequantize(qt).astype(np.float64) - w
    return np.square(x @ error.T).sum(axis=0)


@pytest.mark.parametrize("name", AFFINE)
def test_grid_is_what_the_decoder_gives(name: str) -> None:
    format, w = FORMATS[name], weights(3)
    data = nk.quantize(w, name, quantizer="reference").data
    grid, codes = affine_grid(format, data), format.integers(data).codes
    wanted = nk.dequantize(nk.QuantTensor(format, w.shape, data))
    # the decoders round to float32, some of them at every step: 3 roundings of the larger part
    largest = np.abs(grid.base) + np.abs(grid.step) * grid.n_codes
    assert (np.abs(grid.values(codes) - wanted) <= 3 * 2.0**-24 * largest).all()
    assert np.array_equal(with_codes(format, data, codes), data)
    other = (grid.n_codes - 1 - codes).astype(np.uint8)
    turned = with_codes(format, data, other)
    assert np.array_equal(format.integers(turned).codes, other)
    assert np.array_equal(affine_grid(format, turned).step, grid.step)


@pytest.mark.parametrize("name", ["q4_b32t1a", "q3h_b64t1", "q4_0", "q4_b16", "q3_k", "q4_k"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_loses_less_than_rounding(name: str, act_order: bool) -> None:
    w, x = weights(), inputs()
    moments = Hessian(x.T @ x)
    gptq = losses(quantize_calibrated(w, name, "gptq", moments, act_order=act_order), w, x)
    squares = moments.matrix.diagonal()
    for other in (
        quantize_calibrated(w, name, "search", squares),
        nk.quantize(w, name, quantizer="reference"),
    ):
        rounding = losses(other, w, x)
        assert (gptq <= rounding * (1 + 1e-9)).all()  # row by row; float64 sums in another order
        assert gptq.sum() < 0.8 * rounding.sum()  # inputs as correlated as these: about a half


@pytest.mark.parametrize("name", ["q4_b32t1a", "q3h_b64t1", "q4_0"])
def test_gptq_is_the_reference(name: str) -> None:
    """The Cholesky factor and panels only change the order of float64 additions."""
    w, x = weights(8, 320), inputs(320)
    moments = Hessian(x.T @ x, damping=0.02)
    H = moments.matrix
    damped = H + 0.02 * H.diagonal().mean() * np.eye(320)
    found = gptq_rows(FORMATS[name], w, 320, moments, act_order=False)
    importance = H.diagonal() / H.diagonal().max()
    wanted = gptq_reference.gptq_rows(FORMATS[name], w, damped, importance)
    assert np.array_equal(found, wanted)


def test_gptq_of_uncorrelated_inputs_is_rounding() -> None:
    w = weights(4)
    found = gptq_rows(FORMATS["q4"], w, K, Hessian(np.eye(K)), act_order=False)
    flat = np.ones(K, np.float32)
    best = nk.quantize(w, "q4", importance=flat)
    grid = affine_grid(best.format, best.data)
    nearest = with_codes(best.format, best.data, grid.nearest(w.astype(np.float64)))
    assert np.array_equal(found, nearest)


def test_gptq_of_rows_with_padding_and_dead_inputs() -> None:
    w, x = weights(5, 70), inputs(70)
    x[:, 10:20] = 0
    qt = quantize_calibrated(w, "q3h", "gptq", x.T @ x)
    assert qt.shape == (5, 70)
    assert losses(qt, w, x).sum() < losses(nk.quantize(w, "q3h"), w, x).sum()
    dead = np.abs(nk.dequantize(qt) - w)[:, 10:20]
    # rounded all the same, but no scale is made for them: clipped at worst
    assert dead.max() < np.ptp(w) / 4


@pytest.mark.parametrize("name", AFFINE)
def test_hqq_lowers_its_sum_in_every_block(name: str) -> None:
    format, p = FORMATS[name], HqqOptions().p
    rng = np.random.default_rng(3)
    w = rng.standard_t(4, size=(6, K)).astype(np.float32) * np.float32(0.02)

    def sums(data: np.ndarray) -> np.ndarray:
        decoded = np.empty_like(w)
        format.dequantize_rows(data, decoded)
        error = (decoded.astype(np.float64) - w).reshape(6, -1, format.block_size)
        return lp_errors(error, p)

    plain = sums(quantize_rows(format, w, K, "reference"))
    hqq = sums(hqq_rows(format, w, K))
    # decoded float32 values are off by 2**-23 of errors' size / 1e-3, to the power p
    assert (hqq <= plain * (1 + 1e-4)).all()
    # bases of 8 bits and minima of K-quants are coarse: there the first turn may well be the last
    if isinstance(format, AffineFormat) and format.bits_per_weight < 5.5 and name != "q4_b16":
        assert hqq.sum() < 0.995 * plain.sum()


def test_hqq_with_statistics_loses_no_more_than_plain() -> None:
    w, x = weights(), inputs()
    for statistics in (x.T @ x, np.square(x).sum(axis=0)):
        hqq, plain = (
            nk.dequantize(quantize_calibrated(w, "q3", e, s)).astype(np.float64) - w
            for e, s in (("hqq", statistics), ("reference", None))
        )
        full = statistics if statistics.ndim == 2 else np.diag(statistics)
        lost, rounding = (np.einsum("nk,kl,nl->n", e, full, e) for e in (hqq, plain))
        assert (lost <= rounding * (1 + 1e-9)).all()
        assert lost.sum() < rounding.sum()


def test_wrong_use() -> None:
    w = weights(2)
    for arguments, message in (
        (("iq3_s", "gptq", np.eye(K)), "equidistant codes"),
        (("q4", "gptq", np.ones(K)), "needs second moments"),
        (("q4", "gptq", np.eye(K + 1)), r"must have shape \(256, 256\)"),
        (("q4", "gptq", np.full((K, K), np.nan)), "must be finite"),
        (("q4", "gptq", np.triu(np.ones((K, K)))), "must be symmetric"),
        (("q4", "hqq", -np.ones(K)), "must be finite, >= 0"),
        (("q4", "gptk", None), "unknown quantizer 'gptk'; did you mean 'gptq'"),
    ):
        with pytest.raises(UsageError, match=message):
            quantize_calibrated(w, *arguments)
    flat = Hessian(np.ones((K, K)), damping=0.0)
    with pytest.raises(UsageError, match="not positive definite; raise the damping"):
        quantize_calibrated(w, "q4", "gptq", flat)
    assert {type(FORMATS[name]) for name in AFFINE} == {AffineFormat, KQuantFormat}
