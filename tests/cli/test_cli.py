"""Command line: output, exit codes, and one-line errors for bad input."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mpirun import PYTHONPATH
from small_models import write_llama

import nbflow
from nbflow import cli
from nbflow.cli.options import add_model_arguments

ROOT = Path(__file__).resolve().parents[2]


def run(capsys, *arguments):
    """Run the command line in this process; return (exit code, stdout, stderr)."""
    with pytest.raises(SystemExit) as end:
        cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return end.value.code or 0, out, err


def error(capsys, *arguments):
    """Run a command that must fail with code 2 and one line; return that line."""
    code, out, err = run(capsys, *arguments)
    assert code == 2, (out, err)
    assert "Traceback" not in err
    return err


def test_overview_lists_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name in cli.COMMANDS:
        assert name in out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(capsys, name):
    code, out, _ = run(capsys, name, "--help")
    assert code == 0
    assert out.startswith(f"usage: nbflow {name}")


def test_unknown_command(capsys):
    assert "unknown command 'rum'; did you mean 'run'?" in error(capsys, "rum")


def test_chat_shows_the_answer_only(capsys, tmp_path):
    words = ["run", "tiny_python", "--chat", "--template", "vicuna-1.1", "-p", "x = 1", "-n", "5"]
    code, out, _ = run(capsys, *words, "-q")
    assert code == 0
    assert "USER" not in out
    facts = json.loads(run(capsys, *words, "--json")[1])
    tokenizer = nbflow.load_tokenizer("tiny_python")
    assert tokenizer.decode(facts["prompt_ids"]) == "USER: x = 1\nASSISTANT: "
    assert facts["text"] == out.removesuffix("\n")
    assert "comes with no chat template" in error(capsys, "run", "tiny_python", "--chat", "-p", "a")
    begun = tmp_path / "begun.json"
    begun.write_text(
        '[{"role": "user", "content": "x = 1"}, {"role": "assistant", "content": "y"}]'
    )
    words = [*words[:5], "--messages", begun, "--continue-final-message", "-n", "2", "--json"]
    ids = json.loads(run(capsys, *words)[1])["prompt_ids"]
    assert tokenizer.decode(ids) == "USER: x = 1\nASSISTANT: y"
    assert "--system needs --chat" in error(capsys, "run", "tiny_python", "--system", "a")


def test_the_plan_is_of_the_spec_and_the_quantizer(capsys, tmp_path):
    (tmp_path / "short.toml").write_text('family = "llama"\n[override]\nmax_context = 64\n')
    plan = ["run", "tiny_python", "--plan", "2"]
    assert "KV for 1,024 tokens" in run(capsys, *plan)[1]
    assert "KV for 128 tokens" in run(capsys, *plan, "--spec", tmp_path / "short.toml")[1]
    weights = [*plan, "--weights", "q4"]
    assert run(capsys, *weights)[1] != run(capsys, *weights, "--quantizer", "hadamard")[1]


def test_bundled_model_writes_python(capsys):
    code, out, _ = run(capsys, "run", "tiny_python", "-p", "def ", "-n", "60")
    assert code == 0
    first = out.splitlines()[0]
    assert first.startswith("def ")
    assert "(" in first
    assert first.rstrip().endswith(":")


def test_run_as_json(capsys):
    code, out, _ = run(capsys, "run", "tiny_python", "-p", "import ", "-n", "5", "--json")
    result = json.loads(out)
    assert code == 0
    assert len(result["ids"]) == len(result["logprobs"]) == 5
    assert result["finish_reason"] == "length"
    assert all(p <= 0 for p in result["logprobs"])


def test_seed_decides_the_draws(capsys):
    def text(seed):
        return run(
            capsys, "run", "tiny_python", "-n", "12", "--decoding", "top_p", "--seed", seed, "-q"
        )[1]

    assert text(1) == text(1)
    assert len({text(s) for s in range(4)}) > 1


def test_run_takes_every_way_of_decoding(capsys):
    def text(*options):
        code, out, _ = run(capsys, "run", "tiny_python", "-p", "def ", "-n", "12", "-q", *options)
        assert code == 0
        return out

    plain = text()
    assert text("--draft", "ngram") == plain
    assert text("--draft", "tiny_python", "--draft-verify", "chain") == plain
    assert text("--decoding", "contrastive", "--penalty-alpha", "0") == plain
    assert text("--num-beams", "1") == plain
    assert text("--top-k", "1", "--temperature", "2") == plain
    assert text("--sampler-order", "kt", "--top-k", "1") == plain
    assert text("--decoding", "inferflow.greedy") == plain
    assert text("--stop", "(").removesuffix("\n") == plain[: plain.index("(")]
    assert text("--num-beams", "3", "--length-penalty", "0", "--early-stopping", "true") != ""
    made = json.loads(text("--logprobs", "2", "--draft", "tiny_python", "--json"))
    assert [len(top) for top in made["top_logprobs"]] == [2] * 12
    assert 0 < made["n_accepted"] <= made["n_drafted"]


def test_bench_rows(capsys):
    code, out, _ = run(
        capsys, "bench", "tiny_python", "-p", "16", "-n", "4", "-pg", "8,4", "-b", "1-2*2",
        "-r", "2", "--weights", "f16,q4", "--json",
    )  # fmt: skip
    assert code == 0
    rows = json.loads(out)
    assert [r["test"] for r in rows] == ["pp16", "tg4", "pp8+tg4"] * 4
    assert [r["batch"] for r in rows] == [1, 1, 1, 2, 2, 2] * 2
    assert all(len(r["samples_s"]) == 2 and r["tokens_per_s"] > 0 for r in rows)
    assert rows[0]["weight_bytes"] > rows[-1]["weight_bytes"]
    generation = rows[1]
    # a step reads matrices and cache once: bytes per second are bytes times steps per second
    steps_per_s = np.median([4 / seconds for seconds in generation["samples_s"]])
    assert generation["read_bytes_per_s"] == pytest.approx(
        (generation["matrix_bytes_per_step"] + generation["cache_bytes_per_step"]) * steps_per_s,
        rel=1e-9,
    )
    # 4 layers of keys and values of 128 float16: those of 3 tokens are read, those of one written
    assert generation["cache_bytes_per_step"] == 4 * 2 * 128 * 2 * (3 + 1)


def test_bench_without_a_prompt_length_takes_what_the_context_holds(capsys):
    code, out, _ = run(capsys, "bench", "tiny_python", "-n", "0", "-r", "1", "--json")
    assert code == 0
    assert [row["test"] for row in json.loads(out)] == ["pp511"]


def test_bench_prints_a_table_and_a_profile(capsys):
    code, out, _ = run(capsys, "bench", "tiny_python", "-p", "8", "-n", "2", "-r", "1", "--profile")
    assert code == 0
    assert "| pp8 " in out
    assert "outside compiled kernels" in out


def test_env(capsys):
    code, out, _ = run(capsys, "env", "--json")
    assert code == 0
    assert json.loads(out)["packages"]["numpy"] == np.__version__


@pytest.mark.parametrize(
    ("arguments", "kv"),
    [
        ([], "f16"),
        (["--kv", "q8/q4"], "q8/q4"),
        (["--cache-type-k", "q8_0"], "q8_0/f16"),
        (["-ctk", "q8_0", "-ctv", "q4_0"], "q8_0/q4_0"),
        (["--kv", "q8_0", "-ctv", "q4_0"], "q8_0/q4_0"),
        (["-ctk", "q8_0", "-ctv", "q8_0"], "q8_0"),
    ],
)
def test_formats_of_keys_and_values(arguments, kv):
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    assert parser.parse_args(["tiny_python", *arguments]).kv == kv


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "no/such/folder"], "no/such/folder"),
        (["run", "tiny_pyton"], "did you mean 'tiny_python'"),
        (["run", "tiny_python", "--weights", "q44"], "unknown"),
        (["run", "tiny_python", "--kv", "q9"], "unknown kv_format"),
        (["run", "tiny_python", "--cache-type-v", "q9"], "unknown kv_format 'q9'"),
        (
            ["run", "tiny_python", "--partition", "0&1&2&3&4&5&6&7&8"],
            "cannot be dealt out to 9 ranks",
        ),
        (["run", "tiny_python", "--decoding", "beams"], "unknown decoding strategy"),
        (["run", "tiny_python", "--decoding", "greedy", "--top-k", "5"], "has no parameter"),
        (["run", "tiny_python", "-p", "x", "--device", "gpu"], "GPUs of NVIDIA are cuda"),
        (["client", "-p", "x", "--url", "http://[::1/v1"], "the URL must be like"),
        (["client", "-p", "x", "--url", "http://h:99999"], "the URL must be like"),
        (["bench", "tiny_python", "-p", "1-99999999999+1"], "has more than 10000 numbers"),
        (["run", "tiny_python", "--num-beams", "2", "--draft", "ngram"], "takes no --draft"),
        (["run", "tiny_python", "--num-beams", "2", "--penalty-alpha", "1"], "belongs to"),
        (["run", "tiny_python", "--decoding", "top_p", "--num-beams", "2"], "does not go with"),
        (["run", "tiny_python", "--num-beams", "2", "--top-p", ".5"], "has no parameter 'top_p'"),
        (["run", "tiny_python", "--draft", "no/such/model"], "no/such/model"),
        (["run", "tiny_python", "-p", "x " * 600], "but the context of tiny_python holds 512"),
        (["run", "tiny_python", "--spec", "missing.toml"], "missing.toml"),
        (["run", "tiny_python", "--tokenizer", "missing.json"], "missing.json"),
        (["run", "tiny_python", "--max-context", "4096"], "max_context must be 1..512"),
        (["bench", "tiny_python", "-p", "a"], "--n-prompt must be numbers"),
        (["bench", "tiny_python", "-n", "512"], "but the context holds 512"),
        (["bench", "tiny_python", "-r", "0"], "--repeats must be at least 1"),
        (["bench", "tiny_python", "-p", "99999999"], "test pp99999999 needs 100000000 tokens"),
        (["bench", "tiny_python", "-p", "16,512"], "test pp512 needs 513 tokens"),
        (["bench", "tiny_python", "-b", "0"], "--batch must be 1..65536 sequences, got 0"),
        (["bench", "tiny_python", "-b", "1,99999999"], "--batch must be 1..65536"),
        (["bench", "tiny_python", "-pg", "0,0"], "not both 0, got '0,0'"),
        (["bench", "tiny_python", "-p", "0", "-n", "0"], "nothing is left to time"),
        (
            ["run", "tiny_python", "--partition", "auto", "--machine", "/etc/passwd"],
            "/etc/passwd",
        ),
        (["run", "tiny_python", "--quantizer", "hadamard", "--plan"], "need a weight format"),
        (["run", "tiny_python", "--logprobs", "1"], "--logprobs needs --json"),
        (["run", "tiny_python", "--machine", "h200x8"], "--machine is for --partition auto"),
        (["run", "tiny_python", "--n-draft", "3"], "n_draft needs a smaller model or 'ngram'"),
        (["run", "tiny_python", "--draft-weights", "q4"], "draft_weights needs a smaller model"),
        (["spec", "tiny_python", "--partition", "0&1"], "--partition needs --program"),
        (["spec", "tiny_python", "--program", "--json"], "--program does not go with --json"),
    ],
)
def test_bad_arguments(capsys, arguments, words):
    assert re.search(words, error(capsys, *arguments))


def test_unknown_option_is_refused(capsys):
    code, _, err = run(capsys, "run", "tiny_python", "--temprature", "1")
    assert code == 2
    assert "--temprature" in err


def test_truncated_and_lying_checkpoints(capsys, tmp_path):
    write_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert str(path) in error(capsys, "run", tmp_path)
    path.write_bytes((2**62).to_bytes(8, "little") + whole[8:])
    assert str(path) in error(capsys, "run", tmp_path)


def test_tensor_lists_of_a_wrong_checkpoint(capsys, tmp_path):
    from safetensors.numpy import load_file, save_file

    write_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["surplus"] = tensors.pop("model.norm.weight")
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((3, 3), np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int32)
    save_file(tensors, path)
    message = error(capsys, "run", tmp_path)
    for word in (
        "model.norm.weight",
        "surplus",
        "model.layers.1.mlp.up_proj.weight",
        "(3, 3)",
        "i32",
    ):
        assert word in message


def test_importing_is_quick():
    code = (
        "import sys, nbflow, nbflow_kernels\n"
        "from nbflow.cli.commands import client, launch\n"
        "large = ('numpy', 'numba', 'pandas', 'matplotlib', 'tokenizers')\n"
        "print([m for m in large if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    assert done.stdout.strip() == "[]", done.stderr
