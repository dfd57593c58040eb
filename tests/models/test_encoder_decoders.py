"""Encoders with decoders: logits and continuations against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import nbflow
from nbflow.checkpoint import open_weights
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.program import build, build_cross_kv
from nbflow.spec import check, resolve
from nbflow_kernels.errors import UsageError

FOLDER = Path(__file__).parents[1] / "golden" / "families"
NAMES = ("bart", "flan_t5", "m2m_100", "marian", "mbart", "t5")
BY_REFERENCE = ("blenderbot", "pegasus", "plbart")  # of the same parts as those above
# Some ten float32 roundings of the largest number, as in test_families.py.  The scores of T5 have
# no factor, so that its weights are steep: transformers' own float32 logits are 9.5e-6 (flan_t5)
# and 1.4e-6 (t5) away from those of the float64 executor.
TOLERANCE = dict.fromkeys((*NAMES, *BY_REFERENCE), 2e-6) | {"t5": 5e-6, "flan_t5": 2e-5}


def golden(name):
    with np.load(FOLDER / name / "golden.npz") as file:
        return dict(file)


def error(a, b):
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize("name", [*NAMES, *BY_REFERENCE])
def test_reference_executor(name):
    wanted, spec = golden(name), resolve(FOLDER / name).spec
    with open_weights(FOLDER / name) as file:
        check(spec, file)

        def executor(program, **options):
            return ReferenceExecutor(program, WeightLoader(program, file, None), **options)

        states = executor(build(spec.encoder)).logits(wanted["encoder_ids"])
        cross_kv = executor(build_cross_kv(spec)).encode_cross_kv(states)
        decoder = executor(build(spec), cross_kv=cross_kv)
    chunks = [decoder.logits(wanted["ids"][a:b]) for a, b in ((0, 7), (7, 8), (8, 40))]
    assert error(np.concatenate(chunks), wanted["logits"]) < TOLERANCE[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("partition", ["0", "0&1", "0;1"])
def test_compiled_executor(name, partition):
    """Logits in uneven chunks; continuation batched with another sequence and input."""
    wanted = golden(name)
    ids, read = wanted["ids"], wanted["encoder_ids"]
    with nbflow.load(
        FOLDER / name, kv="f32", partition=partition, max_step_tokens=17, threads=1
    ) as model:
        assert error(model.logits(ids, read), wanted["logits"]) < TOLERANCE[name]
        assert error(model.logits(ids, read[::-1].copy()), wanted["logits"]) > 0.01
        mine, _ = model.generate_batch([read, read[:4]], max_tokens=8, decoder_ids=ids.tolist())
        assert mine.ids == wanted["continuation"].tolist()
        traffic = model.traffic()
        assert traffic["measured_bytes"] == traffic["predicted_bytes"]
        assert (traffic["measured_bytes"] > 0) == (partition != "0")


def test_sequences_one_after_the_other_and_together():
    """Encoder pages are freed; results are batch invariant."""
    read = golden("m2m_100")["encoder_ids"].tolist()
    with nbflow.load(FOLDER / "m2m_100", threads=1) as model:
        alone = [model.generate(read[i:], max_tokens=6).ids for i in range(3)]
        together = model.generate_batch([read[i:] for i in range(3)], max_tokens=6)
        assert [g.ids for g in together] == alone
        assert together[0].prompt_ids == [2]  # decoder_start_token_id
        stream = list(model.stream(read, max_tokens=6))
        assert stream == alone[0]
        assert len(alone[0]) == 6


def test_what_is_refused():
    with nbflow.load(FOLDER / "bart", threads=1) as model:
        with pytest.raises(UsageError, match="has an encoder; give its token ids as encoder_ids"):
            model.logits([1, 2])
        with pytest.raises(
            UsageError, match=r"token id 97 is outside the vocabulary of bart \(enc"
        ):
            model.logits([1, 2], [97])
    with nbflow.load(FOLDER / "qwen2", threads=1) as model:
        with pytest.raises(UsageError, match="qwen2 has no encoder; leave encoder_ids out"):
            model.logits([1, 2], [3])
        with pytest.raises(UsageError, match="give all tokens as the prompt, without decoder_ids"):
            model.generate([1, 2], decoder_ids=[3])


def test_weight_formats_apply_to_both_sides():
    sizes = []
    for format in (None, "f32"):
        with nbflow.load(FOLDER / "bart", weights=format, threads=1) as model:
            sizes.append(model.memory()[0]["weight_bytes"])
    # the matrices of the layers become twice as large; the layout for computing rounds their rows
    # (24, 40, 44) up to multiples of 16
    encoder = 2 * (4 * 32 * 24 + 48 * 24 + 32 * 40)
    decoder = 2 * (8 * 32 * 24 + 48 * 24 + 32 * 44)
    assert 0.8 < (sizes[1] - sizes[0]) / (2 * (encoder + decoder)) <= 1


def test_marian_never_generates_padding(tmp_path):
    """The token that it would generate is called padding; every way of decoding avoids it."""
    read = golden("marian")["encoder_ids"].tolist()
    with nbflow.load(FOLDER / "marian", threads=1) as model:
        most_probable = np.argsort(-model.logits([96], read)[-1])[:2]
        assert model.spec.banned_token_ids == (96,)
        assert model.generate(read, max_tokens=1).ids == [most_probable[0]]
    banned = int(most_probable[0])
    config = json.loads((FOLDER / "marian" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": banned}))
    shutil.copy(FOLDER / "marian" / "model.safetensors", tmp_path)
    with nbflow.load(tmp_path, threads=1) as model:
        assert model.generate(read, max_tokens=1).ids == [most_probable[1]]
        found = [
            *nbflow.beam_search(model, read, 8, num_beams=3, n=3),
            nbflow.contrastive_search(model, read, 8, top_k=1),
            *(model.generate(read, 8, "filters", i, temperature=2.0) for i in range(5)),
        ]
        assert not any(banned in generation.ids for generation in found)
        assert all(len(generation.ids) == 8 for generation in found)
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": 97}))
    with pytest.raises(UsageError, match=r"banned_token_ids must be 0\.\.96, got 97"):
        resolve(tmp_path)
