"""`nbflow client` against a server."""

import json

import pytest
from command import run_command

from nbflow.compat.inferflow.tool_ini import read_client_ini
from nbflow_kernels.errors import UsageError


def client(server, *words, text="", url=None):
    return run_command("client", "--url", url or f"{server.url}/v1", *words, text=text)


def test_one_message(server, client_answer):
    done = client(server, "-p", "def f(x):", "--temperature", "0", "-n", "8")
    assert done.returncode == 0
    assert done.stdout == client_answer + "\n"
    assert "prompt tokens, 8 new" in done.stderr


def test_conversation(server, client_answer):
    lines = ["/help", "/set temperature 0", "/set max_tokens 8", "def f(x):", "/model missing",
             "/new", "/system import", "def \\", "g(x):", "/undo", "/quit"]  # fmt: skip
    done = client(server, "-q", text="\n".join(lines))
    assert done.returncode == 0
    assert client_answer in done.stdout
    assert "models: tiny, gpt-4o-mini" in done.stderr


@pytest.mark.parametrize("streams", [True, False])
def test_requests_from_files(server, tmp_path, streams):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"text": "x", "max_output_len": 3, "is_streaming_mode": streams}))
    native = client(server, "--request", str(path))
    assert native.stdout.endswith("\n[end_of_response_text]\n")
    assert native.returncode == 0
    path.write_text(json.dumps({"prompt": "x", "max_tokens": 2, "stream": streams}))
    for line in client(server, "--request", str(path)).stdout.splitlines() if streams else ["{}"]:
        json.loads(line)


def test_file_of_inferflow(server, tmp_path):
    """`nbflow client inferflow_client.ini`, with its service."""
    ini = tmp_path / "inferflow_client.ini"
    request = '{"text": "x", "decoding_alg": "sample.std", "random_seed": 1, "max_output_len": 3}'
    others = "[app_env.base]\ndata_root_dir = ${config_dir}../data/\n"
    ini.write_text(f"[main]\nservice = {server.url}/process_query\nrequest =  {request}\n{others}")
    done = run_command("client", str(ini))
    whole = server.http.post("/", json=json.loads(request) | {"is_streaming_mode": False}).json()
    assert done.stdout == f"{whole['text']}\n[end_of_response_text]\n", done.stderr
    for text, words in (
        ("[main]\nservice = http://x\n", "must have request"),
        ("[main]\nservice = http://x\nrequest = {\n", "not valid JSON"),
        ("[main]\nserver = http://x\n", "did you mean 'service'"),
    ):
        ini.write_text(text)
        with pytest.raises(UsageError, match=words):
            read_client_ini(ini)


def test_failures(server):
    offline = client(server, "-p", "x", url="http://127.0.0.1:9/v1")
    assert (offline.returncode, "is the server running" in offline.stderr) == (2, True)
    assert client(server, "-p", "x", url="ftp://x").returncode == 2


@pytest.fixture(scope="module")
def client_answer(server) -> str:
    body = {"messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 8}
    answer = server.http.post("/v1/chat/completions", json=body | {"temperature": 0}).json()
    return answer["choices"][0]["message"]["content"]
