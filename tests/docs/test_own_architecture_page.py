"""docs/bring_your_own_architecture.md and the schemas agree with the code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mpirun import PYTHONPATH
from safetensors.numpy import load_file, save_file

import nbflow
from nbflow.cli.commands import spec as spec_command
from nbflow.spec import resolve
from nbflow.spec.family import FAMILIES, FAMILY_KEYS, ConfigRule, families, load_family
from nbflow.spec.tensor_names import TENSOR_NAMES
from nbflow_kernels.errors import UsageError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "bring_your_own_architecture.md"


def block(language: str) -> str:
    """Return the page's blocks in a language, each at its own line."""
    lines, inside = [], False
    for line in PAGE.read_text().splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = (line == f"```{language}") if fence else inside
    return "\n".join(lines) + "\n"


def test_the_example_runs(tmp_path: Path) -> None:
    (tmp_path / "pelican.toml").write_text(block("toml"))
    (tmp_path / "page.py").write_text(block("python"))
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "the same\n"


def test_twenty_lines_are_internlm_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first file of the page reads the checkpoint that the package's own family reads."""
    text = block("TOML")
    assert len(text.split("\n\n")[-1].splitlines()) <= 24
    (tmp_path / "my.toml").write_text(text)
    folder = ROOT / "tests" / "golden" / "families" / "internlm2"
    found = resolve(folder, spec=tmp_path / "my.toml").spec
    own = resolve(folder).spec
    assert found.tensor_shapes() == own.tensor_shapes()
    assert all(found.tensor_layout(n) == own.tensor_layout(n) for n in own.tensor_shapes())


def test_an_encoder_and_a_decoder_are_bart(tmp_path: Path) -> None:
    """The two files of the page read a BART with their names of tensors."""
    pair = block("text").split("# decoder.toml\n")[1]
    decoder, encoder = pair.split("# encoder.toml\n")
    (tmp_path / "decoder.toml").write_text(decoder)
    (tmp_path / "encoder.toml").write_text(encoder)
    golden = ROOT / "tests" / "golden" / "families" / "bart"
    folder = tmp_path / "checkpoint"
    shutil.copytree(golden, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "my_bart"}))
    tensors = load_file(folder / "model.safetensors")
    n_renamed = 0
    for file, base in (("decoder", "bart"), ("encoder", "bart_encoder")):
        own = families()[base].tensors
        for ours, theirs in load_family(tmp_path / f"{file}.toml").tensors.items():
            if theirs == own.get(ours):
                continue
            for i in range(2):
                for end in ("weight", "bias"):
                    (new,), (old,) = (
                        [name.replace("{i}", str(i)).removesuffix("weight") + end for name in names]
                        for names in (theirs, own[ours])
                    )
                    tensors[new] = tensors.pop(old)
                    n_renamed += 1
    assert n_renamed == 4 * 2 * 2  # four matrices, two layers, weights and biases
    save_file(tensors, folder / "model.safetensors")
    with np.load(golden / "golden.npz") as arrays:
        ids, read, logits = (arrays[name] for name in ("ids", "encoder_ids", "logits"))
    with nbflow.load(folder, spec=tmp_path / "decoder.toml", kv="f32", threads=1) as model:
        found = model.logits(ids, encoder_ids=read)
    assert np.abs(found - logits).max() < 2e-6 * np.abs(logits).max()


def test_schemas_and_table_are_current() -> None:
    sys.path.insert(0, str(ROOT / "tools" / "docs"))
    try:
        import spec_schema
    finally:
        sys.path.pop(0)
    for path, text in spec_schema.contents().items():
        assert path.read_text() == text, f"{path.name}: run python tools/docs/spec_schema.py"


def test_the_page_has_every_word() -> None:
    text = (PAGE.parent / "family_files.md").read_text()
    text += PAGE.read_text().split("## Layers of several kinds")[1]
    names = " ".join(re.findall(r"`([^`\n]+)`", text))
    for part in (*FAMILY_KEYS, *ConfigRule.__dataclass_fields__):
        assert part in names, part
    for name in TENSOR_NAMES:
        stem = name.removesuffix(".weight").removesuffix(".bias")
        short = stem.replace("layers.{i}.", "").rsplit(".", 1)
        assert stem in names or (short[-1] in ("up", "down") and f".{short[-1]}." in names), name


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    import argparse

    parser = argparse.ArgumentParser()
    spec_command.add_arguments(parser)
    assert spec_command.run(parser.parse_args(list(words))) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(FAMILIES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_family_can_be_explained(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, str(path))
    assert "valid" in text
    assert "embed.weight" in text


def test_what_the_explanation_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pelican.toml").write_text(block("toml"))
    text = run(capsys, str(tmp_path / "pelican.toml"))
    assert "serves model_type pelican" in text
    assert re.search(r"\n  n_kv_heads +key groups or as n_heads\n", text)
    assert re.search(r"\n  qk_norm += head\n", text)
    (tmp_path / "mine.toml").write_text('family = "pelican.toml"\n[override]\nwindow = 9\n')
    text = run(capsys, str(tmp_path / "mine.toml"))
    assert re.search(r"\n  window += 9  \(override\)\n", text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("norm_eps = 1e-5\n", "", r"norm_eps is stated nowhere; write norm_eps = \.\.\. under"),
        (
            "tied_head = true",
            "tied_head = true\nvocab_size = 5",
            "vocab_size stands in .*leave one",
        ),
        ("model_types", 'norm = "rms"\nmodel_types', "norm is a field; it stands under"),
        ('"final_norm.weight"', "#", r"has no name for final_norm\.weight.*; write \"final_norm"),
        (
            '"layers.{i}.attn.q_norm.weight"',
            "#",
            r"no name for layers\.\{i\}\.attn\.q_norm\.",
        ),
        ("blocks.{i}.attn.out", "blocks.0.attn.out", r"must contain \{i\} 1 times"),
        (
            "attn.o.weight",
            "self_attn.o_proj.weight",
            r"did you mean 'layers\.\{i\}\.attn\.o\.",
        ),
        ("rope_theta =", "rope_teta =", r"did you mean 'rope_theta'.*are in docs/"),
        ("[structure]", "[structures]", "unknown key 'structures'; did you mean 'structure'"),
        ("[0]", "0", r"must be a list of values, or \{ values, when \}, or \"any\""),
    ],
)
def test_a_mistake_is_answered_with_what_to_write(
    old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = block("toml")
    assert old in text
    (tmp_path / "pelican.toml").write_text(text.replace(old, new))
    with pytest.raises(UsageError, match=message):
        run(capsys, str(tmp_path / "pelican.toml"))
