"""Limits of request fields, and errors for requests beyond them."""

import json

import pytest
from pydantic import ValidationError

from nbflow.server.bounds import BOUNDS, OutOfBounds, check_field
from nbflow.server.schemas import CompletionBody

ASKED = {"prompt": "x", "max_tokens": 2, "temperature": 0}
TOO_MUCH = {
    "prompt": "x" * 70_000,
    "stop": ["x"] * 65,
    "stop_token_ids": [1] * 1025,
    "bad_words": ["x" * 1025],
    "logit_bias": {str(i): 1 for i in range(4097)},
    "allowed_token_ids": [1] * (2**18 + 1),
    "banned_token_ids": [1] * (2**18 + 1),
    "samplers": ["top_k"] * 65,
    "dry_sequence_breakers": [f"{i:040d}" for i in range(65)],
    "guided_choice": [str(i) for i in range(4097)],
    "guided_regex": "x" * 65_537,
    "guided_grammar": "x" * 65_537,
    "guided_json": {"description": "x" * 262_144},
    "user": "x" * 4097,
}


@pytest.mark.parametrize("field", TOO_MUCH)
def test_too_much_is_refused_with_the_field_the_limit_and_what_was_found(server, field):
    answer = server.http.post("/v1/completions", json={**ASKED, field: TOO_MUCH[field]})
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"].split(".")[0] == field
    assert "at most" in error["message"]
    assert sum(c.isdigit() for c in error["message"]) >= 3


def test_what_clients_send_is_allowed(server):
    """Accept fields at their limits, in the forms of llama.cpp's and vLLM's clients."""
    body = {
        **ASKED,
        "stop": [f"stop {i}" for i in range(64)],
        "bad_words": [f"bad word {i}" for i in range(1024)],
        "dry_multiplier": 0.8,
        "dry_sequence_breakers": [f"{i:02}" + "#" * 38 for i in range(64)],
        "temperature": 1,
    }
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices = [f"label number {i}" for i in range(4096)]
    body = {**ASKED, "guided_choice": choices, "max_tokens": 40}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.json()["choices"][0]["text"] in choices
    names = [f"property_{i}" for i in range(400)]
    properties = {name: {"type": "string", "description": "x" * 250} for name in names}
    schema = {"type": "object", "properties": properties, "required": names}
    answer = server.http.post("/v1/completions", json={**ASKED, "guided_json": schema})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "prompt", "\ud800"),
        ("/v1/completions", "prompt", ["a", "\udfff"]),
        ("/v1/completions", "stop", ["\ud800"]),
        ("/v1/completions", "bad_words", ["\ud800"]),
        ("/v1/completions", "guided_choice", ["a", "\ud800"]),
        ("/v1/completions", "guided_json", {"\ud800": 1}),
        ("/v1/completions", "dry_sequence_breakers", ["\ud800"]),
        ("/v1/completions", "user", "\ud800"),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "\ud800"}]),
        ("/v1/embeddings", "input", "\ud800"),
        ("/tokenize", "prompt", "\ud800"),
    ],
)
def test_lone_surrogates_are_refused(server, path, field, value):
    body = {**ASKED, field: value} if path == "/v1/completions" else {field: value}
    head = {"content-type": "application/json"}
    answer = server.http.post(path, content=json.dumps(body), headers=head)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"].split(".")[0] == field
    assert "surrogate" in error["message"]


def test_lone_surrogates_in_inferflows_protocol(server):
    answer = server.http.post("/process_query", content='{"text": "\\ud800"}')
    assert answer.status_code == 400
    assert "text: must be valid Unicode, got a lone surrogate" in answer.json()["error_text"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", {"$ref": "#"}),
        ("guided_regex", "a{1000000}"),
        ("guided_regex", "("),
        ("guided_grammar", "start: start"),
        ("structured_outputs", {"regex": "a{1000000}"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}),
    ],
)
def test_structures_that_cannot_be_are_the_clients_error(server, field, value):
    answer = server.http.post("/v1/completions", json={**ASKED, field: value})
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == field


def test_a_structure_that_turns_out_too_complex_is_the_clients_error(server):
    """The grammar compiles, but exceeds the grammar engine's limits after the first letters."""
    body = {**ASKED, "guided_regex": "abcdefgh" + "(x|y)" * 4 + "z{1000000}", "max_tokens": 60}
    answer = server.http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == "guided_regex"


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt", [1.5]), ("prompt", [[1.5]]), ("allowed_token_ids", [1.5]), ("stop", [[]])],
)
def test_a_million_wrong_items_are_one_finding(field, value):
    """pydantic would build an object for each and block the event loop for a minute."""
    body = {"prompt": "x", field: value * 250_000}
    with pytest.raises(ValidationError) as refused:
        CompletionBody.model_validate(body)
    (found,) = refused.value.errors()
    assert found["ctx"]["param"] == field


def test_limits_of_texts(server):
    """/tokenize, embeddings and conversations are refused before tokenization."""
    long = "x" * 70_000
    for path, body in (
        ("/tokenize", {"prompt": long}),
        ("/v1/embeddings", {"input": ["a", long]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/process_query", {"text": long}),
        ("/detokenize", {"tokens": [5] * 70_000}),
    ):
        answer = server.http.post(path, json=body)
        assert answer.status_code == 400, path
        assert "at most" in answer.text
    deep = '{"a":' * 900 + "1" + "}" * 900
    answer = server.http.post(
        "/v1/completions", content=f'{{"prompt": "x", "guided_json": {deep}}}',
        headers={"content-type": "application/json"},
    )  # fmt: skip
    assert answer.status_code == 400


def test_log_probabilities_of_prompts_are_computed_once_and_bounded(server):
    body = {"prompt": "def f(x):\n    return x", "max_tokens": 1, "n": 3, "temperature": 1}
    asked = {**body, "prompt_logprobs": 4, "logprobs": 2, "echo": True}
    choices = server.http.post("/v1/completions", json=asked).json()["choices"]
    alone = server.http.post("/v1/completions", json={**asked, "n": 1}).json()["choices"][0]
    for choice in choices:
        assert choice["prompt_logprobs"] == alone["prompt_logprobs"]
        n = len(alone["prompt_logprobs"])
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][:n] == alone["logprobs"]["token_logprobs"][:n]
    too_many = {"prompt": [[5] * 500] * 2, "n": 64, "max_tokens": 1, "prompt_logprobs": 20}
    answer = server.http.post("/v1/completions", json=too_many)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_logprobs"


def test_echoed_log_probabilities_are_whole_in_every_stream(client):
    stream = client.completions.create(
        model="tiny", prompt=[5] * 400, n=8, max_tokens=4, echo=True, logprobs=1, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    tokens: dict[int, int] = {}
    for chunk in stream:
        for choice in chunk.choices:
            found = choice.logprobs.tokens if choice.logprobs else []
            tokens[choice.index] = tokens.get(choice.index, 0) + len(found)
    assert tokens == dict.fromkeys(range(8), 404)


def test_every_field_has_a_limit():
    for name in BOUNDS:
        check_field(name, "x")
    with pytest.raises(OutOfBounds, match="at most 4,096 bytes"):
        check_field("whatever", "x" * 4097)
