"""The adapter for lm-evaluation-harness, run by the harness itself on tasks of our own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpirun import PYTHONPATH

import nbflow
from nbflow_experiments.scoring.multiple_choice import accuracies, ask, read_questions
from nbflow_experiments.scoring.score_text import score_text
from nbflow_experiments.scoring.windows import cut

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install -e '.[harness]'")

ROOT = Path(__file__).parents[2]
QUESTIONS = [
    {"context": "import os\n\n\ndef read(self", "choices": ["):\n", " banana egg"], "answer": 0},
    {"context": "for i in range(", "choices": ["zebra:::", "10):\n"], "answer": 1},
    {"context": "import sys", "choices": ["\n", "pear"], "answer": 1},
]
TEXT = "import os\nimport sys\n\n\ndef main():\n    return os.path.join(sys.argv[1], 'a')\n"
TASKS = {
    "own_choices": """
task: own_choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA/choices.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
target_delimiter: ""
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "own_text": """
task: own_text
dataset_path: json
dataset_kwargs: {data_files: {test: DATA/text.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "own_words": """
task: own_words
dataset_path: json
dataset_kwargs: {data_files: {test: DATA/words.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("harness")
    _write_lines(folder / "choices.jsonl", QUESTIONS)
    _write_lines(folder / "text.jsonl", [{"text": TEXT}])
    with nbflow.load("tiny_python") as model:
        line = model.generate("import os\nimport ", 12).text.split("\n")[0]
    _write_lines(folder / "words.jsonl", [{"context": "import os\nimport ", "answer": line}])
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(folder)))
    environment = dict(os.environ, HF_HUB_OFFLINE="1", HF_HOME=str(folder / "cache"))
    environment["PYTHONPATH"] = PYTHONPATH
    command = [sys.executable, "-m", "nbflow_experiments.scoring.lm_eval", "run"]
    command += ["--model", "nbflow", "--model_args", "model=tiny_python,threads=1"]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(folder)]
    command += ["--output_path", str(folder / "out.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("out*.json")
    found: dict[str, Any] = json.loads(file.read_text())["results"]
    return found


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_choices_as_our_own_command_scores_them(results: dict[str, Any], tmp_path: Path) -> None:
    _write_lines(tmp_path / "q.jsonl", QUESTIONS)
    with nbflow.load("tiny_python") as model:
        ours = accuracies(list(ask(model, read_questions(tmp_path / "q.jsonl"))))
    assert results["own_choices"]["acc,none"] == ours["acc"].mean == pytest.approx(2 / 3)
    assert results["own_choices"]["acc_norm,none"] == ours["acc_norm"].mean


def test_a_whole_text_is_scored_once(results: dict[str, Any]) -> None:
    with nbflow.load("tiny_python") as model:
        ids = np.array(model.tokenizer.encode(TEXT))
        windows = cut(ids, len(ids) + 1, scored="new", bos=model.tokenizer.bos_id)
        nats = float(score_text(model, windows).nll.sum())
    found = results["own_text"]["bits_per_byte,none"]
    assert found == pytest.approx(nats / math.log(2) / len(TEXT.encode()), rel=1e-6)


def test_generation_ends_at_a_stop_string(results: dict[str, Any]) -> None:
    assert results["own_words"]["exact_match,none"] == 1
