"""`nbflow pull` against a local HTTP server that speaks the Hub's protocol."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

import pytest
from mpirun import PYTHONPATH
from small_models import write_llama

import nbflow
from nbflow.checkpoint.hub import HubFile, choose_files, find_cached, pull
from nbflow.cli import make_parser
from nbflow.cli.commands import pull as pull_command
from nbflow.spec import resolve
from nbflow_kernels.errors import UsageError

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """Stub of the Hub pages that a download requests."""

    protocol_version = "HTTP/1.1"
    repos: ClassVar[dict[str, dict[str, bytes]]] = {}
    log: ClassVar[list[str]] = []
    """Requested paths."""

    def log_message(self, *args: Any) -> None:
        """Be quiet."""

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(self.path.split("?")[0])
        if with_body:
            self.log.append(path)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and parts[4:5] == ["tree"]:
            files = self.repos["/".join(parts[2:4])].items()
            blobs = [(name, len(data), hashlib.sha1(data).hexdigest()) for name, data in files]
            tree = [{"type": "file", "path": n, "size": s, "oid": oid} for n, s, oid in blobs]
            return self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        if parts[:2] == ["api", "models"]:
            return self._info("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
        repo, name = "/".join(parts[:2]), "/".join(parts[4:])
        data = self.repos.get(repo, {}).get(name)
        if data is None:
            return self._error(404, "EntryNotFound")
        return self._file(data, with_body)

    def _info(self, repo: str, revision: str) -> None:
        if repo == "org/gated":
            return self._error(403, "GatedRepo")
        if repo not in self.repos:
            return self._error(404, "RepoNotFound")
        if revision not in ("main", COMMIT):
            return self._error(404, "RevisionNotFound")
        siblings = [{"rfilename": n, "size": len(d)} for n, d in self.repos[repo].items()]
        body = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
        return self._send(200, body, {"Content-Type": "application/json"})

    def _file(self, data: bytes, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a small Llama and a repository of GGUF files; return the address."""
    folder = tmp_path_factory.mktemp("served") / "model"
    write_llama(folder, n_layers=1)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    Hub.repos = {
        "org/llama": {**files, "README.md": b"#", "pytorch_model.bin": b"not wanted"},
        "meta-llama/Llama-2-7b-chat-hf": files,
        "org/odd": {"a[1].gguf": b"GGUF1", "a1.gguf": b"GGUF", "b/c-00001-of-00001.gguf": b"GGUFc"},
        "org/quants": {"a-Q4_K_M.gguf": b"GGUF4", "a-Q8_0.gguf": b"GGUF8", "README.md": b"#"},
    }
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use the server and an empty cache."""
    Hub.log.clear()
    for name in ("HF_TOKEN", "HF_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("HF_HUB_CACHE", str(tmp_path / "hub")), ("HF_ENDPOINT", server)):
        monkeypatch.setenv(name, value)
    return tmp_path / "hub"


def nbflow_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nbflow", *words],
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )


def test_a_model_is_found_by_its_name() -> None:
    done = nbflow_command("pull", "org/llama")
    assert done.returncode == 0, done.stderr
    assert "model.safetensors  0.4 MB" in done.stdout
    assert "nbflow run org/llama" in done.stdout
    got = {path.rsplit("/", 1)[-1] for path in Hub.log if "/resolve/" in path}
    assert got == {"config.json", "model.safetensors"}
    found = resolve("org/llama")
    assert found.spec.name == "llama"
    held = (found.path / "model.safetensors").read_bytes()
    assert held == Hub.repos["org/llama"]["model.safetensors"]
    with nbflow.load("org/llama", threads=1, tokenizer=None) as model:
        assert len(model.generate([1, 2, 3], max_tokens=2).ids) == 2
    Hub.log.clear()
    assert nbflow_command("pull", "org/llama").returncode == 0
    assert not [path for path in Hub.log if "/resolve/" in path]  # nothing twice


def test_a_name_of_the_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It downloads the weights that its model file names; the name then stands for them."""
    parser = make_parser("pull")
    assert pull_command.run(parser.parse_args(["llama2-7b-chat-hf"])) == 0
    assert "nbflow run llama2-7b-chat-hf -p" in capsys.readouterr().out
    got = [path for path in Hub.log if "/resolve/" in path]
    assert got
    assert all(path.startswith("/meta-llama/Llama-2-7b-chat-hf/") for path in got)
    for name in ("llama2_7b_chat", "Llama2-7B-chat-hf"):
        found = resolve(name)
        assert (found.spec.n_layers, found.defaults["top_p"]) == (1, 0.9)
        assert (found.prompt_template or "").startswith("{% for m in messages %}")
    folder = tmp_path / "here"
    assert pull_command.run(parser.parse_args(["llama2_7b_chat", "--to", str(folder)])) == 0
    assert f"nbflow run {folder} --spec llama2_7b_chat -p" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny_python", "comes with the package: nbflow run tiny_python"),
        ("llama2_7b_chad", "unknown model 'llama2_7b_chad'; did you mean 'llama2_7b_chat'.*ORG/"),
    ],
)
def test_names_without_a_download(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pull_command.run(make_parser("pull").parse_args([name]))


def test_names_are_not_patterns(tmp_path: Path) -> None:
    path = pull("org/odd", files="a?1?.gguf", folder=tmp_path / "here")
    assert path == tmp_path / "here" / "a[1].gguf"
    assert path.read_bytes() == b"GGUF1"
    assert not (tmp_path / "here" / "a1.gguf").exists()
    assert pull("org/odd", files="b/*").read_bytes() == b"GGUFc"


def test_to_a_folder_and_one_of_several_files(tmp_path: Path) -> None:
    lines: list[str] = []
    path = pull("org/quants", files="*Q8*", folder=tmp_path / "here", report=lines.append)
    assert path == tmp_path / "here" / "a-Q8_0.gguf"
    assert path.read_bytes() == b"GGUF8"
    assert lines == ["a-Q8_0.gguf  0.0 MB"]
    assert find_cached("org/quants") is None
    first = pull("org/quants", files="*Q4*")
    assert find_cached("org/quants") == first
    pull("org/quants", files="*Q8*")
    with pytest.raises(UsageError, match="several files of org/quants"):
        find_cached("org/quants")


@pytest.mark.parametrize(
    ("repo", "options", "message"),
    [
        ("org/nothing", {}, "model org/nothing does not exist at .*check the name"),
        ("org/gated", {}, "org/gated is gated: accept its terms at .*/org/gated.*HF_TOKEN"),
        ("org/llama", {"revision": "v9"}, "org/llama has no revision 'v9'"),
        ("org/quants", {}, "a-Q4_K_M.gguf, a-Q8_0.gguf; name one, e.g. --file 'a-Q4_K_M"),
        ("org/quants", {"files": "*Q5*"}, r"matches no file; its files: README.md, a-Q4"),
        ("llama", {}, "must be named ORG/NAME"),
    ],
)
def test_what_can_go_wrong(repo: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pull(repo, **options)


def test_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "HF_ENDPOINT", "http://127.0.0.1:9"
    )  # the discard port: connections are refused
    with pytest.raises(UsageError, match=r"could not be downloaded from http://127.0.0.1:9: "):
        pull("org/llama")
    done = nbflow_command("run", "org/llama", "-p", "x")
    assert done.returncode == 2
    assert "'nbflow pull org/llama' downloads one" in done.stderr


def test_a_repository_with_an_adapter() -> None:
    names = ["adapter_config.json", "adapter_model.safetensors", "model.safetensors"]
    files = [HubFile(name, 1) for name in names]
    with pytest.raises(UsageError, match=r"a model and an adapter .*--file 'model\*\.safetensors'"):
        choose_files("org/x", files, None)
    assert [f.name for f in choose_files("org/x", files, "model*.safetensors")] == names[2:]


def test_parts_of_one_file_belong_together() -> None:
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    listed = [HubFile(name, 1) for name in (*names, "model.safetensors.index.json", "config.json")]
    chosen = [file.name for file in choose_files("a/b", listed, None)]
    assert chosen == ["config.json", "model.safetensors.index.json", *names]
    with pytest.raises(UsageError, match=r"1 of the 2 parts of model.safetensors"):
        choose_files("a/b", listed[1:], None)
    for name in ("../model.gguf", "/model.gguf", "a/../../model.gguf", "C:/model.gguf"):
        with pytest.raises(UsageError, match="no weights"):  # it would leave the folder
            choose_files("a/b", [HubFile(name, 1)], None)
    with pytest.raises(UsageError, match=r"a/b has no weights that can be read.*: notes.txt"):
        choose_files("a/b", [HubFile("notes.txt", 1)], None)
