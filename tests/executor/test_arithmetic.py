"""Activation precisions, KV cache formats, and multi-step decode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_models import write_llama

import nbflow
from nbflow.engine import llm as engine_model
from nbflow.engine import multi_step_runner
from nbflow_kernels.errors import UsageError

IDS = np.arange(40) * 7 % 101


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, n_layers=2)
    return folder


def _logits(checkpoint: Path, **options: object) -> np.ndarray:
    with nbflow.load(checkpoint, **{"kv": "f32", **options}) as model:  # type: ignore[arg-type]
        return model.logits(IDS)


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(
    ("weights", "activations", "low", "high"),
    [
        # int8: 0.5 % per product; over 15 products random errors add up to 2 %, and random weights
        # amplify them up to three times
        ("q8_0", "int8", 1e-3, 6e-2),
        ("q4_k", "int8", 1e-3, 6e-2),
        # bfloat16: 0.23 % per product, likewise
        ("q8_0", "bf16", 2e-4, 3e-2),
        ("f16", "bf16", 2e-4, 3e-2),
    ],
)
def test_arithmetic_moves_the_logits_a_little(
    checkpoint: Path, weights: str, activations: str, low: float, high: float
) -> None:
    if weights == "q4_k":  # blocks of 256
        write_llama(
            checkpoint / "wide", n_layers=1, hidden_size=256, intermediate_size=512, n_heads=8
        )
        checkpoint = checkpoint / "wide"
    exact = _logits(checkpoint, weights=weights)
    other = _logits(checkpoint, weights=weights, activations=activations)
    assert low < _difference(other, exact) < high


def test_int8_keeps_float_weights_as_they_are(checkpoint: Path) -> None:
    assert np.array_equal(_logits(checkpoint, activations="int8"), _logits(checkpoint))


@pytest.mark.parametrize("activations", ["int8", "bf16"])
def test_pieces_of_a_prompt_and_partitions_agree(checkpoint: Path, activations: str) -> None:
    options = {"weights": "q8_0", "activations": activations}
    whole = _logits(checkpoint, **options)
    assert np.array_equal(_logits(checkpoint, **options, max_step_tokens=7), whole)
    assert np.array_equal(_logits(checkpoint, **options, partition="0;1"), whole)


# error of the format on N(0, 1) keys and values; see docs/kvcache.md
@pytest.mark.parametrize(
    ("kv", "high"),
    [
        *(("f16", 2e-3), ("bf16", 1e-2), ("q8_0", 2e-2), ("q4_0", 0.3), ("q3h", 0.5)),
        *(("f16/q8_0", 2e-2), ("q8_0/q4_0", 0.3), ("f8_e4m3", 0.1)),
    ],
)
def test_cache_formats(checkpoint: Path, kv: str, high: float) -> None:
    exact = _logits(checkpoint)
    assert 0 < _difference(_logits(checkpoint, kv=kv), exact) < high
    assert np.array_equal(_logits(checkpoint, kv=kv, max_step_tokens=3), _logits(checkpoint, kv=kv))


def test_unknown_arithmetic_is_refused_with_a_suggestion(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'int8'"):
        nbflow.load(checkpoint, activations="int9")


@pytest.mark.parametrize(
    "options",
    [
        {"decoding": "greedy"},
        {"decoding": "top_p", "temperature": 0.8, "top_p": 0.9},
        {"decoding": "top_k", "top_k": 7},
        {"decoding": "min_p", "min_p": 0.1},
        {"decoding": "sample"},
    ],
    ids=lambda o: o["decoding"],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_multi_step_decode_samples_as_single_steps(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, options: dict, batch: int
) -> None:
    prompts = [IDS[: 3 + 5 * i].tolist() for i in range(batch)]
    results = []
    for seconds in (0.0, 1e6):  # one step, and as many as fit
        monkeypatch.setattr(engine_model, "BATCH_MULTI_STEP_S", seconds)
        with nbflow.load(checkpoint) as model:
            made = [model.generate_batch(prompts, max_tokens=24, seed=3, **options)]
            made.append(model.generate_batch(prompts, max_tokens=24, seed=3, **options))
        assert made[0] == made[1]
        results.append(made[0])
    assert results[0] == results[1]


def test_filters_of_several_requests_share_a_multi_step_decode(checkpoint: Path) -> None:
    parameters = [{"temperature": 0.7}, {"top_k": 5}, {"temperature": 1.4, "top_p": 0.8}]
    with nbflow.load(checkpoint) as model:
        prompt = IDS[:6].tolist()
        alone = [
            model.generate(prompt, 12, "filters", ignore_eos=True, **p).ids for p in parameters
        ]
        for order in ((0, 1, 2), (2, 0, 1)):  # the second reads other parameters in one buffer
            requests = [
                model.make_request(prompt, 12, "filters", 0, True, **parameters[i]) for i in order
            ]
            n_items = sum(1 for _ in model.run_requests(requests, burst_s=1e6))
            assert [r.ids for r in requests] == [alone[i] for i in order]
        assert n_items <= 3  # the prompts, then all decode steps
        (decode,) = [d for k, d in model.workers[0].multi_step._decodes.items() if k[1] == 3]
        assert decode.strategy is None


def test_more_batch_sizes_than_cached_buffers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_step_runner, "MAX_DECODES", 2)
    prompt = IDS[:4].tolist()

    def rounds(model: nbflow.LLM) -> list[list[int]]:
        return [
            made.ids
            for n in (1, 2, 3, 4)
            for made in model.generate_batch([prompt] * n, 9, "top_k", top_k=n + 1, ignore_eos=True)
        ]

    with nbflow.load(checkpoint) as model:
        assert rounds(model) == rounds(model)


def test_multi_step_decode_stops_at_an_end_token(checkpoint: Path) -> None:
    with nbflow.load(checkpoint) as model:
        free = model.generate(IDS[:5].tolist(), max_tokens=20, ignore_eos=True)
        end = free.ids[6]
        first = free.ids.index(end)
        request = model.make_request(IDS[:5].tolist(), 20, "greedy", 0, False)
        request.stop_ids = frozenset({end})
        for _ in range(2):  # the first run measures the step time
            request.ids, request.logprobs, request.n_computed, request.finish_reason = (
                [],
                [],
                0,
                None,
            )
            for _ in model.run_requests([request], burst_s=1e6):
                pass
            assert request.finish_reason == "stop"
            assert request.ids == free.ids[:first]
        assert list(model.stream(IDS[:5].tolist(), max_tokens=20, ignore_eos=True)) == free.ids


def test_logits_that_are_no_numbers_are_reported(checkpoint: Path, tmp_path: Path) -> None:
    write_llama(tmp_path, n_layers=1)
    with nbflow.load(tmp_path) as model:
        for operands in model.workers[0].weights.operands[-1:]:
            packed = operands[0].packed()
            packed.data[:] = np.nan
        with pytest.raises(UsageError, match="the model's logits have a NaN"):
            model.generate([1, 2, 3], max_tokens=5)


def test_generation_past_a_split_of_the_keys(tmp_path: Path) -> None:
    # split-KV: 2048 keys per split
    write_llama(tmp_path, n_layers=1, max_context=2200, n_heads=2, n_kv_heads=1)
    prompt = (np.arange(2040) * 13 % 101).tolist()
    with nbflow.load(tmp_path, threads=2) as model:
        ids = model.generate(prompt, max_tokens=30, ignore_eos=True).ids
        again = model.logits(prompt + ids)
    assert ids == again[len(prompt) - 1 : -1].argmax(axis=1).tolist()
