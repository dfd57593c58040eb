"""Masked tokens and classification heads of encoders against transformers.

The numbers are those of transformers 5.23 in float32 for the checkpoints of `encoder_models`:

    AutoModelForSequenceClassification.from_pretrained(classifier(folder, name))(
        [[2, 10, 20, 30, 3, 40, 50, 3]], token_type_ids=[[0, 0, 0, 0, 0, 1, 1, 1]]  # bert's
    ).logits[0]
    AutoModelForMaskedLM.from_pretrained(bert(folder))([[2, 10, 4, 20, 4, 3]]).logits[0].softmax(-1)
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from encoder_models import FAMILIES, bert, classifier

import nbflow
from nbflow.cli import main
from nbflow.spec import load_tokenizer, resolve
from nbflow_experiments.scoring.classification import (
    correlations,
    label_index,
    measures,
    read_examples,
)
from nbflow_kernels.errors import UsageError

LOGITS = {
    "bert": [-0.697265625, -0.5960893630981445, -0.4672987461090088],
    "roberta": [-0.31454455852508545, -0.12398391962051392, -1.8755196332931519],
    "distilbert": [-0.9853484630584717, -1.1490542888641357, -1.194585919380188],
}
MASKS = [
    [(7, 0.4168177843093872), (1, 0.35637205839157104), (44, 0.06392297148704529)],
    [(1, 0.24756869673728943), (44, 0.2255212813615799), (7, 0.06150224804878235)],
]
IDS = [2, 10, 20, 30, 3, 40, 50, 3]


@pytest.mark.parametrize(
    ("name", "partition"), [("bert", "0;1"), ("roberta", "0"), ("distilbert", "0&1")]
)
def test_logits_of_classifiers(name, partition, tmp_path):
    folder = classifier(tmp_path / name, name)
    with nbflow.load(folder, kv="f32", threads=1, partition=partition, max_step_tokens=20) as model:
        pair = ("w10 w20 w30", "w40 w50")
        found, other, same = nbflow.classify(model, [pair, "w10", pair])
        error = np.abs(found.logits - LOGITS[name]).max() / np.abs(LOGITS[name]).max()
        assert error < 2e-6
        np.testing.assert_array_equal(found.logits, same.logits)
        assert np.abs(other.logits - found.logits).max() > 1e-3
        softmax = np.exp(LOGITS[name]) / np.exp(LOGITS[name]).sum()
        np.testing.assert_allclose(found.scores, softmax, rtol=1e-5)
        assert found.label == f"label {np.argmax(LOGITS[name])}"
        if name != "bert":
            (ids,) = nbflow.classify(model, [IDS])
            np.testing.assert_array_equal(ids.logits, found.logits)
        with pytest.raises(UsageError, match="is an encoder without a head and fills no masks"):
            nbflow.fill_mask(model, "w10 [MASK]")


def test_kinds_of_problems(tmp_path):
    regression = classifier(tmp_path / "one", n_labels=1)
    several = classifier(tmp_path / "two", n_labels=2, problem_type="multi_label_classification")
    with nbflow.load(regression, threads=1) as model:
        (found,) = nbflow.classify(model, ["w10"])
        assert found.scores == found.logits
        assert found.label == "label 0"
    with nbflow.load(several, threads=1) as model:
        (found,) = nbflow.classify(model, ["w10"])
        np.testing.assert_allclose(found.scores, 1 / (1 + np.exp(-found.logits)), rtol=1e-6)
        assert found.labels == ("LABEL_0", "LABEL_1")
    config = json.loads((several / "config.json").read_text())
    (several / "config.json").write_text(json.dumps(config | {"problem_type": "ranking"}))
    with pytest.raises(UsageError, match="problem_type: must be one of regression"):
        resolve(several)
    with nbflow.load(FAMILIES / "bert", threads=1) as model, pytest.raises(
        UsageError, match="bert has no classification head"
    ):  # fmt: skip
        nbflow.classify(model, [IDS])


def test_pairs_are_shortened(tmp_path):
    """As transformers' tokenizers do with truncation=True."""
    tokenizer = load_tokenizer(bert(tmp_path / "bert"))
    assert tokenizer.encode_pair("w10 w20", "w30") == ([2, 10, 20, 3, 30, 3], [0, 0, 0, 0, 1, 1])
    assert tokenizer.encode_pair("w10 w20 w21", "w30 w31", 6)[0] == [2, 10, 20, 3, 30, 3]
    assert tokenizer.encode_pair("w10 w20 w21")[0] == [2, 10, 20, 21, 3]


def test_masks_are_filled(tmp_path, capsys):
    folder = bert(tmp_path / "bert")
    with nbflow.load(folder, kv="f32", threads=1, max_step_tokens=3) as model:
        found = nbflow.fill_mask(model, "w10 [MASK] w20 [MASK]", 3)
        for mask, expected in zip(found, MASKS, strict=True):
            assert [f.token for f in mask] == [token for token, _ in expected]
            np.testing.assert_allclose([f.score for f in mask], [p for _, p in expected], rtol=1e-5)
        assert found[0][0].token_str == "w7"
        assert found[0][0].sequence == "w10 w7 w20 [MASK]"
        assert found[1][1].sequence == "w10 [MASK] w20 w44"
        with pytest.raises(UsageError, match=r"the text has no mask; write \[MASK\] where"):
            nbflow.fill_mask(model, "w10")
        with pytest.raises(UsageError, match=r"top_k must be 1\.\.97, got 0"):
            nbflow.fill_mask(model, "w10 [MASK]", 0)
    with pytest.raises(SystemExit, match="0"):
        main(["fill-mask", str(folder), "w10 [MASK] w20 [MASK]", "-k", "2", "--kv", "f32"])
    printed = capsys.readouterr().out
    assert (
        "mask 1\nprobability  id  token  text\n     41.68%   7  w7     w10 w7 w20 [MASK]\n"
        in printed
    )
    with nbflow.load(FAMILIES / "qwen2", threads=1) as model, pytest.raises(
        UsageError, match="qwen2 continues text and fills no masks"
    ):  # fmt: skip
        nbflow.fill_mask(model, [1, 2])


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("pairs.tsv", "sentence1\tsentence2\tlabel\n{}", ()),
        ("named.tsv", "a\tb\tc\n{}", ("--text", "a", "--pair", "b", "--label", "c")),
        ("plain.tsv", "{}", ("--text", "1", "--pair", "2", "--label", "3")),
    ],
)
def test_scores_of_labelled_texts(name, text, options, tmp_path, capsys):
    folder = classifier(tmp_path / "bert")
    pairs = [("w10 w20 w30", "w40 w50"), ("w11 w21", "w41"), ("w12", "w42 " * 80), ("w13", "w5")]
    with nbflow.load(folder, threads=1) as model:
        found = nbflow.classify(model, pairs, max_tokens=64)
    wrong = (found[0].index + 1) % 3
    labels = [wrong, found[1].label.upper(), *(a.index for a in found[2:])]
    lines = "\n".join(f"{a}\t{b}\t{c}" for (a, b), c in zip(pairs, labels, strict=True))
    path = tmp_path / name
    path.write_text(text.format(lines))
    with pytest.raises(SystemExit, match="0"):
        main(["classify", str(folder), "--data", str(path), "--json", "--threads", "1", *options])
    result = json.loads(capsys.readouterr().out)
    assert (result["texts"], result["accuracy"]) == (4, 0.75)
    assert {"f1_macro", "matthews"} < set(result)


def test_measures():
    """Expected values are worked out by hand from the tables of answers and labels."""
    truth, answers = np.array([0, 1, 2, 2, 1, 0, 2, 1]), np.array([0, 2, 2, 2, 1, 0, 1, 1])
    found = measures(answers, truth, 3)
    expected = {"accuracy": 0.75, "f1_macro": 0.7777777777777777, "matthews": 0.6190476190476191}
    assert {name: e.mean for name, e in found.items()} == pytest.approx(expected)
    binary = measures(np.array([1, 1, 0, 0, 1]), np.array([1, 0, 0, 1, 1]), 2)
    assert binary["f1"].mean == pytest.approx(2 / 3)
    assert measures(np.array([1, 1]), np.array([1, 1]), 2)["matthews"].mean == 0.0
    numbers = correlations(np.array([0.5, 2.0, 2.0, 4.5]), np.array([1.0, 3.0, 2.0, 5.0]))
    assert numbers["pearson"].mean == pytest.approx(0.9710, abs=1e-4)
    assert numbers["spearman"].mean == pytest.approx(0.9487, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", r"must be a \.tsv or \.jsonl"),
        ("a.tsv", "", "holds no texts"),
        ("a.tsv", "x\tlabel\n1\t2", "no known column holds the text.*x, label"),
        ("a.tsv", "text\ty\n1\t2", "no known column holds the label"),
        ("a.tsv", "sentence\tlabel\na\t1\nonly", r"a\.tsv:3: lacks the column 'label'"),
        ("a.jsonl", "[1]", "must be a JSON object"),
        ("a.jsonl", "{", "not valid JSON"),
    ],
)
def test_wrong_files_of_labelled_texts(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        read_examples(tmp_path / name)
    with pytest.raises(UsageError, match=r"neither a number below 2 nor one of .*: no, yes"):
        label_index("maybe", ["no", "yes"])


def test_classify_command(tmp_path, capsys):
    folder = classifier(tmp_path / "bert")
    command, options = ["classify", str(folder)], ["--kv", "f32", "--threads", "1"]
    with pytest.raises(SystemExit, match="0"):
        main([*command, "w10 w20 w30", "w40 w50", *options])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "label     score    logit"
    assert printed[1] == "label 2  0.3740  -0.4673"
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert "give TEXT or --data FILE" in capsys.readouterr().err
