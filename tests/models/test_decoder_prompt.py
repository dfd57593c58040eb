"""Forced tokens, languages and decoder prefixes against transformers' ``generate``.

The ids are those of transformers 5.23 for the checkpoints in tests/golden/families:

    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    model.generate(encoder_ids, max_new_tokens=8, num_beams=1, do_sample=False)

with this generation_config.json, or the same keys in config.json.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from encoder_models import FAMILIES, translator

import nbflow
from nbflow.cli import main
from nbflow.engine.decoder_prompt import decoder_prompt
from nbflow.options import SamplingParams
from nbflow.spec import load_tokenizer, resolve
from nbflow_kernels.errors import UsageError

FORCED = {"forced_bos_token_id": 77, "forced_eos_token_id": 5, "eos_token_id": 5}
GREEDY = {
    "bart": [77, 70, 61, 61, 61, 61, 61],
    "mbart": [77, 24, 24, 24, 24, 24, 24],
    "m2m_100": [77, 89, 89, 89, 14, 14, 14],
}
"""Without the start token and the forced end token."""
BEAMS = {
    "bart": ([77, 61, 61, 61, 61, 61, 61], -1.4246366024017334),
    "m2m_100": ([77, 58, 58, 58, 58, 58, 58], -1.3548734188079834),
}
"""With num_beams=3: ids and sequences_scores."""
AFTER_9 = {"bart": [70, 61, 61, 61, 61, 61, 61], "m2m_100": [14] * 7}
"""With decoder_input_ids [2, 9]."""


def encoder_ids(name):
    return np.load(FAMILIES / name / "golden.npz")["encoder_ids"].tolist()


@pytest.mark.parametrize(("name", "file"), [(n, "generation_config.json") for n in GREEDY]
                         + [("m2m_100", "config.json")])  # fmt: skip
def test_forced_tokens(name, file, tmp_path):
    for part in ("config.json", "model.safetensors"):
        shutil.copy(FAMILIES / name / part, tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text()) if file == "config.json" else {}
    (tmp_path / file).write_text(json.dumps(stated | FORCED | {"decoder_start_token_id": 2}))
    ids = encoder_ids(name)
    with nbflow.load(tmp_path, kv="f32", threads=1) as model:
        found = model.generate(ids, max_tokens=8)
        assert (found.prompt_ids, found.ids) == ([2], GREEDY[name])
        assert found.finish_reason == "length"
        assert len(found.logprobs) == 7
        assert found.logprobs[0] < -1  # the forced token's own
        assert list(model.stream(ids, max_tokens=8)) == GREEDY[name]
        sampled = model.generate(ids, 8, "filters", 3, temperature=2.0, repetition_penalty=1.1)
        assert sampled.ids[0] == 77
        if name in BEAMS:
            best, *_ = nbflow.beam_search(model, ids, 8, num_beams=3)
            assert best.ids == BEAMS[name][0]
            assert best.score == pytest.approx(BEAMS[name][1], rel=1e-5)
            assert model.generate(ids, max_tokens=8, decoder_ids=[2, 9]).ids == AFTER_9[name]
        assert len(model.generate(ids, max_tokens=8, ignore_eos=True).ids) == 8


def test_generation_config_alone_states_forced_tokens(tmp_path):
    """As in transformers, config.json says nothing then; the start token may be the BOS token."""
    folder = translator(tmp_path / "model", **FORCED)
    assert resolve(folder).spec.forced_bos_id == 77
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0}))
    spec = resolve(folder).spec
    assert (spec.forced_bos_id, spec.forced_eos_ids, spec.decoder_start_id) == (None, (), 0)
    (folder / "generation_config.json").write_text(json.dumps({"forced_bos_token_id": 97}))
    with pytest.raises(UsageError, match=r"forced_bos_id must be 0\.\.96, got 97"):
        resolve(folder)
    config = json.loads((folder / "config.json").read_text())
    old = {"bos_token_id": 0, "force_bos_token_to_be_generated": True, "forced_bos_token_id": None}
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | old))
    assert resolve(folder).spec.forced_bos_id == 0


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    folder = translator(tmp_path_factory.mktemp("m2m") / "model")
    return SimpleNamespace(spec=resolve(folder).spec, tokenizer=load_tokenizer(folder), path=folder)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ([76, 10, 2], [2], None)),
        ({"source_lang": "fr"}, ([78, 10, 2], [2], None)),
        ({"target_lang": "zh"}, ([76, 10, 2], [2], 77)),
        ({"target_lang": "__zh__"}, ([76, 10, 2], [2], 77)),
        ({"tgt_lang": "zh", "decoder_prefix": "w20 w21"}, ([76, 10, 2], [2, 77, 20, 21], None)),
        ({"decoder_prefix": "w20"}, ([76, 10, 2], [2, 20], None)),
        ({"decoder_prefix": "</s>__fr__ w20", "target_lang": "zh"},
         ([76, 10, 2], [2, 78, 20], None)),
        ({"forced_bos_token_id": 8}, ([76, 10, 2], [2], 8)),
        ({"forced_bos_token_id": 8, "regex": "a+"}, ([76, 10, 2], [2, 8], None)),
    ],
)  # fmt: skip
def test_languages_and_prefixes(info, given, expected):
    found = decoder_prompt(info, SamplingParams.parse(given), [76, 10, 2])
    assert (found.encoder_ids, found.ids, found.forced_bos_id) == expected


@pytest.mark.parametrize(
    ("given", "decoder_ids", "message"),
    [
        ({"target_lang": "xx"}, None, "unknown target_lang 'xx'; .*en"),
        ({"target_lang": "zh", "forced_bos_token_id": 3}, None, "give one of target_lang and"),
        ({"target_lang": "zh"}, [2, 3], "decoder_ids are the decoder's whole prompt"),
        ({"forced_bos_token_id": 97}, None, r"forced_bos_token_id must be 0\.\.96"),
    ],
)
def test_refused(info, given, decoder_ids, message):
    with pytest.raises(UsageError, match=message):
        decoder_prompt(info, SamplingParams.parse(given), [76, 10, 2], decoder_ids)


def test_command_line(info, capsys):
    """The target language is the first token of the answer; a prefix is part of the text."""
    command = ["run", str(info.path), "-p", "w10 w11", "-n", "4", "--threads", "1"]
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--target-lang", "zh", "--source-lang", "fr", "--json"])
    printed = json.loads(capsys.readouterr().out)
    with nbflow.load(info.path, threads=1) as model:
        forced = model.generate([78, 10, 11, 2], 4, decoder_ids=[2, 77])
        assert printed["ids"] == [77, *forced.ids[:3]]
        assert printed["prompt_ids"] == [2]
        prefixed = model.generate("w10 w11", 4, target_lang="zh", decoder_prefix="w20")
        assert prefixed.prompt_ids == [2, 77, 20]
        best = model.generate("w10", 4, "beam", target_lang="zh")
        assert best.ids[0] == 77
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--target-lang", "zh", "--decoder-prefix", "w20", "-q"])
    assert capsys.readouterr().out.startswith("w20")
    with nbflow.load(FAMILIES / "qwen2", threads=1) as model, pytest.raises(
        UsageError, match="qwen2 has no encoder and takes no target_lang"
    ):  # fmt: skip
        model.generate([1, 2], target_lang="zh")


class Vocabulary:
    """Special tokens of other translation models."""

    def __init__(self, special, others=()):
        self.special_tokens = dict(special)
        self._others = dict(others)

    def token_id(self, text):
        return self.special_tokens.get(text, self._others.get(text))


NLLB = Vocabulary({"</s>": 2, "eng_Latn": 70, "fra_Latn": 71, "zho_Hans": 72, "zho_Hant": 73})
MBART = Vocabulary({"</s>": 2, "en_XX": 70, "ro_RO": 71})
MARIAN = Vocabulary({"</s>": 0}, {">>fra<<": 60})
MADLAD = Vocabulary({"</s>": 0}, {"<2fr>": 61})


@pytest.mark.parametrize(
    ("tokenizer", "start", "ids", "given", "expected"),
    [
        (NLLB, 2, [70, 9, 2], {"target_lang": "fra"}, ([70, 9, 2], [2], 71)),
        (NLLB, 2, [70, 9, 2], {"source_lang": "zho_Hans"}, ([72, 9, 2], [2], None)),
        (MBART, 2, [70, 9, 2], {"target_lang": "ro_RO"}, ([70, 9, 2], [2], 71)),
        (MBART, 71, [9, 2, 71], {"target_lang": "en", "source_lang": "ro"},
         ([9, 2, 71], [70], None)),
        (MARIAN, 0, [9, 0], {"target_lang": "fra"}, ([60, 9, 0], [0], None)),
        (MADLAD, 0, [9, 0], {"target_lang": "fr"}, ([61, 9, 0], [0], None)),
    ],
)  # fmt: skip
def test_other_translation_models(info, tokenizer, start, ids, given, expected):
    """NLLB, mBART-50, the first mBART (its start token is a language), Marian and MADLAD."""
    spec = dataclasses.replace(info.spec, decoder_start_id=start)
    model = SimpleNamespace(spec=spec, tokenizer=tokenizer)
    found = decoder_prompt(model, SamplingParams.parse(given), ids)
    assert (found.encoder_ids, found.ids, found.forced_bos_id) == expected


@pytest.mark.parametrize(
    ("tokenizer", "language", "message"),
    [
        (NLLB, "zho", "'zho' is ambiguous: zho_Hans, zho_Hant"),
        (NLLB, "fra_Latin", "did you mean 'fra_Latn'"),
        (MARIAN, "deu", "the vocabulary has no language tokens"),
    ],
)
def test_unknown_languages(info, tokenizer, language, message):
    model = SimpleNamespace(spec=info.spec, tokenizer=tokenizer)
    with pytest.raises(UsageError, match=f"target_lang.*{message}"):
        decoder_prompt(model, SamplingParams(target_lang=language), [9, 2])
