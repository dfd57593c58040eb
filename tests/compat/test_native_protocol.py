"""Inferflow's protocol."""

import json

import pytest


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


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "error.empty_request"),
        ({"text": ""}, 400, "error.empty_request"),
        ({"text": "x", "decoding_alg": "beam"}, 400, "error.invalid_request_format"),
        ({"text": "x " * 20_000}, 400, "error.too_long_request"),
        ({"text": "x", "decoder_input_template": "{query}"}, 400, "error.invalid_request_format"),
    ],
)
def test_refusals(server, body, status, code):
    answer = ask(server, **body)
    assert answer.status_code == status
    assert answer.json()["ret_code"] == code


def test_statistics(server):
    stat = ask(server, header={"fn": "get_stat"}, text="").json()
    assert stat["ret_code"] == "succ"
    assert stat["tiny"]["num_requests_running"] >= 0
