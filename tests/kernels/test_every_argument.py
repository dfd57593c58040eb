"""No argument of a public function is accepted and ignored: each has an effect or is refused."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from paged_sequences import Paged, ints, normal

import nbflow_kernels as nk
from nbflow_kernels import op_registry
from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.cpu import parallel_for
from nbflow_kernels.errors import UsageError
from nbflow_kernels.testing import checks

H, G, D, PAGE = 4, 2, 32, 16
LENS, ROWS = [4300, 40], ints(0, 2, 3)
TOKENS = sum(LENS)


def public_functions() -> Iterator[Any]:
    for names in op_registry.FAMILIES.values():
        for name in names:
            found = getattr(nk, name)
            members = vars(found).values() if inspect.isclass(found) else [found]
            yield from (m for m in members if inspect.isfunction(m) and m.__module__ != "builtins")


@pytest.mark.parametrize("function", list(public_functions()), ids=lambda f: f.__qualname__)
def test_every_parameter_is_read(function: Callable[..., Any]) -> None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except OSError:  # made by `dataclass`, which keeps every field
        return
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    read = {"self", *(node.id for node in names if isinstance(node.ctx, ast.Load))}
    if function.__qualname__.endswith("RopeScaling.frequencies"):
        read |= {"rotary_dim", "theta", "seq_len"}  # the models' rules differ in what they need
    parameters = inspect.signature(function).parameters
    if "locals" in read:  # options are passed on by name; the test below has them all
        assert function.__qualname__.split(".")[0] in WRAPPERS
        read |= {name for name, p in parameters.items() if p.default is not p.empty}
    assert set(parameters) <= read


RNG = np.random.default_rng(0)
PAGED = Paged(RNG, LENS, (H, G, D), PAGE)
Q, SINKS = normal(RNG, 3, H, D), normal(RNG, H)
K, V = np.concatenate(PAGED.k), np.concatenate(PAGED.v)
TABLES = (ROWS, *PAGED.table)
SPARSE_K = normal(RNG, 64, G, D)
BLOCKS = (ints(0, 2, 3), ints(3, 0, 2), 2, 64, 1, 16, H, G, D)
MASK_SIZE = 2 * LENS[0] + LENS[1]
CKV = normal(RNG, len(PAGED.table[1]), PAGE, D)
CKV_LENS = np.array(LENS, np.int32)
SIZES = np.array([[2, 0]] * G, np.int32), np.array([[16, 48]] * G, np.int32)
TWO_LEVELS = tuple([array] * 2 for array in TABLES)

# The class, and the arguments of its `plan` and its `run` that have no default.
WRAPPERS: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {
    "BatchDecodeWithPagedKVCacheWrapper": (
        nk.BatchDecodeWithPagedKVCacheWrapper, (*PAGED.table, H, G, D, PAGE), (Q[:2], PAGED.cache),
    ),
    "BatchPrefillWithPagedKVCacheWrapper": (
        nk.BatchPrefillWithPagedKVCacheWrapper, (*TABLES, H, G, D, PAGE), (Q, PAGED.cache),
    ),
    "BatchPrefillWithRaggedKVCacheWrapper": (
        nk.BatchPrefillWithRaggedKVCacheWrapper, (ROWS, ints(0, LENS[0], TOKENS), H, G, D),
        (Q, K, V),
    ),
    "BatchAttention": (
        nk.BatchAttention, (*TABLES[:3], CKV_LENS, H, G, D, D, PAGE), (Q, PAGED.cache),
    ),
    "BatchMLAPagedAttentionWrapper": (
        nk.BatchMLAPagedAttentionWrapper,
        (*TABLES[:3], CKV_LENS, H, D, D, PAGE, True, 0.1), (Q, Q, CKV, CKV),
    ),
    "MultiLevelCascadeAttentionWrapper": (
        partial(nk.MultiLevelCascadeAttentionWrapper, 2), (*TWO_LEVELS, H, G, D, PAGE),
        (Q, PAGED.cache),
    ),
    "BlockSparseAttentionWrapper": (
        nk.BlockSparseAttentionWrapper, BLOCKS, (Q[:2], SPARSE_K, SPARSE_K),
    ),
    "VariableBlockSparseAttentionWrapper": (
        nk.VariableBlockSparseAttentionWrapper, (np.ones((G, 2, 2), bool), *SIZES, H, G, D),
        tuple(np.ascontiguousarray(a.swapaxes(0, 1)) for a in (Q[:2], SPARSE_K, SPARSE_K)),
    ),
    "BatchAttentionWithAttentionSinkWrapper": (
        nk.BatchAttentionWithAttentionSinkWrapper, (*TABLES, H, G, D, PAGE),
        (Q, PAGED.cache, SINKS),
    ),
    "PODWithPagedKVCacheWrapper": (
        nk.PODWithPagedKVCacheWrapper, (*PAGED.table, H, G, D, PAGE),
        (Q, K[: LENS[0]], V[: LENS[0]], Q[:2], PAGED.cache),
    ),
    "single_prefill_with_kv_cache": (
        nk.single_prefill_with_kv_cache, (), (Q, K[: LENS[0]], V[: LENS[0]]),
    ),
    "single_decode_with_kv_cache": (
        nk.single_decode_with_kv_cache, (), (Q[0], K[: LENS[0]], V[: LENS[0]]),
    ),
}  # fmt: skip


def _mask(n: int) -> np.ndarray:
    return np.arange(n) % 3 > 0


# Another value than the default for each parameter of any of them.
VALUES: dict[str, Any] = {
    "float_workspace_buffer": np.zeros(1 << 20, np.uint8),
    "kv_layout": "HND",
    "use_cuda_graph": True,
    "use_tensor_cores": True,
    "backend": "fa2",
    **dict.fromkeys(("qo_indptr_buf", "kv_indptr_buf", "paged_kv_indptr_buf"), ints(0)),
    **dict.fromkeys(("paged_kv_indices_buf", "paged_kv_last_page_len_buf"), ints(0)),
    **dict.fromkeys(("paged_kv_indptr_buffer", "paged_kv_indices_buffer"), ints(0)),
    **dict.fromkeys(("qo_indptr_buf_arr", "paged_kv_indptr_buf_arr"), [ints(0)] * 2),
    **dict.fromkeys(("paged_kv_indices_buf_arr", "paged_kv_last_page_len_buf_arr"), [ints(0)] * 2),
    "paged_kv_last_page_len_buffer": ints(0),
    "head_dim_vo": 16,
    "causal": True,
    "pos_encoding_mode": "ALIBI",
    "use_fp16_qk_reduction": True,
    "sm_scale": 0.7,
    "window_left": 9,
    "attention_chunk": 9,
    "logits_soft_cap": 0.5,
    "rope_scale": 2.0,
    "rope_theta": 5e5,
    "q_data_type": "float16",
    "kv_data_type": "float16",
    "o_data_type": np.float16,
    "data_type": "float16",
    "o_dtype": np.float16,
    "non_blocking": False,
    "fixed_split_size": 3,
    "disable_split_kv": True,
    "disable_page_sharing": True,
    "kv_format": "q8_0",
    "variant": object(),
    **dict.fromkeys(("q_scale", "k_scale", "v_scale", "scale_q", "scale_k", "scale_v"), 0.3),
    "return_lse": True,
    "sinks": SINKS,
    "lse_base": "e",
    "return_lse_base_on_e": True,
    "q_len_per_req": 2,
    "head_dim_qk": 16,
    "key_cos_sin": normal(np.random.default_rng(1), LENS[0], D),
    "key_interleave": True,
    "key_bias": normal(np.random.default_rng(2), G, D),
    "kv_cache_sf": (SINKS, SINKS),
    **dict.fromkeys(("prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr"), ints(1)),
    "token_pos_in_items_len": 3,
}
VALUES |= {  # of the prompt and of the decode rows
    f"{name}_{part}": VALUES[name]
    for name in (
        "causal", "kv_layout", "pos_encoding_mode", "sm_scale", "window_left", "rope_scale",
        "rope_theta", "return_lse",
    )
    for part in "pd"
}  # fmt: skip
NATURAL = {"lse_base", "return_lse_base_on_e"}
"""Arguments about the LSE, which must be returned to see their effect."""
REASONS = {
    "q_data_type": "was planned as float16", "kv_data_type": "was planned as float16",
    "data_type": "was planned as float16",
    "kv_layout": "must have shape|must be a multiple of num_kv_heads",
    "head_dim_vo": "must have shape|head_dim_vo", "q_len_per_req": "q must have shape",
    "kv_format": "q8_0 must have", "use_cuda_graph": "buf",
    "kv_layout_p": "must be a multiple of num_kv_heads", "rope_scale_p": "rope_scale is for",
    "rope_theta_p": "rope_theta is for", "kv_cache_sf": "keys.*must have dtype uint8|k must have",
}  # fmt: skip
"""Messages of refusals that do not name the parameter: arrays do not fit the plan."""
MASKS = {
    "BatchPrefillWithPagedKVCacheWrapper": (MASK_SIZE, "custom_mask", "packed_custom_mask"),
    "BatchPrefillWithRaggedKVCacheWrapper": (MASK_SIZE, "custom_mask", "packed_custom_mask"),
    "BatchAttentionWithAttentionSinkWrapper": (MASK_SIZE, "custom_mask", "packed_custom_mask"),
    "single_prefill_with_kv_cache": (3 * LENS[0], "custom_mask", "packed_custom_mask"),
    "PODWithPagedKVCacheWrapper": (3 * LENS[0], "custom_mask_p", "packed_custom_mask_p"),
    "BlockSparseAttentionWrapper": (48, "mask", "packed_mask"),
}


def value_of(wrapper: str, parameter: str) -> Any:
    """Return what to give for a parameter."""
    if wrapper in MASKS and parameter in MASKS[wrapper][1:]:
        n, plain, _ = MASKS[wrapper]
        if parameter != plain:
            sizes = {48: [32, 16], MASK_SIZE: [2 * LENS[0], LENS[1]]}.get(n, [n])
            parts = np.split(_mask(n), np.cumsum(sizes)[:-1])
            return np.concatenate([np.packbits(part, bitorder="little") for part in parts])
        return _mask(n).reshape(3, 1, 16) if n == 48 else _mask(n)
    return VALUES[parameter]


def observe(wrapper: str, changed: dict[str, dict[str, Any]]) -> tuple[Any, ...]:
    """Return everything that the arguments may have an effect on."""
    make, plan_arguments, run_arguments = WRAPPERS[wrapper]
    plan = None
    if wrapper.startswith("single"):
        run = partial(make, *run_arguments)
    else:
        made = make(**changed["__init__"])
        made.plan(*plan_arguments, **changed["plan"])
        plan = getattr(made, "current", None)
        run = partial(made.run, *run_arguments)
    run_options = dict(changed["run"])
    takes = inspect.signature(run).parameters
    if "return_lse" in takes and "return_lse" not in run_options:
        run_options["return_lse"] = any(
            n in run_options for n in ("lse_base", "return_lse_base_on_e")
        )
    found = run(**run_options)
    seen: list[Any] = []
    for array in checks.leaves(found):
        seen += [array.dtype, array.tobytes()]
    if plan is not None:
        options = (at.CAUSAL, at.WINDOW, at.SPLIT_KEYS, at.MAY_SPLIT, at.MAY_SHARE)
        seen += [plan.items.tobytes(), plan.header[list(options)].tobytes(), plan.waits_for_copies]
    return tuple(seen)


def cases() -> Iterator[tuple[str, str, str]]:
    for name, (make, *_) in WRAPPERS.items():
        if name.startswith("single"):
            methods = {"run": make}
        else:
            cls = make.func if isinstance(make, partial) else make
            names = ("__init__", "plan", "run")
            methods = {method: getattr(cls, method) for method in names}
        for method, function in methods.items():
            for parameter in inspect.signature(function).parameters.values():
                if parameter.default is not parameter.empty:
                    yield name, method, parameter.name


@pytest.fixture(scope="module")
def usual() -> dict[Any, Any]:
    return {}


@pytest.mark.parametrize(("wrapper", "method", "parameter"), list(cases()))
def test_an_argument_has_an_effect_or_is_refused(
    wrapper: str, method: str, parameter: str, usual: dict[Any, Any]
) -> None:
    def changed(value: Any) -> dict[str, dict[str, Any]]:
        return {m: {parameter: value} if m == method else {} for m in ("__init__", "plan", "run")}

    before = parallel_for.get_num_threads()
    parallel_for.set_num_threads(2)
    try:
        natural = parameter in NATURAL
        key = wrapper, natural
        if key not in usual:
            nothing = changed(None)
            if natural:
                nothing[method] = {"return_lse": True}
            else:
                nothing[method] = {}
            usual[key] = observe(wrapper, nothing)
        if parameter in ("out", "lse", "out_p", "out_d"):
            check_output(wrapper, parameter, usual[key])
            return
        value = value_of(wrapper, parameter)
        try:
            seen = observe(wrapper, changed(value))
        except (UsageError, TypeError) as error:
            reason = str(error)
        else:
            reason = ""
        if reason:
            assert re.search(REASONS.get(parameter, parameter), reason)
        elif parameter == "float_workspace_buffer":
            # 64 keys at most are not divided
            assert value.any() == (not wrapper.endswith("BlockSparseAttentionWrapper"))
            value[:] = 0
        else:
            assert seen != usual[key]
    finally:
        parallel_for.set_num_threads(before)


def check_output(wrapper: str, parameter: str, usual: tuple[Any, ...]) -> None:
    """Check that results are written to the caller's arrays."""
    everything: dict[str, dict[str, Any]] = {"__init__": {}, "plan": {}, "run": {}}
    q = WRAPPERS[wrapper][2][3 if parameter == "out_d" else 0]
    shape = q.shape[:-1] if parameter == "lse" else q.shape
    given = np.full(shape, 77, np.float32)
    everything["run"] = {parameter: given}
    seen = observe(wrapper, everything)
    assert seen[:2] == usual[:2]
    assert (given != 77).all()
