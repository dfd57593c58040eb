"""Weight formats made up for tests: every shape of integer form, stored without any packing.

A block is its codes (a byte each), `d` and `m` (float32), scales (int16) and mins (uint8).
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.formats import QuantTensor
from nbflow_kernels.formats.codec_spec import CodecSpec, DecodedBlocks, weights
from nbflow_kernels.formats.registry import QuantFormat


class SyntheticFormat(QuantFormat):
    """A format of any integer form."""

    def __init__(self, name: str, form: CodecSpec) -> None:
        self.name = name
        self._form = form
        n = form.block // form.sub_block
        self.dtype = np.dtype(
            [
                ("codes", "u1", form.block),
                ("d", "<f4"),
                ("m", "<f4"),
                ("scales", "<i2", n),
                ("mins", "u1", n),
            ]
        )
        self.block_size, self.block_bytes = form.block, self.dtype.itemsize

    @property
    def integer_form(self) -> CodecSpec:
        return self._form

    def integers(self, data):
        blocks = np.ascontiguousarray(data).view(self.dtype)
        form, rows = self.integer_form, len(data)
        columns = {name: blocks[name].reshape(rows, -1) for name in self.dtype.names}
        return DecodedBlocks(
            columns["codes"],
            columns["d"],
            None if form.base == "none" else columns["m"],
            columns["scales"] if form.scales else None,
            columns["mins"] if form.base == "min" else None,
        )

    def dequantize_blocks(self, blocks):
        return weights(self.integer_form, self.integers(blocks))

    def dequantize_rows(self, data, out):
        out[...] = weights(self.integer_form, self.integers(data))[:, : out.shape[1]]

    def random(self, rng: np.random.Generator, rows: int, columns: int) -> QuantTensor:
        """Return a tensor of random blocks whose numbers use the whole range of the form."""
        form = self.integer_form
        blocks = np.zeros((rows, self.row_blocks(columns)), self.dtype)
        top = 11 if form.pairs else 2**form.code_bits
        blocks["codes"] = rng.integers(0, top, blocks["codes"].shape)
        limit = 16 if form.scale_bits == 4 else 64
        lowest = 0 if form.base == "min" else -32
        blocks["scales"] = rng.integers(lowest, limit, blocks["scales"].shape)
        blocks["mins"] = rng.integers(0, limit, blocks["mins"].shape)
        for name in ("d", "m"):
            blocks[name] = self._floats(rng, blocks[name].shape, name)
        return QuantTensor(self, (rows, columns), blocks.view(np.uint8).reshape(rows, -1))

    def _floats(self, rng, shape, name):
        kind = self.integer_form.d_type
        if kind == "e8m0":
            return np.ldexp(np.float32(1), rng.integers(-6, 0, shape))
        if kind == "e4m3":
            mantissa = 1 + rng.integers(0, 8, shape) / 8
            return np.ldexp(mantissa, rng.integers(-7, 0, shape)).astype(np.float32)
        if kind == "u8":
            u = rng.integers(0, 256, shape).astype(np.float32)
            return u / np.float32(1000) if name == "d" else u / np.float32(100) - 1
        values = rng.normal(0, 0.05, shape).astype(np.float32)
        return values if kind == "f32" else values.astype(np.float16).astype(np.float32)


SIXTEEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
EIGHT = (-43, -25, -8, 8, 25, 43, 0, 0)
NINTHS = (-9, -7, -1, 1, 7, 9, 0, 0)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# the shapes that GGML's formats have, and a few that none has
FORMS = {
    "like_q2_k": CodecSpec(256, 16, 2, base="min", scales=True, scale_bits=4),
    "like_q3_k": CodecSpec(256, 16, 3, zero=4, scales=True),
    "like_q4_k": CodecSpec(256, 32, 4, base="min", scales=True),
    "like_q5_k": CodecSpec(256, 32, 5, base="min", scales=True),
    "like_q6_k": CodecSpec(256, 16, 6, zero=32, scales=True),
    "like_iq4_nl": CodecSpec(32, 32, 4, values=SIXTEEN),
    "like_iq4_xs": CodecSpec(256, 32, 4, values=SIXTEEN, scales=True),
    "like_iq2": CodecSpec(256, 16, 3, values=EIGHT, factor=0.125, scales=True),
    "like_iq1": CodecSpec(256, 32, 3, values=NINTHS, factor=0.125, scales=True),
    "like_tq": CodecSpec(256, 256, 2, zero=1),
    "like_mxfp4": CodecSpec(32, 32, 4, values=FP4, d_type="e8m0"),
    "like_nvfp4": CodecSpec(16, 16, 4, values=FP4, d_type="e4m3"),
    "one_bit": CodecSpec(128, 128, 1, zero=0, base="d"),
    "seven_bits": CodecSpec(64, 32, 7, zero=64, scales=True),
    "float32_scales": CodecSpec(32, 32, 8, zero=128, d_type="f32"),
    "pairs_of_32": CodecSpec(32, 32, 4, pairs=True, base="d"),
    "zero_and_base": CodecSpec(64, 64, 5, zero=11, base="d"),
    "odd_zero": CodecSpec(64, 32, 4, zero=7, scales=True),
}
FORMATS = {name: SyntheticFormat(name, form) for name, form in FORMS.items()}
