"""Families of one's own with an encoder, in files next to each other."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from nbflow.cli.commands import spec as spec_command
from nbflow.spec import resolve
from nbflow_kernels.errors import UsageError
from nbflow_specs import FAMILIES

GOLDEN = Path(__file__).parents[1] / "golden" / "families" / "m2m_100"


def toml(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def run(path: Path) -> int:
    parser = argparse.ArgumentParser()
    spec_command.add_arguments(parser)
    return spec_command.run(parser.parse_args([str(path)]))


@pytest.fixture
def own_pair(tmp_path: Path) -> Path:
    """Files of an encoder-decoder of one's own: copies of M2M-100's under other names."""
    for name in ("m2m_100", "m2m_100_encoder"):
        text = (FAMILIES / f"{name}.toml").read_text()
        text = text.replace('model_types = ["m2m_100"]', "").replace('"m2m_100_', '"pelican_')
        (tmp_path / f"{name.replace('m2m_100', 'pelican')}.toml").write_text(text)
    return toml(tmp_path / "model.toml", 'family = "pelican"')


def test_own_family_with_an_encoder(own_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published = resolve(GOLDEN).spec
    found = resolve(GOLDEN, spec=own_pair).spec
    assert (found.family, found.encoder and found.encoder.family) == ("pelican", "pelican_encoder")
    assert dataclasses.replace(found, name="", family="", encoder=None) == dataclasses.replace(
        published, name="", family="", encoder=None
    )
    assert run(own_pair) == 0
    text = capsys.readouterr().out
    assert f"encoder: pelican_encoder of {own_pair.with_name('pelican_encoder.toml')}\n" in text
    # a file with the name of the package's family extends that one
    encoder = own_pair.with_name("pelican_encoder.toml")
    encoder.rename(encoder.with_name("m2m_100_encoder.toml"))
    toml(encoder, 'extends = "m2m_100_encoder"\n[structure]\nactivation = "silu"')
    own = resolve(GOLDEN, spec=own_pair).spec.encoder
    assert own is not None
    assert own.activation == "silu"


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("pelican", '"pelican_encoder"', '"pelican_enc"', r"unknown family 'pelican_enc'.*another"),
        ("pelican", '"pelican_encoder"', '"pelican"', "pelican.toml is not another family file"),
        ("pelican", '"pelican_encoder"', '"bart"', r"bart.toml has an encoder, too"),
        ("pelican_encoder", '"bart_encoder"', '"pelican"', "extends: pelican extends this file"),
        ("pelican_encoder", '"bart_encoder"', '"no_such"', "extends: unknown family 'no_such'"),
    ],
)
def test_own_encoders_that_are_missing(
    own_pair: Path, name: str, old: str, new: str, message: str
) -> None:
    """`nbflow spec` says the same as loading."""
    path = own_pair.with_name(f"{name}.toml")
    path.write_text(path.read_text().replace(old, new))
    if new == '"pelican"' and name == "pelican_encoder":  # a circle
        base = own_pair.with_name("pelican.toml")
        base.write_text(base.read_text().replace('extends = "bart"', 'extends = "pelican_encoder"'))
    for attempt in (lambda: run(own_pair), lambda: resolve(GOLDEN, spec=own_pair)):
        with pytest.raises(UsageError, match=message):
            attempt()


def test_own_encoder_without_a_name(own_pair: Path) -> None:
    encoder = own_pair.with_name("pelican_encoder.toml")
    encoder.write_text(encoder.read_text() + '[tensors]\n"layers.{i}.ffn.up.weight" = ""\n')
    message = r"pelican_encoder.toml: \[tensors\] has no name for layers.\{i\}.ffn.up.weight"
    with pytest.raises(UsageError, match=message):
        run(own_pair)
