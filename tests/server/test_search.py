"""Beam search, contrastive search and draft models in the OpenAI endpoints."""

import json

import openai
import pytest
from server_process import CONFIG, TEMPLATE, Server, eventually

import nbflow
from nbflow.tokenization.chat import encode_chat

PROMPT = "def __init__(self"
MESSAGES = [{"role": "user", "content": "def read(self, name):\n"}]
BEAMS = {"use_beam_search": True, "beam_width": 4, "length_penalty": 0.5}


def complete(client, prompt=PROMPT, extra=BEAMS, **more):
    settings = {"model": "tiny", "prompt": prompt, "max_tokens": 10} | more
    return client.completions.create(**settings, extra_body=extra)


def test_beams_are_the_offline_ones(client, offline):
    found = nbflow.beam_search(offline, PROMPT, 10, num_beams=4, length_penalty=0.5, n=3)
    answer = complete(client, n=3, logprobs=2, temperature=0)
    assert [c.text for c in answer.choices] == [g.text for g in found]
    assert [c.finish_reason for c in answer.choices] == [g.finish_reason for g in found]
    for choice, made in zip(answer.choices, found, strict=True):
        assert choice.logprobs.token_logprobs == pytest.approx(made.logprobs, abs=1e-4)
        # the chosen token is among them, whether or not it is one of the 2 most probable
        assert all(len(top) in (2, 3) for top in choice.logprobs.top_logprobs)
    assert answer.usage.completion_tokens == sum(len(g.ids) for g in found)
    two = complete(client, [PROMPT, "import os"], n=2)
    assert [c.index for c in two.choices] == [0, 1, 2, 3]
    assert [c.text for c in two.choices[:2]] == [g.text for g in found[:2]]
    by_name = complete(client, extra={"decoding": "beam", "length_penalty": 0.5}, n=1)
    assert by_name.choices[0].text == found[0].text  # 4 beams are the default


def test_beams_come_at_the_end_of_a_stream(client, offline):
    whole = complete(client, n=2, echo=True, logprobs=1)
    chunks = list(
        complete(
            client, n=2, echo=True, logprobs=1, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage == whole.usage
    for i, choice in enumerate(whole.choices):
        (one,) = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == i]
        assert (one.text, one.finish_reason) == (choice.text, choice.finish_reason)
    talk = {"model": "tiny", "messages": MESSAGES, "max_tokens": 10, "n": 2, "extra_body": BEAMS}
    answer = client.chat.completions.create(**talk)
    ids = encode_chat(offline.tokenizer, MESSAGES, TEMPLATE)
    found = nbflow.beam_search(offline, ids, 10, num_beams=4, length_penalty=0.5, n=2)
    assert [c.message.content for c in answer.choices] == [g.text for g in found]
    parts = list(client.chat.completions.create(**talk, stream=True))
    for i, made in enumerate(found):
        mine = [p.choices[0].delta.content or "" for p in parts if p.choices[0].index == i]
        assert "".join(mine) == made.text


def test_contrastive_search_streams(client, offline):
    expected = nbflow.contrastive_search(offline, PROMPT, 16, top_k=5, penalty_alpha=0.4)
    extra = {"penalty_alpha": 0.4, "top_k": 5}
    assert complete(client, extra=extra, max_tokens=16).choices[0].text == expected.text
    chunks = list(complete(client, extra=extra, max_tokens=16, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == expected.text
    assert len(chunks) > 4
    stop = expected.text[8:10]
    cut = complete(client, extra=extra, max_tokens=16, stop=[stop]).choices[0]
    assert cut.text == expected.text[: expected.text.index(stop)]
    assert cut.stop_reason == stop


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"stop": "x"}, "stop"),
        ({"top_p": 0.5}, "top_p"),
        ({"best_of": 3}, "best_of"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 5}, "n"),  # more than beam_width
        ({"beam_width": 200, "n": 1}, "beam_width"),  # more than limits.choices
        ({"decoding": "greedy"}, "decoding"),
        ({"penalty_alpha": 0.5}, "penalty_alpha"),
        ({"use_beam_search": False}, "beam_width"),
        ({"use_beam_search": False, "beam_width": None, "length_penalty": None,
          "penalty_alpha": 0.5, "n": 2}, "n"),
        ({"num_beams": 4}, "num_beams"),
        ({"early_stopping": "often"}, "early_stopping"),
    ],
)  # fmt: skip
def test_refused(server, body, param):
    answer = server.http.post("/v1/completions", json={"prompt": "x", **BEAMS, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param


def test_neutral_values_are_accepted(server):
    body = {"temperature": 1.0, "top_p": 1, "presence_penalty": 0, "stop": [], "max_tokens": 2}
    body |= {"response_format": {"type": "text"}, "early_stopping": False, "seed": 5}
    answer = server.http.post("/v1/completions", json={"prompt": "x", **BEAMS, **body})
    assert answer.status_code == 200, answer.text


def test_others_go_on_beside_a_search_and_hanging_up_ends_it(server, client):
    body = {"prompt": [1] * 100, "use_beam_search": True, "beam_width": 64, "ignore_eos": True}
    plain = complete(client, extra={}, temperature=0)
    with server.http.stream(
        "POST", "/v1/completions", json=body | {"max_tokens": 380, "stream": True}
    ) as stream:
        assert stream.status_code == 200
        eventually(lambda: server.metric("vllm:num_requests_running") == 1)
        assert complete(client, extra={}, temperature=0).choices[0].text == plain.choices[0].text
        assert server.metric("vllm:num_requests_running") == 1  # it is still searching
    eventually(server.idle)
    assert server.metric("vllm:kv_cache_usage_perc") == 0


DRAFTED = (
    CONFIG.replace(
        "threads = 1",
        'threads = 1\ndraft = "tiny_python"\nn_draft = 3',
    )
    + """
[limits]
request_s = 30
"""
)


def test_a_draft_model_changes_no_answer(client, tmp_path):
    with Server(DRAFTED, tmp_path) as drafted:
        own = drafted.client()
        for settings in ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "n": 3}):
            plain = complete(client, extra={}, max_tokens=40, **settings)
            helped = complete(own, extra={}, max_tokens=40, **settings)
            assert [c.text for c in helped.choices] == [c.text for c in plain.choices]
        chunks = list(complete(own, extra={}, max_tokens=40, temperature=0, stream=True))
        # several tokens come with a step
        assert len(chunks) < 30
        assert complete(own).choices[0].text == complete(client).choices[0].text
        drafted_tokens = drafted.metric("vllm:spec_decode_num_draft_tokens_total")
        accepted = drafted.metric("vllm:spec_decode_num_accepted_tokens_total")
        assert 0 < accepted <= drafted_tokens
        assert drafted.stop() == 0


def test_a_search_that_runs_out_of_time_tells_what_it_has(tmp_path):
    config = CONFIG + "\n[limits]\nrequest_s = 0.5\n"
    with Server(config, tmp_path) as hurried:
        body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "n": 2, **BEAMS}
        body["beam_width"] = 64
        answer = hurried.http.post("/v1/completions", json=body).json()
        assert [c["finish_reason"] for c in answer["choices"]] == ["length"] * 2
        assert 0 < answer["usage"]["completion_tokens"] < 1000
        json.dumps(answer)
        with pytest.raises(openai.BadRequestError, match="beam_width"):
            complete(hurried.client(), extra={"beam_width": 3})
