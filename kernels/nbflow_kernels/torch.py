"""PyTorch operators: products with quantized weights in modules, in autograd, in `torch.compile`.

``import nbflow_kernels.torch`` registers `torch.ops.nbflow.qmatmul`, `matmul`, `rmsnorm` and
`fake_quantize` with shapes for tracing and with gradients: of activations through quantized
weights, of both factors of float products.  `QuantLinear` and `replace_linears` put them into
models.  Other functions of `nbflow_kernels` take tensors too, without gradients.

Needs PyTorch, which nothing else of the package imports (extra ``torch``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow_kernels.errors import MissingExtraError, UsageError, install_command
from nbflow_kernels.exchange.array_exchange import native

try:
    import torch
    from torch import Tensor, nn
    from torch.utils.weak import WeakIdKeyDictionary
except ImportError as error:
    raise MissingExtraError(
        f"nbflow_kernels.torch needs PyTorch: {install_command('torch')}"
    ) from error

__all__ = ["QuantLinear", "fake_quantize", "matmul", "qmatmul", "replace_linears", "rmsnorm"]

_ROWS = 1024  # rows of weights dequantized at once in a backward pass

_tensors: Any = WeakIdKeyDictionary()
"""Tensors of bytes to their version and `QuantTensor`, which keeps the layout of the kernels."""


def _quant_tensor(weight_bytes: Tensor, format: str, in_features: int) -> nk.QuantTensor:
    """Return the quantized tensor that shares the memory of `weight_bytes`."""
    version = 0 if weight_bytes.is_inference() else weight_bytes._version
    key = (version, format, in_features, weight_bytes.data_ptr())
    known = _tensors.get(weight_bytes)
    if known is not None and known[0] == key:
        found: nk.QuantTensor = known[1]
        return found
    shape = (weight_bytes.shape[0], in_features)
    # detached: the memory is kept alive, but not the key
    made = nk.QuantTensor(format, shape, native("weight_bytes", weight_bytes.detach()))
    _tensors[weight_bytes] = (key, made)
    return made


def _rows(x: Tensor) -> Tensor:
    """Return a tensor (..., K) as a matrix, a vector as one row."""
    return x.flatten(0, -2) if x.ndim > 1 else x[None]


def _sum_of_rows(grad: Tensor, like: Tensor | None) -> Tensor | None:
    """Return the gradient of a vector that is added to every row."""
    return None if like is None else _rows(grad).float().sum(0).to(like.dtype)


@torch.library.custom_op("nbflow::qmatmul", mutates_args=())
def qmatmul(
    x: Tensor,
    weight_bytes: Tensor,
    format: str,
    in_features: int,
    bias: Tensor | None = None,
    activations: str = "f32",
) -> Tensor:
    """Multiply activations by the transpose of a quantized matrix; see `nbflow_kernels.qmatmul`.

    Parameters
    ----------
    x : tensor of float32, float16 or bfloat16, shape (..., K)
        Activations.
    weight_bytes : tensor of uint8, shape (N, bytes of a row)
        ``QuantTensor.data`` of weights (N, K).
    format : str
        Their format.
    in_features : int
        K.
    bias : tensor, shape (N,), optional
        Added to every row.
    activations : {"f32", "bf16", "int8"}
        As in `nbflow_kernels.qmatmul`.

    Returns
    -------
    tensor of the dtype of `x`, shape (..., N)
        The product.  Gradients flow to `x`, with the dequantized weights, and to `bias`.
    """
    w = _quant_tensor(weight_bytes, format, in_features)
    vector = None if bias is None else bias.detach()
    result: Tensor = nk.qmatmul(x.detach().contiguous(), w, bias=vector, activations=activations)
    return result


@qmatmul.register_fake
def _(x, weight_bytes, format, in_features, bias=None, activations="f32"):
    return x.new_empty((*x.shape[:-1], weight_bytes.shape[0]))


@torch.library.custom_op("nbflow::qmatmul_backward", mutates_args=())
def _qmatmul_backward(grad: Tensor, weight_bytes: Tensor, format: str, in_features: int) -> Tensor:
    """Multiply by the matrix itself, dequantized `_ROWS` rows at a time."""
    w = _quant_tensor(weight_bytes, format, in_features)
    rows = _rows(grad).float()
    total = rows.new_zeros((rows.shape[0], in_features))
    for start in range(0, w.shape[0], _ROWS):
        stop = min(start + _ROWS, w.shape[0])
        part = torch.from_dlpack(nk.dequantize(w.rows(start, stop)))
        total.addmm_(rows[:, start:stop], part)
    return total.to(grad.dtype).reshape(*grad.shape[:-1], in_features)


@_qmatmul_backward.register_fake
def _(grad, weight_bytes, format, in_features):
    return grad.new_empty((*grad.shape[:-1], in_features))


def _keep_weights(ctx, inputs, output):
    ctx.weight_bytes, ctx.format, ctx.in_features = inputs[1:4]
    ctx.bias = inputs[4] if len(inputs) > 4 else None


def _qmatmul_gradients(ctx, grad):
    to_x = _qmatmul_backward(grad.contiguous(), ctx.weight_bytes, ctx.format, ctx.in_features)
    return to_x, None, None, None, _sum_of_rows(grad, ctx.bias), None


def _qmatmul_backward_gradients(ctx, grad):
    return qmatmul(grad.contiguous(), ctx.weight_bytes, ctx.format, ctx.in_features), *[None] * 3


qmatmul.register_autograd(_qmatmul_gradients, setup_context=_keep_weights)
_qmatmul_backward.register_autograd(_qmatmul_backward_gradients, setup_context=_keep_weights)


@torch.library.custom_op("nbflow::matmul", mutates_args=())
def matmul(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply activations by the transpose of a float matrix; see `nbflow_kernels.matmul`.

    Parameters
    ----------
    x : tensor of float32, float16 or bfloat16, shape (..., K)
        Activations.
    w : tensor of float32, float16 or bfloat16, shape (N, K)
        Weights.
    bias : tensor, shape (N,), optional
        Added to every row.

    Returns
    -------
    tensor of the dtype of `x`, shape (..., N)
        The product.  Gradients flow to all arguments.
    """
    vector = None if bias is None else bias.detach()
    result: Tensor = nk.matmul(x.detach().contiguous(), w.detach().contiguous(), bias=vector)
    return result


@matmul.register_fake
def _(x, w, bias=None):
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _keep_factors(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.bias = inputs[2] if len(inputs) > 2 else None


def _matmul_gradients(ctx, grad):
    x, w = ctx.saved_tensors
    to_x = (grad.float() @ w.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
    to_w = None
    if ctx.needs_input_grad[1]:
        to_w = (_rows(grad).float().T @ _rows(x).float()).to(w.dtype)
    return to_x, to_w, _sum_of_rows(grad, ctx.bias)


matmul.register_autograd(_matmul_gradients, setup_context=_keep_factors)


@torch.library.custom_op("nbflow::rmsnorm", mutates_args=())
def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide each vector by its root mean square and scale it; see `nbflow_kernels.rmsnorm`.

    Parameters
    ----------
    x : tensor of float32, float16 or bfloat16, shape (..., E)
        Input; the last axis is normalized.
    weight : tensor, shape (E,)
        Scale for each column.
    eps : float
        Added to the mean square.

    Returns
    -------
    tensor of the dtype and shape of `x`
        Gradients flow to `x` and `weight`.
    """
    rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
    result: Tensor = nk.rmsnorm(rows, weight.detach().contiguous(), eps).reshape(x.shape)
    return result


@rmsnorm.register_fake
def _(x, weight, eps=1e-6):
    return x.new_empty(x.shape)


def _keep_norm(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.eps = inputs[2] if len(inputs) > 2 else 1e-6


def _rmsnorm_gradients(ctx, grad):
    x, weight = ctx.saved_tensors
    wide, slope = x.float(), grad.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
    unit = wide * inverse
    along = slope * weight.float()
    to_x = inverse * (along - unit * (along * unit).mean(-1, keepdim=True))
    to_weight = (slope * unit).reshape(-1, x.shape[-1]).sum(0)
    return to_x.to(x.dtype), to_weight.to(weight.dtype), None


rmsnorm.register_autograd(_rmsnorm_gradients, setup_context=_keep_norm)


@torch.library.custom_op("nbflow::fake_quantize", mutates_args=())
def fake_quantize(w: Tensor, format: str, quantizer: str = "reference") -> Tensor:
    """Round weights to a format and back, for quantization-aware training.

    Parameters
    ----------
    w : tensor of float32, float16 or bfloat16, shape (..., K)
        Weights; blocks lie along the last axis.
    format : str
        A format of `nbflow_kernels.FORMATS`.
    quantizer : {"reference", "search"}
        As in `nbflow_kernels.quantize`; "reference" is much faster.

    Returns
    -------
    tensor of the dtype and shape of `w`
        ``dequantize(quantize(w))``.  The gradient passes through unchanged (straight-through
        estimator).

    References
    ----------
    .. [1] Y. Bengio, N. Leonard and A. Courville, "Estimating or Propagating Gradients Through
       Stochastic Neurons for Conditional Computation", arXiv:1308.3432.
    """
    stored = nk.quantize(w.detach().contiguous(), format, quantizer=quantizer)
    return torch.from_dlpack(nk.dequantize(stored)).to(w.dtype)


@fake_quantize.register_fake
def _(w, format, quantizer="reference"):
    return w.new_empty(w.shape)


fake_quantize.register_autograd(lambda ctx, grad: (grad, None, None))


class QuantLinear(nn.Module):
    """Linear layer with quantized weights.

    The weights are the buffer `weight_bytes`, which `state_dict` holds; they get no gradient.  The
    bias is a parameter.

    Parameters
    ----------
    in_features, out_features : int
        Columns and rows of the weights.
    format : str
        A format of `nbflow_kernels.FORMATS`.
    bias : bool
        Add a bias.
    activations : {"f32", "bf16", "int8"}
        As in `nbflow_kernels.qmatmul`.

    Examples
    --------
    >>> import torch
    >>> from nbflow_kernels.torch import QuantLinear
    >>> layer = QuantLinear.from_linear(torch.nn.Linear(64, 8), "q8")
    >>> layer(torch.ones(2, 3, 64)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: str,
        bias: bool = True,
        activations: str = "f32",
    ) -> None:
        super().__init__()
        chosen = nk.FORMATS[format]
        row_bytes = chosen.row_blocks(in_features) * chosen.block_bytes
        self.in_features, self.out_features = in_features, out_features
        self.format, self.activations = format, activations
        self.register_buffer("weight_bytes", torch.zeros(out_features, row_bytes).byte())
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        format: str,
        *,
        quantizer: str = "search",
        importance: Tensor | None = None,
        activations: str = "f32",
    ) -> QuantLinear:
        """Return a layer with the quantized weights of a float layer, and its bias.

        Parameters
        ----------
        linear : torch.nn.Linear
            The float layer, in host memory.
        format, quantizer, importance
            As in `nbflow_kernels.quantize`.
        activations : {"f32", "bf16", "int8"}
            As in `nbflow_kernels.qmatmul`.

        Raises
        ------
        UsageError
            If the weights do not fit the format.
        """
        weight = linear.weight.detach().contiguous()
        stored = nk.quantize(weight, format, quantizer=quantizer, importance=importance)
        made = cls(linear.in_features, linear.out_features, format, False, activations)
        made.weight_bytes = torch.from_dlpack(np.ascontiguousarray(stored.data))
        made.bias = linear.bias
        made.train(linear.training)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ W.T + bias``, shape (..., out_features)."""
        found: Tensor = qmatmul(
            x, self.weight_bytes, self.format, self.in_features, self.bias, self.activations
        )
        return found

    def dequantize(self) -> Tensor:
        """Return the weights in float32, shape (out_features, in_features)."""
        w = _quant_tensor(self.weight_bytes, self.format, self.in_features)
        found: Tensor = torch.from_dlpack(nk.dequantize(w))
        return found

    def get_extra_state(self) -> Tensor:
        """Return the name of the format, for `state_dict`."""
        return torch.tensor(list(self.format.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Raise unless the stored bytes have the format of this layer."""
        stored = bytes(state.tolist()).decode(errors="replace")
        if stored != self.format:
            raise UsageError(
                f"the state has weights in format {stored!r}, this layer is of {self.format!r}"
            )

    def extra_repr(self) -> str:
        """Return sizes, format and bits per weight."""
        bits = 8 * self.weight_bytes.numel() / math.prod((self.out_features, self.in_features))
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, format={self.format}, bits_per_weight={bits:.3g}"
        )


def replace_linears(
    model: nn.Module,
    format: str,
    *,
    skip: Sequence[str] = ("lm_head",),
    quantizer: str = "search",
    activations: str = "f32",
) -> list[str]:
    """Replace the linear layers of a model by quantized ones, in place.

    Parameters
    ----------
    model : torch.nn.Module
        The model, in host memory.
    format, quantizer, activations
        As in `QuantLinear.from_linear`.
    skip : sequence of str
        Layers to leave: full names, or their last parts.

    Returns
    -------
    list of str
        Names of the replaced layers.  A layer that is used twice is replaced by one.

    Raises
    ------
    UsageError
        If the model has no linear layer, or a layer's weights do not fit the format.
    """
    made: dict[nn.Module, QuantLinear] = {}
    names = []
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        parent, _, last = name.rpartition(".")
        if type(layer) is not nn.Linear or not name or {name, last} & set(skip):
            continue
        if layer not in made:
            try:
                made[layer] = QuantLinear.from_linear(
                    layer, format, quantizer=quantizer, activations=activations
                )
            except UsageError as error:
                raise UsageError(f"layer {name}: {error}") from error
        setattr(model.get_submodule(parent), last, made[layer])
        names.append(name)
    if not names:
        raise UsageError("model must have torch.nn.Linear layers besides those in skip, found none")
    return names
