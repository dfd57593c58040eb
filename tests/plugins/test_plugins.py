"""Plugins: what is imported and what is not, registration, parameters of strategies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from server_process import CONFIG, Server

import nbflow
from nbflow.cli import main
from nbflow.options import SamplingParams
from nbflow.sampling import STRATEGIES, Strategy, build_strategy, make_strategy, register_strategy
from nbflow.sampling.strategies import split_decoding
from nbflow_experiments.measures import MEASURES, register_measure, unregister_measure
from nbflow_kernels.errors import UsageError
from nbflow_kernels.plugins import find_object, load_plugin

COLD = '''
from dataclasses import dataclass
from typing import Literal

import nbflow
from nbflow.sampling import Sample


@dataclass(frozen=True)
class Cold(Sample):
    """Sampling at half the temperature."""

    factor: float = nbflow.option(0.5, "factor of the temperature", low=0, above=True, high=1)
    rounds: int = nbflow.option(1, "how often", low=1, high=3)
    exact: bool = nbflow.option(False, "nothing")
    mode: Literal["one", "two"] = nbflow.option("one", "nothing")

    def filters(self):
        return {"temperature": self.temperature * self.factor**self.rounds}


nbflow.register_strategy("cold", Cold)
'''
EVIL = 'from pathlib import Path\n\nPath(__file__).with_suffix(".ran").touch()\nX = 1\n'


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "cold.py"
    path.write_text(COLD)
    load_plugin(path)
    yield path
    if "cold" in STRATEGIES:
        STRATEGIES.registered.remove("cold")


def test_parameters_of_a_strategy(cold: Path) -> None:
    params = SamplingParams(decoding="cold:factor=0.25,rounds=2,exact=true,mode=two", temperature=2)
    strategy = build_strategy(params, 100)
    assert vars(strategy) == {
        "temperature": 2.0, "factor": 0.25, "rounds": 2, "exact": True, "mode": "two"
    }  # fmt: skip
    assert make_strategy("cold", factor=0.5) == build_strategy(SamplingParams(decoding="cold"), 100)
    # recommendations of a model hold for the parameters that it has
    assert build_strategy(params, 100, defaults={"top_k": 5, "temperature": 0.5}) == strategy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cold:fact=1", "decoding 'cold' has no parameter 'fact'; it takes temperature, factor"),
        ("cold:factor=0", "decoding 'cold': factor must be greater than 0 and at most 1, got 0"),
        ("cold:factor=x", "decoding 'cold': factor must be a number, got 'x'"),
        ("cold:factor=nan", "decoding 'cold': factor must be"),
        ("cold:rounds=1.5", "decoding 'cold': rounds must be a whole number, got '1.5'"),
        ("cold:exact=1", "decoding 'cold': exact must be true or false, got '1'"),
        ("cold:mode=three", "unknown decoding 'cold': mode 'three'"),
        ("cold:factor", "parameters are written NAME:PARAMETER=VALUE"),
        ("cold:factor=1,factor=1", "factor is given twice"),
        ("cold:temperature=1", "temperature is given twice, the second time in decoding="),
        ("hot:factor=1", "unknown decoding strategy 'hot'"),
        ("chain:samplers=top_k", "samplers cannot be written in the text"),
        ("top_p:top_p=2", r"top_p must be in \(0, 1\], got 2"),
    ],
)
def test_mistakes_in_the_text_are_named(cold: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_strategy(SamplingParams(decoding=text, temperature=0.5), 100)


def test_built_in_strategies_have_the_same_form() -> None:
    text = SamplingParams(decoding="top_k:top_k=3,temperature=0.5")
    assert build_strategy(text, 9) == make_strategy("top_k", top_k=3, temperature=0.5)
    assert split_decoding("inferflow.fsd") == ("inferflow.fsd", {})


@dataclass(frozen=True)
class _Bare(Strategy):
    compiled: ClassVar[bool] = False
    x: int = 1

    def begin(self, prompt_ids: Any, seed: int) -> Any:
        return None


@dataclass(frozen=True)
class _Reserved(_Bare):
    x: int = nbflow.option(1, "fine", low=0)
    seed: int = nbflow.option(1, "taken", low=0)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("top_k", _Bare, "this is a built-in strategy"),
        ("mine", object, "needs a subclass of nbflow.sampling.Strategy"),
        ("mine", Strategy, "Strategy needs launch"),
        ("mine", _Bare, "_Bare.x must be declared with a description, a default and bounds"),
        ("mine", _Reserved, "_Reserved.seed is a parameter of every request"),
        ("a:b", _Bare, "must be declared|letters"),
    ],
)
def test_wrong_strategies_are_named(name: str, kind: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        register_strategy(name, kind)


def test_names_are_protected(cold: Path, tmp_path: Path) -> None:
    assert load_plugin(cold) is load_plugin(str(cold))
    copy = tmp_path / "copy.py"
    copy.write_text(COLD)  # the same content elsewhere, e.g. on another rank's disk
    assert load_plugin(copy).registered[0].name == "cold"
    cold.write_text(COLD + "# edited\n")
    with pytest.raises(UsageError, match="decoding strategy 'cold' is registered already"):
        load_plugin(cold)


def test_measures_are_checked() -> None:
    with pytest.raises(UsageError, match="built-in measure"):
        register_measure("decode", len)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"unknown .* scope 'all'"):
        register_measure("mine", len, scope="all")  # type: ignore[arg-type]
    register_measure("mine", lambda context: {"a_share": 0.5}, scope="format")
    try:
        assert not MEASURES["mine"].by_default
    finally:
        unregister_measure("mine")
    assert "mine" not in MEASURES


def test_an_installed_plugin_is_named_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cold_sampling-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cold-sampling\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nbflow.plugins]\ncold = cold_sampling\n")
    (tmp_path / "cold_sampling.py").write_text(COLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert load_plugin("cold").path == tmp_path / "cold_sampling.py"
        assert "cold" in STRATEGIES
    finally:
        STRATEGIES.registered.remove("cold")
        sys.modules.pop("cold_sampling", None)
    with pytest.raises(UsageError, match=r"unknown plugin 'cool'; did you mean 'cold'"):
        load_plugin("cool")


def test_a_spec_or_a_folder_cannot_cause_an_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the spec of a model nor files next to its weights run code."""
    evil = tmp_path / "evil.py"
    evil.write_text(EVIL)
    spec = tmp_path / "model.toml"
    for name in ("evil.py:X", str(evil) + ":X", "../evil.py:X"):
        spec.write_text(f'family = "llama"\n[override]\nattention = "{name}"\n')
        for words in (["spec", "tiny_python"], ["run", "tiny_python", "-n", "1"]):
            with pytest.raises(SystemExit):
                main([*words, "--spec", str(spec)])
            assert "is in a file that is not a plugin of this run" in capsys.readouterr().err
    spec.write_text('family = "llama"\nplugins = ["evil.py"]\n')
    with pytest.raises(SystemExit):
        main(["spec", "tiny_python", "--spec", str(spec)])
    assert "unknown key 'plugins'" in capsys.readouterr().err
    assert not evil.with_suffix(".ran").exists()


def test_objects_of_plugins(cold: Path) -> None:
    assert find_object("cold.py:Cold", "here").__name__ == "Cold"
    assert find_object(f"{cold}:Cold", "here").__name__ == "Cold"
    with pytest.raises(UsageError, match=r"here: .*cold.py has no 'Hot'"):
        find_object("cold.py:Hot", "here")
    with pytest.raises(UsageError, match=r"other.py:X' is in a file that is not a plugin"):
        find_object("other.py:X", "here")


def test_requests_name_strategies_but_never_files(tmp_path: Path) -> None:
    (tmp_path / "cold.py").write_text(COLD)
    (tmp_path / "evil.py").write_text(EVIL)
    body = {"model": "tiny", "prompt": "def ", "max_tokens": 3, "seed": 1}
    with Server('plugins = ["cold.py"]\n' + CONFIG, tmp_path) as server:
        texts = set()
        for decoding in ("cold:factor=0.001", "cold:factor=0.002", "greedy"):
            answer = server.http.post("/v1/completions", json=body | {"decoding": decoding})
            assert answer.status_code == 200, answer.text
            texts.add(answer.json()["choices"][0]["text"])
        assert len(texts) == 1  # as cold as greedy
        for decoding, message in (
            ("cold:factor=2", "factor must be greater than 0 and at most 1, got 2"),
            ("evil.py:X=1", "unknown decoding strategy 'evil.py'"),
            (str(tmp_path / "evil.py"), "unknown decoding strategy"),
        ):
            answer = server.http.post("/v1/completions", json=body | {"decoding": decoding})
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]
        refused = server.http.post("/v1/completions", json=body | {"plugins": ["evil.py"]})
        assert refused.status_code == 400
    assert not (tmp_path / "evil.ran").exists()
