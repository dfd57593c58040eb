"""A server that is started with Inferflow's service file."""

import re
import threading
from collections.abc import Iterator

import pytest
from server_process import Server

INI = """
[main]
http_port = 0
worker_count = 2
global_model_dir = ${data_root_dir}../models/
[transformer_engine]
models = stories_of_code
devices = 0
cpu_threads = 1
max_concurrent_queries = 2
is_study_mode = 1
[model.stories_of_code]
model_dir = %s
device_weight_data_type = Q8
decoding_strategy = {"name":"sample.fsd", "top_p":0.9, "eos_bypassing_max":0}
prompt_template = code
aliases = default
[prompt_templates]
prompt_template_count = 1
prompt_template1 = code
[prompt_template.code]
line_count = 2
line1 = {query}
line2 = {res_prefix}
[app_env.base]
data_root_dir = ${config_dir}../data/
[app_env.logging]
enable_logging = 1
log_dir = ${data_root_dir}logs
log_name = ${app_name}
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Server]:
    from nbflow.spec import resolve

    folder = tmp_path_factory.mktemp("service") / "bin"
    folder.mkdir()
    config = INI % resolve("tiny_python").path
    with Server(config, folder, name="inferflow_service.ini") as running:
        yield running


def test_the_strategy_is_that_of_the_file(service):
    """The default is deterministic FSD, and small matrices stay in float16."""
    asked = {"text": "def f(", "max_output_len": 6, "is_streaming_mode": 0}
    answers = [service.http.post("/", json=asked).json() for _ in range(2)]
    explicit = service.http.post("/", json={**asked, "decoding_alg": "sample.fsd"}).json()
    greedy = service.http.post("/", json={**asked, "decoding_alg": "greedy"}).json()
    assert [a["ret_code"] for a in (*answers, explicit, greedy)] == ["succ"] * 4
    assert answers[0]["text"] == answers[1]["text"] == explicit["text"]
    chat = {"messages": [{"role": "user", "content": "x"}], "model": "default", "max_tokens": 1}
    assert service.http.post("/chat/completions", json=chat).status_code == 200


def test_parameters_of_other_strategies(service):
    """Parameters that FSD lacks choose another strategy; neutral values do not."""

    def text(**body) -> str:
        given = {"prompt": "def f(", "max_tokens": 6, "seed": 3, **body}
        answer = service.http.post("/v1/completions", json=given)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    assert text() == text(top_p=1, top_k=-1) == text(decoding="inferflow.fsd")
    assert text(top_k=1) == text(decoding="greedy")


def test_requests_above_the_workers_wait(service):
    found = []

    def ask() -> None:
        body = {"text": "import", "max_output_len": 20, "is_streaming_mode": 0}
        found.append(service.http.post("/", json=body).status_code)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 8


def test_study_mode_prints_ops(service):
    """Each op has its time, shape and values; a step ends with its sum."""
    text = "".join(service.log)
    ops = re.findall(r"^  L0 +linear +q_k_v +[0-9.]+ ms +(\d+) x 512  (\S+) ", text, re.MULTILINE)
    assert ops
    assert all(abs(float(value)) < 1e3 for _, value in ops)
    assert re.search(r"trace rank 0 step 1: [0-9.]+ ms: .*linear [0-9.]+", text)
    assert "top_p has no effect with sample.fsd" in text


def test_the_log_is_in_its_folder(service, tmp_path_factory):
    (file,) = tmp_path_factory.getbasetemp().glob("service0/data/logs/nbflow.log")
    assert "model ready" in file.read_text()
