"""Error responses: they name the field, and the server continues."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from server_process import eventually

USER = [{"role": "user", "content": "x"}]


def chat(server, **body):
    body = {"messages": USER, "max_tokens": 1} | body
    return server.http.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}], "not supported"),
        ("temprature", 0.5, "did you mean 'temperature'"),
        ("temperature", -1, "temperature must be in 0..100, got -1"),
        ("temperature", "hot", "temperature must be a number"),
        ("top_p", 0, "greater than 0"),
        ("top_k", 1.5, "top_k must be a whole number"),
        ("n", 0, "n must be in 1..65536, got 0"),
        ("n", 10_000, "limits.choices"),
        ("messages", [], "at least 1"),
        ("messages", [{"role": "king", "content": "x"}], "unknown role"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "only text"),
        ("top_logprobs", 3, "needs logprobs"),
        ("stream_options", {"include_usage": True}, "needs stream"),
        ("stop", [""], "none empty"),
        ("response_format", {"type": "text", "x": 1}, "response_format: unknown field 'x'"),
        ("best_of", 1, None),
        ("n_predict", 5, "use max_tokens"),
        ("repeat_penalty", 1.1, "use repetition_penalty"),
        ("prompt", "x", "use messages"),
        ("logit_bias", {"x": 1}, "token ids"),
        ("logit_bias", {"9999999": 1}, "logit_bias must hold ids"),
        ("logit_bias", {"\u0663": 1}, "token ids"),
        ("logit_bias", {"1_0": 1}, "token ids"),
        ("logit_bias", {"5": 1e308}, "logit_bias must be in"),
        ("logit_bias", {"5": -(2**70)}, "logit_bias must be in"),
        ("logit_bias", {"5": 1000}, None),
        ("allowed_token_ids", [], "allowed_token_ids must hold at least one"),
        ("allowed_token_ids", [2**63], "allowed_token_ids must hold ids"),
        ("banned_token_ids", list(range(2048)), "every token is banned"),
        ("banned_token_ids", [-1], "banned_token_ids must hold ids"),
        ("stop_token_ids", [2**63], "stop_token_ids must hold ids"),
        ("stop_token_ids", [2048], "stop_token_ids must hold ids in 0..2047"),
        ("stop_token_ids", [-1], "stop_token_ids must hold ids"),
        ("decoding", "beams", "unknown decoding strategy"),
        ("decoding", "beam", None),
        ("beam_width", 3, "add use_beam_search"),
        ("response_format", {"type": "json_schema"}, "json_schema"),
        ("guided_regex", "(", "regex"),
        ("chat_template", "{{ messages }}", "request_templates"),
        ("chat_template_kwargs", {"tools": 1}, "field of its own"),
        ("chat_template_kwargs", {"self": 1}, "field of its own"),
        ("chat_template_kwargs", {"func": 1}, None),
        ("model", "gpt-5", None),
        ("model", 5, "model: input should be a valid string"),
        ("continue_final_message", True, None),
        ("seed", 2**64, "seed must be in"),
        ("max_tokens", None, None),
        ("tools", [], None),
        ("tool_choice", "none", None),
        ("store", False, None),
        ("functions", None, None),
    ],
)
def test_field(server, field, value, words):
    answer = chat(server, **{"ignore_eos": True, "max_tokens": 1, field: value})
    if words is None:
        assert answer.status_code == 200, answer.text
        return
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition(".")[0] == field


def test_official_errors(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-5")
    assert missing.value.code == "model_not_found"
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as many:
        client.completions.create(model="tiny", prompt="x", logprobs=21)
    assert many.value.param == "logprobs"
    with pytest.raises(openai.BadRequestError, match="context of"):
        client.completions.create(model="tiny", prompt=[1] * 100_000)
    for token in (10**8, 10**30):
        with pytest.raises(openai.BadRequestError, match=f"{token} is outside the vocabulary"):
            client.completions.create(model="tiny", prompt=[1, token])
    assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices


ALL = list(range(2048))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}},
         "response_format.json_schema"),
        ({"structured_outputs": {"json": {"type": "nonsense"}}}, "structured_outputs"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"decoding": "beams"}, "decoding"),
        ({"decoding": "top_p:top_p=5"}, "decoding"),
        ({"decoding": "greedy", "top_k": 3}, "top_k"),
        ({"samplers": "nonsense"}, "samplers"),
        ({"mirostat": 1, "mirostat_m": 1}, "mirostat_m"),
        ({"stop": ""}, "stop"),
        ({"bad_words": [""]}, "bad_words"),
        ({"target_lang": "fr"}, "target_lang"),
        ({"use_beam_search": True, "beam_width": 2, "n": 3}, "n"),
        ({"use_beam_search": True, "beam_width": 4096}, "beam_width"),
        ({"best_of": 65536}, "best_of"),
        ({"logit_bias": dict.fromkeys(ALL, False), "stream": True}, "logit_bias"),
        ({"banned_token_ids": ALL, "bad_words": ["x"]}, None),
        ({"prompt": ["x"] * 5000}, "prompt"),
        ({"prompt": [1] * 100_000}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
    ],
)  # fmt: skip
def test_official_errors_name_the_parameter(client, more, param):
    own = {"best_of", "n", "stream", "stream_options", "stop", "logit_bias", "prompt"} & set(more)
    given = {"model": "tiny", "prompt": "x", "max_tokens": 2} | {key: more[key] for key in own}
    others = {key: value for key, value in more.items() if key not in own}
    with pytest.raises(openai.APIError) as refused:
        list(client.completions.create(**given, extra_body=others))
    assert refused.value.param == param


def test_requests_that_ban_every_token_are_logged_as_bad_and_leave_the_batch_alone(client, server):
    def complete(**more):
        given = {"model": "tiny", "prompt": "Once", "max_tokens": 24, "temperature": 0}
        return client.completions.create(**given, extra_body={"ignore_eos": True}, **more)

    alone = complete().choices[0].text
    n_before = len(server.events())
    banned = {"logit_bias": dict.fromkeys(ALL, False)}
    structure = {"extra_body": {"guided_regex": "[0-9]+", "allowed_token_ids": ALL[300:301]}}
    refused = []
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(complete) for _ in range(2)]
        for more in (banned, {**banned, "stream": True}, structure, {**banned, "n": 2}):
            call = client.completions.create
            given = {"model": "tiny", "prompt": "x", **more}
            refused.append(pool.submit(lambda call, given: list(call(**given)), call, given))
        for future in refused:
            with pytest.raises(openai.APIError, match="every token is banned"):
                future.result()
    assert [future.result().choices[0].text for future in others] == [alone, alone]

    def ids_of(event):
        new = server.events()[n_before:]
        return {each["request_id"] for each in new if each["event"] == event}

    def are_logged():
        of_refused = ids_of("a sequence was refused")
        return len(of_refused) == len(refused) and of_refused <= ids_of("request")

    eventually(are_logged)
    events = server.events()[n_before:]
    assert not [event for event in events if "traceback" in event]
    logged = [event for event in events if event["event"] == "a sequence was refused"]
    assert {event["level"] for event in logged} == {"info"}


def test_official_errors_of_other_routes_name_the_parameter(client, server):
    def chat(content="x", **more):
        messages = [{"role": "user", "content": content}]
        client.chat.completions.create(model="tiny", messages=messages, **more)

    def embed(**more):
        client.embeddings.create(**{"model": "tiny", "input": "x", **more})

    for call, given, param in (
        (chat, {"content": "x " * 5000}, "messages"),
        (chat, {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages"),
        (chat, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        (chat, {"top_logprobs": 3}, "top_logprobs"),
        (embed, {"input": [[]]}, "input"),
        (embed, {"input": [2**40]}, "input"),
        (embed, {"extra_body": {"pooling": "most"}}, "pooling"),
        (client.models.retrieve, {"model": "gpt-5"}, "model"),
    ):
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refused:
            call(**given)
        assert refused.value.param == param, given
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": [{"role": "king", "content": "x"}]}, "messages"),
        ("/apply-template", {"messages": [{"role": "user"}]}, "messages"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/fill-mask", {"inputs": "x"}, "model"),
        ("/classify", {"input": "x"}, "model"),
    ):
        assert server.http.post(path, json=body).json()["error"]["param"] == param, path


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b"[" * 100_000, 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"\\ud800": 1}', 400),
        (b'{"temperature": NaN, "messages": [{"role": "user", "content": ""}]}', 400),
        (b'{"max_tokens": 1' + b"0" * 5000 + b"}", 400),
        (b"\xff\xfe\x00", 400),
    ],
)
def test_bodies(server, body, status):
    head = {"content-type": "application/json"}
    answer = server.http.post("/v1/chat/completions", content=body, headers=head)
    assert answer.status_code == status, answer.text
    assert "error" in answer.json()


def test_other_refusals(server):
    post, get = server.http.post, server.http.get
    plain = {"content-type": "text/plain"}
    assert post("/v1/completions", content="prompt=x", headers=plain).status_code == 400
    assert post("/v1/completions", files={"prompt": b"x"}).status_code == 415
    for name in ("origin", "referer", "sec-fetch-site"):  # a web page
        head = {**plain, name: "null"}
        page = post("/v1/completions", content='{"prompt": "x"}', headers=head)
        assert page.status_code == 415, name
    assert get("/v1/nothing").status_code == 404
    assert get("/v1/nothing").json()["error"]["message"].startswith("no route /v1/nothing")
    assert get("/v1/chat/completions").status_code == 405
    assert post("/v1/embeddings", json={"input": [], "model": "tiny"}).status_code == 400
    assert post("/v1/embeddings", json={"input": "x", "dimensions": 3}).status_code == 400
    assert post("/detokenize", json={"tokens": [-1]}).status_code == 400
    assert post("/tokenize", json={}).status_code == 400


def test_what_curl_sends(server):
    """The method in lower case, a form's content type or none, and any model name."""
    body = json.dumps({"model": "gpt-3.5-turbo", "messages": USER, "max_tokens": 1})
    form = {"content-type": "application/x-www-form-urlencoded"}
    for path, head in (("/chat/completions", form), ("/v1/chat/completions", {})):
        answer = server.http.request("post", path, content=body, headers=head)
        raw = server.raw("post", path, body, head)
        assert [answer.status_code, raw.status] == [200, 200], answer.text
        assert answer.json()["model"] == "tiny"
    tokens = server.raw("post", "/tokenize", '{"prompt": "x"}', form)
    assert tokens.status == 200


def test_request_ids(server):
    given = server.http.get("/health", headers={"x-request-id": "my-1"})
    assert given.headers["x-request-id"] == "my-1"
    odd = server.http.get("/health", headers={"x-request-id": "a b\\"})
    assert len(odd.headers["x-request-id"]) == 32
    chat(server, request_id="mine", user="me")
    eventually(lambda: any(e.get("user") == "me" for e in server.events()))
    line = next(e for e in server.events() if e.get("user") == "me")
    assert line["status"] == 200
    assert line["prompt_tokens"] > 0


def test_tokens(server, offline):
    tokens = server.http.post("/tokenize", json={"prompt": "import os"}).json()
    assert tokens["tokens"] == offline.tokenizer.encode("import os", add_special_tokens=True)
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == offline.spec.max_context
    text = server.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert text == {"prompt": "import os"}
    shown = server.http.post("/apply-template", json={"messages": USER}).json()
    assert shown == {"prompt": "user: x\nassistant:"}
    chat_tokens = server.http.post("/tokenize", json={"messages": USER}).json()
    assert server.http.post("/detokenize", json={"tokens": chat_tokens["tokens"]}).json() == {
        "prompt": "user: x\nassistant:"
    }


def test_status(server):
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").status_code == 200
    assert "version" in server.http.get("/version").json()
    info = server.http.get("/server_info").json()
    assert info["models"]["tiny"]["aliases"] == ["gpt-4o-mini"]
    assert "keys" not in json.dumps(info)


def test_metrics(server, client):
    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    names += ("time_to_first_token_seconds_count", "e2e_request_latency_seconds_count")
    before = [server.metric(f"vllm:{name}") if client else 0 for name in names]
    answer = client.completions.create(
        model="tiny", prompt="import", max_tokens=7, extra_body={"ignore_eos": True}
    )
    after = [server.metric(f"vllm:{name}") for name in names]
    grown = [b - a for a, b in zip(before, after, strict=True)]
    assert grown == [answer.usage.prompt_tokens, 7, 1, 1, 1]
    for name in ("kv_cache_usage_perc", "prefix_cache_queries_total", "num_preemptions_total"):
        assert server.metric(f"vllm:{name}") >= 0
    assert server.metric("vllm:inter_token_latency_seconds_count") >= 6
    assert server.idle()


def test_wrong_ids_of_a_search(server):
    body = {"prompt": "x", "max_tokens": 2, "use_beam_search": True, "stop_token_ids": [2**63]}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "stop_token_ids must hold ids" in answer.json()["error"]["message"]
