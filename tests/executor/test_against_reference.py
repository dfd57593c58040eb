"""The engine against the float64 reference executor, and against itself on every partition."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from small_models import write_llama

import nbflow
from nbflow.checkpoint import open_weights
from nbflow.engine.request import Request
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.program import build, fuse
from nbflow.sampling import Greedy, TopK, TopP
from nbflow.spec import resolve
from nbflow_kernels.errors import UsageError

PARTITIONS = ("0;1", "0&1", "0&1;2&3", "0;1;2", "0&1&2&3", "0;1&2")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, n_layers=3, n_heads=8, n_kv_heads=2, intermediate_size=320)
    return folder


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(3).integers(0, 101, 50)


def reference_logits(folder, weights, ids, fused=True):
    spec = resolve(folder).spec
    program = fuse(build(spec)) if fused else build(spec)
    with open_weights(folder) as file:
        executor = ReferenceExecutor(program, WeightLoader(program, file, weights))
    return executor.logits(np.asarray(ids))


def relative(a, b):
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize("weights", [None, "f16", "bf16", "q8", "q4", "q3h", "q2"])
def test_logits_equal_the_float64_reference(checkpoint, ids, weights):
    expected = reference_logits(checkpoint, weights, ids)
    with nbflow.load(checkpoint, weights=weights, kv="f32") as model:
        # float32 rounding through 3 layers of sums of up to 320 terms: about 3 * sqrt(320) * 6e-8
        assert relative(model.logits(ids), expected) < 1e-5


def test_fusing_does_not_change_the_reference(checkpoint, ids):
    plain = reference_logits(checkpoint, None, ids, fused=False)
    np.testing.assert_allclose(
        plain, reference_logits(checkpoint, None, ids), rtol=1e-10, atol=1e-12
    )


def test_reference_in_pieces_equals_reference_at_once(checkpoint, ids):
    spec = resolve(checkpoint).spec
    program = build(spec)
    seen = []
    with open_weights(checkpoint) as file:
        weights = WeightLoader(program, file, None)
    executor = ReferenceExecutor(program, weights, trace=lambda op, value: seen.append(op.kind))
    pieces = np.concatenate([executor.logits(ids[:7]), executor.logits(ids[7:])])
    np.testing.assert_allclose(
        pieces, reference_logits(checkpoint, None, ids), rtol=1e-9, atol=1e-11
    )
    assert seen == [op.kind for op in program.ops] * 2


def test_float16_cache_is_close(checkpoint, ids):
    with nbflow.load(checkpoint) as model:
        # keys and values are rounded to 11 bits: 2**-11 = 5e-4 each, averaged over the context
        assert 0 < relative(model.logits(ids), reference_logits(checkpoint, None, ids)) < 5e-3


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("weights", [None, "q4"])
def test_every_partition_agrees_with_one_rank(checkpoint, ids, partition, weights):
    # A float16 cache turns the last bit of a float32 sum into 2**-11 where it decides a rounding.
    options = {"weights": weights, "kv": "f32"}
    with nbflow.load(checkpoint, **options) as model:
        expected, hidden = model.logits(ids), model.hidden(ids)
        text = model.generate(ids[:9].tolist(), max_tokens=12, ignore_eos=True).ids
    with nbflow.load(checkpoint, partition=partition, **options) as model:
        assert relative(model.logits(ids), expected) < 1e-5
        assert relative(model.hidden(ids), hidden) < 1e-5
        model.reset_traffic()
        assert model.generate(ids[:9].tolist(), max_tokens=12, ignore_eos=True).ids == text
        traffic = model.traffic()
        assert traffic["measured_bytes"] == traffic["predicted_bytes"] > 0


def test_partition_by_layer_is_bitwise_equal(checkpoint, ids):
    with nbflow.load(checkpoint) as one, nbflow.load(checkpoint, partition="0;1;2") as three:
        np.testing.assert_array_equal(one.logits(ids), three.logits(ids))


def test_prompt_in_pieces_is_bitwise_equal(checkpoint, ids):
    with nbflow.load(checkpoint) as model:
        expected = model.logits(ids)
    for budget in (1, 7, 32):
        with nbflow.load(checkpoint, max_step_tokens=budget) as model:
            np.testing.assert_array_equal(model.logits(ids), expected)


def test_a_request_is_bitwise_the_same_alone_and_in_a_batch(checkpoint, ids):
    prompts = [ids[:n].tolist() for n in (3, 17, 8, 1, 30)]
    with nbflow.load(checkpoint, max_step_tokens=16) as model:
        together = model.generate_batch(prompts, max_tokens=10, decoding="top_p", seed=5)
        for i, prompt in enumerate(prompts):
            alone = model.generate(prompt, max_tokens=10, decoding="top_p", seed=5 + i)
            assert alone.ids == together[i].ids
            assert alone.logprobs == together[i].logprobs


def test_greedy_generation_follows_the_logits(checkpoint, ids):
    with nbflow.load(checkpoint) as model:
        result = model.generate(ids[:5].tolist(), max_tokens=20, ignore_eos=True)
        logits = model.logits([*ids[:5], *result.ids])[4:-1].astype(np.float64)
    assert result.ids == logits.argmax(axis=1).tolist()
    log_softmax = logits - np.log(
        np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)
    )
    log_softmax -= logits.max(1, keepdims=True)
    picked = log_softmax[np.arange(20), result.ids]
    # float32 logits of magnitude 4 carry rounding of 4 * 2**-24, the sum of exponentials as well
    np.testing.assert_allclose(result.logprobs, picked, atol=5e-6)


def test_stopping(checkpoint, ids):
    with nbflow.load(checkpoint) as model:
        free = model.generate(ids[:5].tolist(), max_tokens=40, ignore_eos=True)
        assert free.finish_reason == "length"
        assert len(free.ids) == 40
        stop = free.ids[6]
        first = free.ids.index(stop)
        model.spec = dataclasses.replace(model.spec, eos_token_ids=(stop,))
        stopped = model.generate(ids[:5].tolist(), max_tokens=40)
        assert stopped.finish_reason == "stop"
        assert stopped.ids == free.ids[:first]
        assert list(model.stream(ids[:5].tolist(), max_tokens=40)) == stopped.ids


def test_generation_ends_at_the_context(checkpoint, ids):
    with nbflow.load(checkpoint, max_context=20) as model:
        result = model.generate(ids[:15].tolist(), max_tokens=100, ignore_eos=True)
        assert len(result.ids) == 5
        assert result.finish_reason == "length"


def test_a_rank_reads_only_its_bytes(checkpoint):
    with nbflow.load(checkpoint) as model:
        whole = model.workers[0].bytes_read
    with nbflow.load(checkpoint, partition="0;1;2") as model:
        read = [e.bytes_read for e in model.workers]
    assert sum(read) == whole
    assert max(read) < 0.6 * whole


def test_memory_is_shared_out(checkpoint):
    with nbflow.load(checkpoint, weights="q4") as model:
        (one,) = model.memory()
    with nbflow.load(checkpoint, weights="q4", partition="0&1") as model:
        two = model.memory()
    assert [m["rank"] for m in two] == [0, 1]
    assert all(0.49 <= m["matrix_bytes"] / one["matrix_bytes"] < 0.6 for m in two)
    assert one["peak_rss_bytes"] > one["weight_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ids": []}, "the prompt is empty"),
        ({"ids": [0.5]}, "integers"),
        ({"ids": [101]}, "token id 101 is outside the vocabulary"),
        ({"ids": [-1]}, "token id -1"),
        ({"ids": list(range(65))}, "65 tokens, but the context"),
    ],
)
def test_bad_token_ids(checkpoint, arguments, words):
    with nbflow.load(checkpoint) as model, pytest.raises(UsageError, match=words):
        model.logits(arguments["ids"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "q44"}, "unknown .*format 'q44'; did you mean"),
        ({"kv": "q9"}, "unknown kv_format 'q9'"),
        ({"kv": "f16/q9"}, "unknown kv_format 'q9'"),
        ({"partition": "0;1;2;3"}, "only 3 layers"),
        ({"partition": "x"}, "partition must be rank numbers"),
        ({"device": "gpu"}, "unknown device"),
        ({"max_context": 65}, "max_context must be 1..64"),
        ({"max_step_tokens": 0}, "max_step_tokens"),
    ],
)
def test_bad_load_options(checkpoint, options, words):
    with pytest.raises(UsageError, match=words):
        nbflow.load(checkpoint, **options)


def test_cuda_names_what_is_missing(checkpoint):
    with pytest.raises(nbflow.MissingExtraError, match="device 'cuda'"):
        nbflow.load(checkpoint, device="cuda")


def test_no_new_tokens(checkpoint):
    with nbflow.load(checkpoint) as model:
        assert model.generate([1, 2], max_tokens=0).ids == []


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"decoding": "greddy"}, "did you mean 'greedy'"),
        ({"decoding": "greedy", "top_p": 0.5}, "has no parameter 'top_p'"),
        ({"decoding": "top_p", "top_p": 0.0}, "top_p must be greater than 0"),
        ({"decoding": "top_k", "top_k": 0}, "top_k must be in"),
        ({"decoding": "sample", "temperature": 0.0}, "temperature must be in"),
        ({"max_tokens": -1}, r"max_tokens must be in 0\.\."),
        ({"seed": 2**64}, "seed must be in"),
    ],
)
def test_bad_generation_parameters(checkpoint, parameters, words):
    with nbflow.load(checkpoint) as model, pytest.raises(UsageError, match=words):
        model.generate([1, 2], **parameters)


def test_text_without_a_tokenizer(checkpoint):
    with nbflow.load(checkpoint) as model, pytest.raises(UsageError, match="has no tokenizer file"):
        model.generate("hello")


def test_a_closed_model_says_so(checkpoint):
    model = nbflow.load(checkpoint)
    model.close()
    with pytest.raises(UsageError, match="closed"):
        model.logits([1])


def test_a_weight_too_large_for_float16(tmp_path):
    from safetensors.numpy import load_file, save_file

    write_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"layers\.0\.ffn\.gate.*largest magnitude is 1e\+06"):
        nbflow.load(tmp_path, weights="f16")


def test_requests_keep_their_state_apart():
    a, b = (Request([1], 2, Greedy()) for _ in range(2))
    a.accept(5, 0.0)
    assert b.ids == []


def test_two_models_of_one_process_do_not_disturb_each_other(checkpoint, ids):
    with nbflow.load(checkpoint, weights="q8", threads=2) as two:
        expected = two.logits(ids)
        with nbflow.load(checkpoint, weights="q8", threads=1) as one:
            np.testing.assert_array_equal(one.logits(ids), expected)
            np.testing.assert_array_equal(two.logits(ids), expected)
        np.testing.assert_array_equal(two.logits(ids), expected)


def test_generation_settings_of_the_model_are_taken_where_none_are_given(tmp_path):
    write_llama(tmp_path)
    settings = {"temperature": 0.5, "top_k": 3, "top_p": 0, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))

    def strategy(name, **parameters):
        return model.make_request([1], 1, name, 0, True, **parameters).strategy

    with nbflow.load(tmp_path) as model:
        assert strategy("top_k") == TopK(temperature=0.5, top_k=3)
        assert strategy("top_k", top_k=7) == TopK(temperature=0.5, top_k=7)
        assert strategy("top_p", temperature=2.0) == TopP(temperature=2.0)
        assert strategy("greedy") == Greedy()
