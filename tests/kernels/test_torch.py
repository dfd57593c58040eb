"""PyTorch: tensors in every op, registered operators, gradients, modules, `torch.compile`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError

torch: Any = pytest.importorskip("torch", reason="needs PyTorch (extra torch)")
from nbflow_kernels import torch as nt  # noqa: E402

HALF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Relative error of rounding to the type."""


def _normal(*shape: int) -> Any:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape, dtype=np.float32))


@pytest.fixture(scope="module")
def layer() -> Any:
    return nt.QuantLinear.from_linear(_linear(64, 24), "q4_0", quantizer="reference")


def _linear(n_in: int, n_out: int) -> Any:
    torch.manual_seed(0)
    return torch.nn.Linear(n_in, n_out)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_tensors_of_any_float_type_go_in_and_come_out(dtype: Any) -> None:
    x, weight = _normal(3, 40).to(dtype), _normal(40).to(dtype)
    found = nk.rmsnorm(x, weight)
    assert found.dtype == dtype
    wanted = torch.nn.functional.rms_norm(x.float(), (40,), weight.float(), 1e-6)
    # one rounding of the result; float32 inside errs by at most 40 * 2**-24 = 2.4e-6
    rounding = HALF.get(dtype, 0.0)
    torch.testing.assert_close(found.float(), wanted, rtol=rounding + 3e-6, atol=1e-6)


def test_memory_is_shared_and_int64_indices_come_back() -> None:
    x, out = _normal(2, 8), torch.empty(2, 8)
    assert nk.silu(x, out=out) is out
    torch.testing.assert_close(out, torch.nn.functional.silu(x))
    ids = nk.sampling_from_probs(torch.softmax(x, -1), torch.tensor([1, 0]), seed=1)
    assert ids.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_caches(dtype: Any) -> None:
    q, kv = _normal(4, 64), _normal(2, 1, 8, 2, 64)
    cache = kv.transpose(0, 1).contiguous().to(dtype)  # (page, K and V, token, head, D)
    k, v = cache[0].float()
    wide = nk.single_decode_with_kv_cache(q, k, v)
    alone = nk.single_decode_with_kv_cache(q, *cache[0])
    table = [torch.tensor(n, dtype=torch.int32) for n in ([0, 1], [0], [8])]
    wrapper = nk.BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(*table, 4, 2, 64, 8, q_data_type=torch.float32, kv_data_type=dtype)
    paged = wrapper.run(q[None], cache)[0]
    # float8 widens exactly; sums of 64 and 8 products in float32, of weights that add up to 1
    for found in (alone, paged):
        assert (found - wide).abs().max() <= 80 * 2.0**-24 * v.abs().max()
    rows, appended = kv[:, 0].contiguous(), torch.zeros_like(cache)
    places = torch.zeros(8, dtype=torch.int32), torch.arange(8, dtype=torch.int32)
    indptr, indices, last = table
    nk.append_paged_kv_cache(*rows, *places, appended, indices, indptr, last)
    assert torch.equal(appended.view(torch.uint8), cache.view(torch.uint8))


def test_top_k_has_indices_that_pytorch_takes() -> None:
    x = _normal(3, 40)
    values, ids = nk.top_k(x, 5)
    assert ids.dtype == torch.int64
    assert torch.equal(torch.gather(x, 1, ids), values)
    pages, lengths = torch.arange(120, dtype=torch.int32).view(3, 40), torch.full((3,), 40)
    found = nk.top_k_page_table_transform(x.bfloat16(), pages, lengths.int(), 5)
    assert found.dtype == torch.int32
    wanted = nk.top_k(x.bfloat16(), 5, sorted=False)[1] + 40 * torch.arange(3)[:, None]
    assert torch.equal(found.long(), wanted)


def test_gradients_are_refused_unless_they_are_off() -> None:
    x, weight = _normal(2, 8), torch.nn.Parameter(_normal(8))
    with pytest.raises(UsageError, match=r"weight requires gradients.*nbflow_kernels\.torch"):
        nk.rmsnorm(x, weight)
    with torch.no_grad():
        torch.testing.assert_close(nk.rmsnorm(x, weight), nk.rmsnorm(x, weight.detach()))


def test_operators_pass_opcheck(layer: Any) -> None:
    x = _normal(2, 3, 64).requires_grad_()
    bias = _normal(24).requires_grad_()
    stored = (layer.weight_bytes, "q4_0", 64)
    torch.library.opcheck(nt.qmatmul, (x, *stored, bias))
    torch.library.opcheck(nt.qmatmul, (x.detach().bfloat16(), *stored))
    torch.library.opcheck(nt.matmul, (x, _normal(24, 64).requires_grad_(), bias))
    torch.library.opcheck(nt.rmsnorm, (x, _normal(64).requires_grad_()))
    torch.library.opcheck(nt.fake_quantize, (_normal(4, 64).requires_grad_(), "q4_0"))


def _gradients(function: Any, *inputs: Any) -> list[Any]:
    leaves = [i.clone().requires_grad_() for i in inputs]
    result = function(*leaves)
    result.backward(_normal(*result.shape))
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def test_gradients_equal_pytorchs(layer: Any) -> None:
    x, w, bias = _normal(2, 3, 64), _normal(24, 64), _normal(24)
    linear, scale = torch.nn.functional.linear, _normal(64)
    dense = layer.dequantize()

    def quantized(x: Any, bias: Any) -> Any:
        return nt.qmatmul(x, layer.weight_bytes, "q4_0", 64, bias)

    pairs = [
        (_gradients(quantized, x, bias), _gradients(lambda x, b: linear(x, dense, b), x, bias)),
        (_gradients(nt.matmul, x, w, bias), _gradients(linear, x, w, bias)),
        (
            _gradients(quantized, x[0, 0], bias),  # a vector
            _gradients(lambda x, b: linear(x, dense, b), x[0, 0], bias),
        ),
        (_gradients(nt.matmul, x[0, 0], w, bias), _gradients(linear, x[0, 0], w, bias)),
        (
            _gradients(nt.rmsnorm, x, scale),
            _gradients(lambda x, w: torch.nn.functional.rms_norm(x, (64,), w, 1e-6), x, scale),
        ),
    ]
    for found, wanted in pairs:
        for a, b in zip(found, wanted, strict=True):
            # float32 sums of at most 64 products of normal numbers in another order:
            # 64 * 2**-24 * 8, the largest partial sum, is 3e-5
            torch.testing.assert_close(a, b, rtol=1e-5, atol=3e-5)


def test_second_derivative_through_quantized_weights(layer: Any) -> None:
    x = _normal(2, 64).requires_grad_()
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    dense = layer.dequantize()
    wanted = 2 * (dense.T @ dense).sum(0).expand(2, 64)
    # sums of 24 and 64 products, at most 20 each
    torch.testing.assert_close(second, wanted, rtol=1e-5, atol=1e-4)


def test_compiled_module_equals_eager(layer: Any) -> None:
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = _normal(4, 64)
    torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=0)


def test_layout_is_kept_until_the_bytes_change(layer: Any) -> None:
    first = nt._quant_tensor(layer.weight_bytes, "q4_0", 64)
    assert nt._quant_tensor(layer.weight_bytes, "q4_0", 64) is first
    copy = nt.QuantLinear(64, 24, "q4_0")
    before = nt._quant_tensor(copy.weight_bytes, "q4_0", 64)
    copy.load_state_dict(layer.state_dict())
    assert nt._quant_tensor(copy.weight_bytes, "q4_0", 64) is not before
    torch.testing.assert_close(copy(_normal(2, 64)), layer(_normal(2, 64)), rtol=0, atol=0)


def test_state_of_another_format_is_refused(layer: Any) -> None:
    with pytest.raises(UsageError, match="format 'q4_0', this layer is of 'iq4_nl'"):
        nt.QuantLinear(64, 24, "iq4_nl").load_state_dict(layer.state_dict())


class _Model(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([_linear(64, 64), _linear(64, 64)])
        self.tied = self.blocks[0]
        self.lm_head = _linear(64, 8)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.lm_head(x)


def test_replace_linears() -> None:
    model = _Model()
    wanted = model(_normal(2, 64))
    assert nt.replace_linears(model, "q8") == ["blocks.0", "blocks.1", "tied"]
    assert model.tied is model.blocks[0]
    assert isinstance(model.lm_head, torch.nn.Linear)
    assert "format=q8, bits_per_weight=" in repr(model)
    found = model(_normal(2, 64))
    # q8 errs by 0.5 % of a product's root mean square; two layers, outputs below 1
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02)
    with pytest.raises(UsageError, match=r"must have torch\.nn\.Linear layers besides"):
        nt.replace_linears(model, "q8")
    broken = _Model()
    broken.blocks[1].weight.data[0, 0] = float("nan")
    with pytest.raises(UsageError, match=r"layer blocks\.1: "):
        nt.replace_linears(broken, "q8")


def test_straight_through_training_reduces_the_error() -> None:
    w, x = _normal(8, 64).requires_grad_(), _normal(32, 64)
    goal = x @ _normal(8, 64).roll(1, 0).T
    losses = []
    for _ in range(3):
        loss = (x @ nt.fake_quantize(w, "q4_0").T - goal).square().mean()
        (grad,) = torch.autograd.grad(loss, w)
        losses.append(loss.item())
        w = (w - 0.5 * grad).detach().requires_grad_()
    assert losses[2] < losses[1] < losses[0]
    stored = nk.quantize(w.detach(), "q4_0", quantizer="reference")
    np.testing.assert_array_equal(nt.fake_quantize(w, "q4_0").detach(), nk.dequantize(stored))
