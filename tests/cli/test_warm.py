"""`nbflow warm` compiles what a model needs; after the first run the cache has everything."""

from __future__ import annotations

import re

import pytest

from nbflow import cli
from nbflow_kernels.compilation.jit_cache import cache_root

WORDS = ["warm", "tiny_python", "--n-prompt", "4", "--batch", "2"]


def test_a_second_run_compiles_nothing(capfd, tmp_path, monkeypatch):
    with pytest.raises(SystemExit) as end:
        cli.main(WORDS)
    assert end.value.code == 0
    said = r"(\d+) kernels compiled in this process; ready after .* s; (.*) holds (\d+) entries, .*"
    first = re.fullmatch(said, capfd.readouterr().out.strip())
    assert first is not None
    assert first[2] == str(cache_root())
    assert int(first[3]) >= 20
    link = tmp_path / "cache"
    link.symlink_to(cache_root())
    words = [*WORDS, "--to", str(link)]
    monkeypatch.setattr("sys.argv", ["nbflow", *words])
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 0
    second = re.fullmatch(said, capfd.readouterr().out.strip())
    assert second is not None
    assert second.groups()[:2] == ("0", str(link))


def test_bad_numbers_and_folders_are_named(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for words, message in (
        (["--batch", "0"], "--batch must be 1..65536, got 0"),
        (["--to", str(tmp_path / "file" / "cache")], "cannot be made (Not a directory)"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["warm", "tiny_python", *words])
        assert end.value.code == 2
        assert message in capsys.readouterr().err
