"""Scoring of texts: windows, statistics, stored references, choices, and the commands."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import nbflow
import nbflow_kernels as nk
from nbflow.cli import main
from nbflow_experiments import backend
from nbflow_experiments.scoring.greedy_divergence import parting
from nbflow_experiments.scoring.logits_file import create, open_logits
from nbflow_experiments.scoring.multiple_choice import ask, encode_pair, read_questions
from nbflow_experiments.scoring.score_text import file_reference, model_reference, score_text
from nbflow_experiments.scoring.statistics_table import as_json, statistics, table
from nbflow_experiments.scoring.token_scores import Scores, score
from nbflow_experiments.scoring.windows import cut
from nbflow_kernels.errors import UsageError
from nbflow_specs import CHECKPOINTS

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((FOLDER / "perplexity.json").read_text())
"""Numbers of Transformers, from tools/golden/perplexity.py."""


@pytest.fixture(scope="module")
def model() -> Iterator[nbflow.LLM]:
    with nbflow.load("tiny_python", kv="f32") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def ids(model: nbflow.LLM) -> np.ndarray:
    text = (CHECKPOINTS / "tiny_python" / "eval.txt").read_text()
    return np.array(model.tokenizer.encode(text))


# ---- windows ------------------------------------------------------------------------------------


def test_disjoint_windows_score_the_second_half_as_llama_perplexity_does() -> None:
    windows = cut(np.arange(100, 125), 8)
    assert [w.ids[0] for w in windows] == [100, 108, 116]  # the last token fills no window
    assert all(w.first == 5 and w.n_scored == 3 for w in windows)
    assert [w.ids[0] for w in cut(np.arange(100, 125), 8, bos=1)] == [1, 1, 1]


@pytest.mark.parametrize(("n", "context", "stride"), [(25, 8, 3), (8, 8, 8), (9, 8, 1), (3, 8, 5)])
def test_sliding_windows_score_every_token_once(n: int, context: int, stride: int) -> None:
    windows = cut(np.arange(n), context, stride, "new")
    scored = np.concatenate([w.targets for w in windows])
    np.testing.assert_array_equal(scored, np.arange(1, n))
    assert all(len(w.ids) <= context and w.first >= 1 for w in windows)


def test_windows_that_overlap_by_one_token_leave_none_out() -> None:
    windows = cut(np.arange(1, 20), 5, 4, "new", bos=0)
    np.testing.assert_array_equal(np.concatenate([w.targets for w in windows]), np.arange(1, 20))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 1), "context must be at least 2"),
        ((10, 4, 5), "stride in 1..context"),
        ((3, 8), "3 tokens, too few for a window of 8"),
        ((10, 8, 0, "half"), "second-half"),
    ],
)
def test_windows_that_cannot_be(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cut(np.arange(arguments[0]), *arguments[1:])


# ---- perplexity ---------------------------------------------------------------------------------


def test_perplexity_is_that_of_transformers(model: nbflow.LLM, ids: np.ndarray) -> None:
    text = ids[: GOLDEN["tokens"]]
    half = score_text(model, cut(text, GOLDEN["context"])).nll
    expected = np.array(GOLDEN["second_half"])
    # float32 logits of both sides differ by some 1e-5 of the largest, about 20
    np.testing.assert_allclose(half, expected, atol=4e-4)
    assert math.exp(half.mean()) == pytest.approx(math.exp(expected.mean()), rel=1e-4)
    sliding = score_text(model, cut(text, GOLDEN["context"], GOLDEN["stride"], "new")).nll
    assert len(sliding) == len(text) - 1
    assert math.exp(sliding.mean()) == pytest.approx(GOLDEN["sliding"], rel=1e-4)


# ---- statistics ---------------------------------------------------------------------------------


def test_scores_by_the_formulas() -> None:
    rng = np.random.default_rng(3)
    x, y = (rng.normal(0, 3, (9, 37)).astype(np.float32) for _ in range(2))
    targets = rng.integers(0, 37, 9)
    found = score(x, targets, y)

    def log_softmax(z: np.ndarray) -> np.ndarray:
        z = z.astype(np.float64)
        return z - np.log(np.exp(z).sum(axis=1, keepdims=True))

    p, q = log_softmax(y), log_softmax(x)
    rows = np.arange(9)
    # float32 exponentials: 1e-6 nat
    np.testing.assert_allclose(found.nll, -q[rows, targets], atol=2e-6)
    np.testing.assert_allclose(found.reference_nll, -p[rows, targets], atol=2e-6)
    np.testing.assert_allclose(found.divergence, (np.exp(p) * (p - q)).sum(axis=1), atol=4e-6)
    np.testing.assert_array_equal(found.same_top, x.argmax(1) == y.argmax(1))


def test_statistics_by_the_formulas() -> None:
    rng = np.random.default_rng(0)
    base = rng.gamma(2.0, 1.2, 500)
    ours = base + rng.normal(0.02, 0.1, 500)
    kld, same = rng.gamma(0.5, 0.05, 500), rng.random(500) < 0.9
    found = as_json(statistics(Scores(ours, base, kld, same)))
    rel = 1e-9
    assert found["ppl"] == pytest.approx(math.exp(ours.mean()), rel=rel)
    error = ours.std(ddof=1) / math.sqrt(500)
    assert found["ppl_stderr"] == pytest.approx(math.exp(ours.mean()) * error, rel=rel)
    assert found["ppl_ratio"] == pytest.approx(math.exp((ours - base).mean()), rel=rel)
    a, b = math.exp(ours.mean()), math.exp(base.mean())
    gradient = np.array([a, -b])
    covariance = np.cov(ours, base) / 500
    expected = math.sqrt(gradient @ covariance @ gradient)
    assert found["ppl_difference_stderr"] == pytest.approx(expected, rel=1e-6)
    assert found["kld_p99_9"] == pytest.approx(np.percentile(kld, 99.9), rel=rel)
    assert found["kld_median"] == pytest.approx(np.median(kld), rel=rel)
    delta = 100 * (np.exp(-ours) - np.exp(-base))
    assert found["delta_p_rms"] == pytest.approx(math.sqrt((delta**2).mean()), rel=rel)
    assert found["same_top_p"] == pytest.approx(100 * same.mean(), rel=rel)
    assert found["nonfinite_share"] == 0


def test_what_is_not_finite_is_counted_and_not_dropped() -> None:
    found = as_json(
        statistics(score(np.array([[0, 1], [np.nan, 0]], np.float32), np.zeros(2, np.int64)))
    )
    assert found["nonfinite_share"] == 50
    assert found["ppl"] is not None
    assert math.isnan(found["ppl"])
    assert "nan" in table(
        statistics(score(np.full((2, 2), np.nan, np.float32), np.zeros(2, np.int64)))
    )


# ---- references ---------------------------------------------------------------------------------


def test_a_stored_reference_gives_the_streamed_numbers(
    model: nbflow.LLM, ids: np.ndarray, tmp_path: Path
) -> None:
    windows = cut(ids[:160], 32, scored="all")
    with create(tmp_path / "r.h5", {"model": "tiny_python"}) as save:
        alone = score_text(model, windows, save=save)
    with nbflow.load("tiny_python", weights="q4", kv="q8_0") as coarse:
        streamed = score_text(coarse, windows, reference=model_reference(model))
        with open_logits(tmp_path / "r.h5") as stored:
            assert stored.facts["model"] == "tiny_python"
            from_file = score_text(coarse, windows, reference=file_reference(stored))
    for name in ("nll", "reference_nll", "divergence", "same_top"):
        np.testing.assert_array_equal(getattr(streamed, name), getattr(from_file, name))
    np.testing.assert_array_equal(streamed.reference_nll, alone.nll)
    assert streamed.divergence.mean() > 1e-3


def test_a_reference_of_another_text_is_refused(
    model: nbflow.LLM, ids: np.ndarray, tmp_path: Path
) -> None:
    with create(tmp_path / "r.h5", {}) as save:
        score_text(model, cut(ids[:64], 32), save=save)
    with open_logits(tmp_path / "r.h5") as stored, pytest.raises(UsageError, match="other tokens"):
        score_text(model, cut(ids[64:128], 32), reference=file_reference(stored))
    (tmp_path / "no.h5").write_text("no")
    with pytest.raises(UsageError, match="not an HDF5 file"), open_logits(tmp_path / "no.h5"):
        pass


def test_nothing_is_left_of_a_reference_that_was_not_finished(tmp_path: Path) -> None:
    def fail() -> None:
        with create(tmp_path / "r.h5", {}) as save:
            save.append(np.zeros((1, 3), np.float32), np.zeros(1, np.int64))
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_where_greedy_texts_part(model: nbflow.LLM, ids: np.ndarray) -> None:
    prompts = [ids[a : a + 8].tolist() for a in range(0, 64, 16)]
    same = parting(model, model, prompts, 12)
    assert same.identical_share == 1
    assert same.median == 12
    with nbflow.load("tiny_python", weights="q2") as coarse:
        found = parting(coarse, model, prompts, 12)
        for prompt, n in zip(prompts, found.common, strict=True):
            a, b = (m.generate(prompt, 12, ignore_eos=True).ids for m in (coarse, model))
            assert a[:n] == b[:n]
            assert n == 12 or a[n] != b[n]
    assert found.identical_share < 1


# ---- choices ------------------------------------------------------------------------------------

QUESTIONS = [
    {
        "context": "import os\n\n\ndef read(self",
        "choices": ["):\n", " banana elephant"],
        "answer": 0,
    },
    {"context": "for i in range(", "choices": ["zebra:::", "10):\n"], "answer": 1},
]


def test_choices_by_the_sum_of_log_probabilities(model: nbflow.LLM, tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text("\n".join(json.dumps(q) for q in QUESTIONS) + "\n\n")
    answers = list(ask(model, read_questions(file)))
    assert all(a.right and a.right_per_byte for a in answers)
    ids, n = encode_pair(model.tokenizer, QUESTIONS[1]["context"], "10):\n")
    logits = model.logits(ids).astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = sum(log_p[i - 1, ids[i]] for i in range(n, len(ids)))
    # sums of a few float32 log-probabilities
    assert answers[1].log_probs[1] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "q.jsonl:1: not valid JSON"),
        ("[]", "must be a JSON object"),
        ("[" * 100_000, "q.jsonl:1: not valid JSON"),
        ('{"context": "a", "choices": ["b", "c"]}', "lacks answer"),
        ('{"context": "a", "choices": ["b"], "answer": 0}', "at least two strings"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 2}', r"answer must be 0\.\.1, got 2"),
        ('{"context": "a", "choice": ["b", "c"], "answer": 1}', "choices"),
        ("", "holds no questions"),
    ],
)
def test_questions_that_are_none(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(line)
    with pytest.raises(UsageError, match=message):
        read_questions(tmp_path / "q.jsonl")


def test_a_space_at_the_border_goes_to_the_continuation(model: nbflow.LLM) -> None:
    a = encode_pair(model.tokenizer, "return ", "self")
    assert a == encode_pair(model.tokenizer, "return", " self")
    assert encode_pair(model.tokenizer, "", "self")[1] == 1


# ---- commands -----------------------------------------------------------------------------------


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_the_perplexity_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    common = ["perplexity", "tiny_python", "-c", "32", "--windows", "3", "--json"]
    code, out, _ = call(capsys, *common, "--weights", "q4", "--reference", "--greedy", "4")
    streamed = json.loads(out)
    assert code == 0
    assert streamed["tokens"] == 3 * 15
    assert streamed["ppl_base"] < streamed["ppl"] * 1.2
    assert len(streamed["greedy_common"]) == 3
    file = str(tmp_path / "r.h5")
    f32 = ["--weights", "f32", "--kv", "f32", "--save-reference", file, "--noise-floor"]
    code, out, _ = call(capsys, *common, *f32, "--reference")
    exact = json.loads(out)
    assert exact["kld_mean"] == 0  # the same arithmetic on both sides
    assert 0 < exact["noise_floor"]["kld_mean"] < streamed["kld_mean"] / 10
    code, out, _ = call(capsys, *common, "--weights", "q4", "--reference", file)
    assert json.loads(out)["kld_mean"] == streamed["kld_mean"]
    code, out, _ = call(capsys, *common[:-1])
    assert "PPL" in out
    assert "45 tokens scored in 3 windows of 32" in out


def test_a_model_without_a_text_has_that_of_its_reference() -> None:
    found = backend.text_file(str(FOLDER / "families" / "llama31"), reference="tiny_python")
    assert found == CHECKPOINTS / "tiny_python" / "eval.txt"


def test_the_text_beside_a_model_in_a_format_of_the_user(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The checkpoint can be read once the formats are known, so these come first."""
    source = (Path(__file__).parents[1] / "helpers" / "user_formats.py").read_text()
    formats, model = tmp_path / "mine.py", tmp_path / "model"
    formats.write_text(source + "\nimport nbflow_kernels as nk\nnk.register_format(Nibbles)\n")
    text = CHECKPOINTS / "tiny_python" / "eval.txt"
    words = ["--plugins", str(formats), "-c", "32", "--windows", "1"]
    try:
        nk.load_plugin(formats)
        nbflow.quantize_checkpoint("tiny_python", model, "nibbles_b32")
        (model / "eval.txt").write_text(text.read_text()[:2000])
        nk.unregister_format("nibbles_b32")
        code, out, err = call(capsys, "perplexity", str(model), *words, "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["tokens"] == 15
        nk.unregister_format("nibbles_b32")
        code, _, err = call(capsys, "imatrix", str(model), *words, "-o", str(tmp_path / "i.gguf"))
        assert (code, err) == (0, "")
        sizes = ["--machine", "rtx4090", "--prompt", "64", "--generate", "8", "--batch", "1"]
        for command in (["inspect"], ["spec", "--tensors"], ["plan", *sizes]):
            nk.unregister_format("nibbles_b32")
            code, out, err = call(capsys, *command, str(model), *words[:2])
            assert (code, err) == (0, "")
            assert "nibbles_b32" in out or command[0] != "inspect"
    finally:
        nk.unregister_format("nibbles_b32")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--noise-floor"], "--noise-floor runs the reference"),
        (["--greedy", "4", "--reference", "x.h5"], "--greedy runs the reference"),
        (["--text", "absent.txt"], "the file absent.txt does not exist"),
        (["--text", str(FOLDER / "float8.npz")], "float8.npz: not UTF-8"),
        (["--reference", "absent.h5"], "the file absent.h5 does not exist"),
        (["--scored", "some"], "second-half, all, new"),
    ],
)
def test_perplexity_refuses(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "perplexity", "tiny_python", *words)
    assert code == 2
    assert message in err


def test_the_choices_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text("\n".join(json.dumps(q) for q in QUESTIONS))
    code, out, _ = call(capsys, "choices", "tiny_python", "--data", str(file), "--json")
    assert code == 0
    assert json.loads(out)["acc"] == 1
    assert json.loads(out)["questions"] == 2
