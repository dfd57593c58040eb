"""Inferflow's protocol."""

import json

import pytest
from server_process import TEMPLATE

from nbflow.tokenization.chat import encode_chat

GREEDY = {"max_output_len": 12, "decoding_alg": "greedy", "is_streaming_mode": False}


def ask(server, path="/", **body):
    return server.http.post(path, json=body)


def lines(answer):
    return [json.loads(line) for line in answer.text.split("\n\n") if line]


def test_stream_ends_and_loses_nothing(server):
    asked = {"text": "def read(self):", "max_output_len": 40, "decoding_alg": "sample.greedy"}
    whole = ask(server, "/process_query", is_streaming_mode=False, **asked).json()
    assert whole["ret_code"] == "succ"
    assert whole["time_cost"] > 0
    parts = lines(ask(server, **asked))
    assert [part.get("is_end") for part in parts] == [None] * (len(parts) - 1) + [1]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert all(len(part["text"].encode()) >= 16 for part in parts[:-1])


def test_parameters(server):
    asked = {"text": "x", "max_new_tokens": 8, "random_seed": 3, "is_streaming_mode": 0}
    first, second = (ask(server, temperature=0.7, **asked).json()["text"] for _ in range(2))
    assert first == second
    with_system = ask(server, system_prompt="import os", res_prefix="  pass", **asked)
    assert with_system.json()["ret_code"] == "succ"
    for name in ("top_p", "sample.top_k", "fsd", "min_p", "tfs", "typical", "mirostat"):
        assert ask(server, decoding_alg=name, **asked).json()["ret_code"] == "succ", name


@pytest.mark.parametrize("text", ["def read(self):", ""])
def test_prefix_of_the_response_is_continued(server, offline, text):
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "    with open"},
    ]
    for template, more in (
        (TEMPLATE, {}),
        ("{bos}{query}\n{res_prefix}", {"decoder_input_template": "{bos}{query}{\\n}{res_prefix}"}),
    ):
        prompt = encode_chat(offline.tokenizer, messages, template, continue_final_message=True)
        assert offline.tokenizer.decode(prompt).endswith("with open")
        expected = offline.generate(prompt, max_tokens=12).text
        body = GREEDY | more | {"res_prefix": "    with open"} | ({"text": text} if text else {})
        answer = ask(server, **body).json()
        assert (answer["ret_code"], answer["text"]) == ("succ", expected)


def test_as_in_inferflow(server):
    """Methods, paths, content type, unknown fields and seeds that its server takes."""
    body = json.dumps({"text": "x", "max_output_len": 1, "random_seed": -(2**63), "colour": 1})
    form = {"content-type": "application/x-www-form-urlencoded"}
    for method, path in (("POST", "/"), ("post", "/"), ("PUT", "/"), ("PUT", "/a/b/process_query")):
        assert server.raw(method, path, body, form).status == 200, (method, path)
    assert any(event.get("ignored_fields") == "colour" for event in server.events())
    assert ask(server, model="gpt-4o-mini", text="x", **GREEDY).json()["ret_code"] == "succ"
    assert ask(server, "/v2/answer", text="x").status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "error.empty_request"),
        ({"text": ""}, 400, "error.empty_request"),
        ({"text": "x", "decoding_alg": "beam"}, 400, "error.invalid_request_format"),
        ({"text": "x " * 20_000}, 400, "error.too_long_request"),
        ({"text": "x", "decoder_input_template": "{{x}}"}, 400, "error.invalid_request_format"),
        ({"text": "x", "encoder_input_template": "{query}"}, 400, "error.invalid_request_format"),
        ({"text": 5}, 400, "error.invalid_request_format"),
        ({"text": "x", "max_tokens": 5}, 400, "error.invalid_request_format"),
        ({"text": "x", "random_seed": 2**64}, 400, "error.invalid_request_format"),
        ({"header": {"fn": "stop"}}, 400, "error.invalid_request_format"),
    ],
)
def test_refusals(server, body, status, code):
    answer = ask(server, **body)
    assert answer.status_code == status
    assert answer.json()["ret_code"] == code


def test_one_form_of_errors(server):
    invalid = "error.invalid_request_format"
    for answer, status in (
        (server.http.post("/", content="{"), 400),
        (server.http.post("/process_query", files={"text": b"x"}), 415),
        (server.http.delete("/a/process_query"), 405),
        (server.http.post("/", content="{}", headers={"origin": "http://x.example"}), 415),
        (server.http.put("/", content=b" " * 5_000_000), 413),
    ):
        assert (answer.status_code, answer.json()["ret_code"]) == (status, invalid)
        assert set(answer.json()) == {"ret_code", "error_text"}


def test_statistics(server):
    asked = ask(server, header={"fn": "get_stat"}, text="")
    for answer in (asked, server.http.get("/get_stat"), server.http.put("/get_stat")):
        stat = answer.json()
        assert stat["ret_code"] == "succ"
        assert stat["tiny"]["num_requests_running"] >= 0
