"""Cases of the cache operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.kv_cache.cpu_codec import FIRST_BLOCK_KIND, KINDS
from nbflow_kernels.kv_cache.formats import kv_format, kv_formats, split_names
from nbflow_kernels.kv_cache.reference import encode
from nbflow_kernels.op_case import OpCase, exact_case
from nbflow_kernels.position import rope_cos_sin_cache

COPY = "copies, rounded or encoded once in the cache's format"
# x cos - y sin with |x|, |y| < 5: one product below 5 is rounded, then the sum below 7.1
ROTATED_ATOL = 5e-7
ROTATED = "rotated in float32: a product below 5 and a sum below 8 are rounded, 2.4e-7 each"


def page_table(
    rng: np.random.Generator, lens: list[int], page_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a page table (indptr, indices, last_page_len) with pages in random order."""
    counts = [-(-n // page_size) for n in lens]
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    indices = rng.permutation(sum(counts)).astype(np.int32)
    last = [n - max(c - 1, 0) * page_size for n, c in zip(lens, counts, strict=True)]
    return indptr, indices, np.array(last, np.int32)


def _pages(
    rng: np.random.Generator, n_pages: int, shape: tuple[int, ...], format: str, D: int
) -> np.ndarray:
    """Return pages of unit-variance numbers in a format; `shape` is the shape of a page."""
    values = rng.standard_normal((n_pages, *shape, D)).astype(np.float32)
    stored = kv_format(format)
    return encode(values, stored.dtype, format)


def _cache(
    rng: np.random.Generator,
    n_pages: int,
    G: int,
    D: int,
    page_size: int,
    format: str,
    kv_layout: str,
    joined: bool,
) -> dict[str, Any]:
    """Return the cache and page-table arguments."""
    inner = (page_size, G) if kv_layout == "NHD" else (G, page_size)
    keys, values = split_names(format)
    named = {} if format in ("f32", "f16") else {"kv_format": format}
    if keys != values:
        both = (_pages(rng, n_pages, inner, name, D) for name in (keys, values))
        return {"paged_kv_cache": tuple(both), "kv_layout": kv_layout, **named}
    pages = _pages(rng, n_pages, (2, *inner), format, D)
    pair = (pages[:, 0].copy(), pages[:, 1].copy())
    return {"paged_kv_cache": pages if joined else pair, "kv_layout": kv_layout, **named}


def _case(
    name: str,
    lens: list[int],
    new: list[int],
    G: int,
    D: int,
    page_size: int,
    *,
    format: str = "f32",
    kv_layout: str = "NHD",
    joined: bool = False,
    timed: bool = False,
    rotary_dim: int = 0,
    interleave: bool = False,
) -> OpCase:
    """Return a case that appends `new` tokens to requests, of which `lens` include them.

    With `rotary_dim`, the first columns of the keys are rotated.
    """
    row_bytes = sum(f.row_bytes(D) for f in kv_formats(format))

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        indptr, indices, last = page_table(rng, lens, page_size)
        cache = _cache(rng, len(indices), G, D, page_size, format, kv_layout, joined)
        runs = [np.arange(n - m, n) for n, m in zip(lens, new, strict=True)]
        T, rotation = sum(new), dict[str, Any]()
        if rotary_dim:
            table = rope_cos_sin_cache(max(lens) + 3, rotary_dim, theta=1e4)
            rotation = {"cos_sin": table, "interleave": interleave}
        return {
            "append_key": rng.standard_normal((T, G, D)).astype(np.float32),
            "append_value": rng.standard_normal((T, G, D)).astype(np.float32),
            "batch_indices": np.repeat(np.arange(len(lens)), new).astype(np.int32),
            "positions": np.concatenate(runs).astype(np.int32),
            "kv_indices": indices,
            "kv_indptr": indptr,
            "kv_last_page_len": last,
            **cache,
            **rotation,
        }

    if rotary_dim:
        return OpCase(
            "append_paged_kv_cache", name, inputs, 0.0, ROTATED_ATOL, ROTATED,
            mutates=("paged_kv_cache",),
        )  # fmt: skip
    return exact_case(
        "append_paged_kv_cache", name, inputs, COPY, mutates=("paged_kv_cache",),
        n_bytes=sum(new) * G * (8 * D + row_bytes), timed=timed,
    )  # fmt: skip


def _mla(name: str, format: str, D_ckv: int, D_kpe: int) -> OpCase:
    """Append 5 of 9 tokens, and all of 2; float caches are slices of one array."""

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        indptr, indices, last = page_table(rng, [9, 2], 4)
        ckv, kpe = (_pages(rng, len(indices), (4,), format, D) for D in (D_ckv, D_kpe))
        named = {} if format in ("f32", "f16") else {"kv_format": format}
        if not named:
            both = np.concatenate([ckv, kpe], axis=2)
            ckv, kpe = both[..., :D_ckv], both[..., D_ckv:]
        return {
            "append_ckv": rng.standard_normal((7, D_ckv)).astype(np.float32),
            "append_kpe": rng.standard_normal((7, D_kpe)).astype(np.float32),
            "batch_indices": np.repeat([0, 1], [5, 2]).astype(np.int32),
            "positions": np.array([4, 5, 6, 7, 8, 0, 1], np.int32),
            "ckv_cache": ckv,
            "kpe_cache": kpe,
            "kv_indices": indices,
            "kv_indptr": indptr,
            "kv_last_page_len": last,
            **named,
        }

    mutates = ("ckv_cache", "kpe_cache")
    return exact_case("append_paged_mla_kv_cache", name, inputs, COPY, mutates=mutates)


def _convert(
    name: str,
    lens: list[int],
    *sizes: int,
    to: dict[str, Any],
    head_dim: int | None = None,
    timed: bool = False,
    **options: Any,
) -> OpCase:
    """Return a conversion; `sizes` are G, D and both page sizes, `to` options of the target."""
    G, D, page_size, out_size = sizes
    source = {"format": "f32", "kv_layout": "NHD", "joined": False, **options}
    target = {**source, **to}

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        tables = [page_table(rng, lens, size) for size in (page_size, out_size)]
        caches = [
            _cache(rng, len(indices), G, D, size, **side)
            for (_, indices, _), size, side in zip(
                tables, (page_size, out_size), (source, target), strict=True
            )
        ]
        ordered = [(indices, indptr, last) for indptr, indices, last in tables]
        named = {f"out_{n}": v for n, v in caches[1].items() if n != "paged_kv_cache"}
        return {
            **caches[0], "page_table": ordered[0], "out": caches[1]["paged_kv_cache"],
            "out_page_table": ordered[1], "head_dim": head_dim, **named,
        }  # fmt: skip

    row_bytes = sum(f.row_bytes(D) for side in (source, target) for f in kv_formats(side["format"]))
    return exact_case(
        "convert_paged_kv_cache", name, inputs, COPY, mutates=("out",),
        n_bytes=sum(lens) * G * row_bytes, timed=timed,
    )  # fmt: skip


def _gather(
    name: str,
    lens: list[int],
    *sizes: int,
    dtype: str = "float32",
    timed: bool = False,
    **options: Any,
) -> OpCase:
    G, D, page_size = sizes
    options = {"format": "f32", "kv_layout": "NHD", "joined": False, **options}
    row_bytes = sum(f.row_bytes(D) for f in kv_formats(options["format"]))

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        indptr, indices, last = page_table(rng, lens, page_size)
        return {
            "kv_indices": indices,
            "kv_indptr": indptr,
            "kv_last_page_len": last,
            "head_dim": D,
            "dtype": dtype,
            **_cache(rng, len(indices), G, D, page_size, **options),
        }

    return exact_case(
        "gather_paged_kv_cache", name, inputs,
        "decoding rounds once to float32, and once more to float16 where that is wanted",
        n_bytes=sum(lens) * G * (2 * D * np.dtype(dtype).itemsize + row_bytes), timed=timed,
    )  # fmt: skip


def _rotated_float8(
    name: str, H: int, G: int, d: int, n: int, *, kv_layout: str = "NHD", **options: Any
) -> OpCase:
    """Return a case of RoPE, float8 and append; 0 key heads are latent attention."""
    format, page_size = options.get("quantize_dtype", "f8_e4m3"), 4

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        indptr, indices, _ = page_table(rng, [9, 2], page_size)
        q, k = (rng.standard_normal((6, h, d + n)).astype(np.float32) for h in (H, max(G, 1)))
        value = rng.standard_normal((6, max(G, 1), d + n)).astype(np.float32)
        inner: tuple[int, ...] = (page_size, G) if kv_layout == "NHD" else (G, page_size)
        if not G:
            k, inner = k[:, 0], (page_size,)
        sizes = (d + n, d + n) if G else (n, d)
        caches = tuple(_pages(rng, len(indices), inner, format, size) for size in sizes)
        return {
            "q_rope": q[..., :d], "k_rope": k[..., :d],
            "q_nope": q[..., d:] if n else None, "k_nope": k[..., d:] if n else None,
            "v": value if G else None, "cos_sin_cache": rope_cos_sin_cache(30, d, theta=1e4),
            "pos_ids": np.array([3, 0, 29, 7, 7, 1], np.int32), "paged_kv_cache": caches,
            "kv_indices": indices, "kv_indptr": indptr,
            "batch_indices": np.array([0, 0, 1, 0, 1, -1], np.int32),
            "positions": np.array([4, 11, 0, 8, 1, 0], np.int32), "page_size": page_size,
            "kv_layout": kv_layout, **options,
        }  # fmt: skip

    return exact_case(
        "rope_quantize_fp8_append_paged_kv_cache", name, inputs,
        "one rounding to float8, and no number of these is next to the middle of two",
        mutates=("paged_kv_cache",),
    )  # fmt: skip


def _nvfp4(name: str, G: int, sizes: tuple[int, int], **options: Any) -> OpCase:
    """Return a case of an NVFP4 append, to slots if `slots` are given."""
    page_size, slots = 4, options.pop("slots", None)
    layout, joined = options.pop("kv_layout", "NHD"), options.pop("joined", False)

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        indptr, indices, last = page_table(rng, [9, 2], page_size)
        inner = (page_size, G) if layout == "NHD" else (G, page_size)
        magnitudes = 10.0 ** rng.integers(-5, 4, (6, G, 1))  # some scales become 0, some saturate
        key, value = ((rng.standard_normal((6, G, D)) * magnitudes).astype("f4") for D in sizes)
        codes: Any
        scales: Any
        codes, scales = (
            tuple(np.full((len(indices), *inner, D // n), 0xA5, np.uint8) for D in sizes)
            for n in (2, 16)
        )
        if joined:
            codes, scales = np.stack(codes, 1), np.stack(scales, 1)
        rows = {"slot_mapping": np.array(slots, np.int32)} if slots else {
            "batch_indices": np.array([0, 0, 1, 0, 1, -1], np.int32),
            "positions": np.array([4, 8, 0, 7, 1, 0], np.int32),
            "kv_indices": indices, "kv_indptr": indptr, "kv_last_page_len": last,
        }  # fmt: skip
        return {
            "append_key": key, "append_value": value, **rows, "paged_kv_cache": codes,
            "kv_cache_sf": scales, "kv_layout": layout, "k_scale": 1.0, "v_scale": 1.0, **options,
        }  # fmt: skip

    op = "nvfp4_quantize_append_paged_kv_cache" + ("_with_slot_mapping" if slots else "")
    return exact_case(
        op, name, inputs,
        "two roundings, of scales and of codes, and no number of these is next to a middle",
        mutates=("paged_kv_cache", "kv_cache_sf"),
    )  # fmt: skip


BLOCK_FORMATS = [name for name, kind in KINDS.items() if kind >= FIRST_BLOCK_KIND]

HALF_HEADS_FIRST: dict[str, Any] = {"format": "f16", "kv_layout": "HND"}
TO_Q8_0: dict[str, Any] = {"format": "q8_0"}

CASES = [
    _case("prefill_and_decode", [5, 1, 9], [5, 1, 1], 2, 20, 4),
    _case("half", [5, 8], [2, 8], 3, 36, 4, format="f16"),
    _case("bfloat16", [5, 8], [2, 8], 3, 36, 4, format="bf16"),
    _case("heads_first", [5, 8], [2, 8], 3, 16, 4, kv_layout="HND"),
    _case("one_array", [5, 8], [2, 8], 3, 16, 4, joined=True),
    _case("one_array_half_heads_first", [3], [1], 2, 100, 1, joined=True, **HALF_HEADS_FIRST),
    _case("nothing_new", [3, 0], [0, 0], 2, 16, 2),
    *(_case(f"{name}_padded", [3, 6], [2, 5], 2, 80, 4, format=name) for name in BLOCK_FORMATS),
    _case("q8_0_heads_first", [5], [5], 3, 64, 2, format="q8_0", kv_layout="HND", joined=True),
    _case("q4_0_size_20", [5], [5], 1, 20, 4, format="q4_0"),
    _case("q3h_size_100", [5], [5], 2, 100, 4, format="q3h"),
    _case("q8_0_and_q4_0", [5, 3], [5, 1], 2, 80, 4, format="q8_0/q4_0"),
    _case("bf16_and_q3h_heads_first", [5, 8], [2, 8], 3, 36, 4, format="bf16/q3h", kv_layout="HND"),
    _case("q5_1_and_f16", [5], [2], 1, 20, 4, format="q5_1/f16"),
    _case("rotated", [5, 8], [2, 8], 2, 40, 4, rotary_dim=36),
    _case("rotated_half", [9], [9], 1, 64, 4, rotary_dim=64, interleave=True),
    _case("llama2_7b", [512], [512], 32, 128, 16, format="f16", timed=True),
    _case("llama3_8b_q8_0", [512], [512], 8, 128, 16, format="q8_0", timed=True),
    _case("llama3_8b_q4", [512], [512], 8, 128, 16, format="q4", timed=True),
    _mla("slices_of_one_array", "f32", 48, 16),
    _mla("half", "f16", 33, 7),
    _mla("q8_0", "q8_0", 64, 20),
    _rotated_float8("heads", 4, 2, 16, 20, quant_scale_q=0.3),
    _rotated_float8("all_columns_heads_first", 2, 2, 32, 0, kv_layout="HND", quant_scale_kv=100.0),
    _rotated_float8("latent", 3, 0, 16, 50, is_neox=False, quantize_dtype="f8_e5m2"),
    _nvfp4("pages", 3, (48, 48), k_scale=0.02, v_scale=3.0),
    _nvfp4("one_array_heads_first", 2, (64, 64), kv_layout="HND", joined=True),
    _nvfp4("slots", 2, (32, 16), slots=[3, -1, 15, 16, 0, 900]),
    _gather("float", [5, 0, 9], 2, 20, 4),
    _gather("half_heads_first", [5, 1], 3, 36, 4, format="f16", kv_layout="HND"),
    _gather("bfloat16_one_array", [5, 1], 3, 36, 4, format="bf16", joined=True),
    _gather("q5_0_to_half", [5, 3], 2, 80, 2, format="q5_0", dtype="float16"),
    *(_gather(f"{name}_padded", [3, 6], 2, 100, 4, format=name) for name in BLOCK_FORMATS),
    _gather("q8_0_and_f16", [5, 9], 2, 80, 4, format="q8_0/f16", kv_layout="HND"),
    _gather("f32_and_q4_padded_to_half", [5], 2, 36, 4, format="f32/q4", dtype="float16"),
    _gather("llama3_8b_q8_0", [2048], 8, 128, 16, format="q8_0", timed=True),
    _gather("llama3_8b_q3h", [2048], 8, 128, 16, format="q3h", timed=True),
    _convert("to_heads_first", [5, 0, 9], 2, 20, 4, 3, to={"kv_layout": "HND"}),
    _convert("q8_0_pages", [7], 2, 36, 2, 16, format="q8_0", to={"joined": True}),
    _convert("half_to_q8_0", [5, 3], 2, 36, 4, 1, format="f16", to={"format": "q8_0"}),
    _convert("keys_only", [5], 2, 64, 1, 4, format="q4_0/f8_e4m3", to={"format": "f32/f8_e4m3"}),
    _convert("llama3_8b", [2048], 8, 128, 16, 64, format="f16", to=HALF_HEADS_FIRST, timed=True),
    _convert("llama3_8b_q8_0", [2048], 8, 128, 16, 16, format="f16", to=TO_Q8_0, timed=True),
    exact_case(
        "get_seq_lens",
        "with_an_empty_request",
        lambda rng: {
            "kv_indptr": np.array([0, 3, 3, 4], np.int32),
            "kv_last_page_len": np.array([2, 0, 16], np.int32),
            "page_size": 16,
        },
        "integers",
    ),
    exact_case(
        "get_batch_indices_positions",
        "ragged",
        lambda rng: {
            "append_indptr": np.array([0, 3, 3, 4], np.int32),
            "seq_lens": np.array([3, 7, 20], np.int32),
            "nnz": 4,
        },
        "integers",
    ),
    exact_case(
        "get_batch_indices_positions",
        "padding",
        lambda rng: {
            "append_indptr": np.array([0, 1, 2], np.int32),
            "seq_lens": np.array([3, 7], np.int32),
            "nnz": 5,
        },
        "integers",
    ),
]
