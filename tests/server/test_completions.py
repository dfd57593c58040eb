"""Completions with the official client; scoring as in lm-evaluation-harness."""

import math

import numpy as np
import pytest

import nbflow_kernels as nk

PROMPT = "def __init__(self"


def complete(client, prompt=PROMPT, **more):
    settings = {"model": "tiny", "prompt": prompt, "max_tokens": 10, "temperature": 0} | more
    return client.completions.create(**settings)


def test_answer_is_the_offline_one(client, offline):
    expected = offline.generate(PROMPT, max_tokens=10)
    answer = complete(client)
    assert (answer.choices[0].text, answer.object) == (expected.text, "text_completion")
    assert answer.usage.prompt_tokens == len(expected.prompt_ids)
    ids = complete(client, expected.prompt_ids, extra_body={"return_token_ids": True})
    assert ids.choices[0].token_ids == expected.ids
    assert complete(client, max_tokens=None).usage.completion_tokens == 16  # OpenAI's default


def test_choices_are_prompt_major(client, offline):
    prompts = ["import os", "class Thread(", "def f(x):"]
    answer = complete(client, prompts, n=2, seed=4, temperature=0.8)
    assert [c.index for c in answer.choices] == list(range(6))
    for i, prompt in enumerate(prompts):
        alone = complete(client, prompt, n=2, seed=4, temperature=0.8)
        assert [c.text for c in answer.choices[2 * i : 2 * i + 2]] == [
            c.text for c in alone.choices
        ]
    n_prompt = sum(len(offline.tokenizer.encode(p, add_special_tokens=True)) for p in prompts)
    assert answer.usage.prompt_tokens == n_prompt  # each prompt once, however many choices


def test_stream_is_the_whole_answer(client):
    whole = complete(client, ["import os", PROMPT], echo=True, logprobs=2)
    chunks = list(complete(client, ["import os", PROMPT], echo=True, logprobs=2, stream=True))
    for i, choice in enumerate(whole.choices):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == i]
        assert "".join(c.text for c in mine) == choice.text
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            parts = [item for c in mine for item in getattr(c.logprobs, name)]
            assert parts == getattr(choice.logprobs, name)
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]


def test_offsets_are_where_tokens_begin(client):
    choice = complete(client, echo=True, logprobs=1).choices[0]
    lines = choice.logprobs
    ends = [*lines.text_offset[1:], len(choice.text)]
    cut = [choice.text[a:b] for a, b in zip(lines.text_offset, ends, strict=True)]
    assert "".join(cut) == choice.text
    assert cut == [t if t in choice.text else "" for t in lines.tokens]


def test_offsets_with_a_stop_text_are_those_without(client):
    plain = complete(client, logprobs=1).choices[0]
    watched = complete(client, logprobs=1, stop=["never"]).choices[0]  # the engine detokenizes
    assert (watched.text, watched.logprobs) == (plain.text, plain.logprobs)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_scoring(client, offline, max_tokens, as_ids):
    """Request and response parsing of lm-evaluation-harness."""
    texts = ["import os, sys\n", "for i in range(10):"]
    ids = [offline.tokenizer.encode(t, add_special_tokens=True) for t in texts]
    answer = complete(
        client, ids if as_ids else texts, max_tokens=max_tokens, logprobs=1, echo=True, seed=1234
    )
    assert [c.index for c in answer.choices] == [0, 1]
    for choice, prompt in zip(answer.choices, ids, strict=True):
        end = len(prompt) if max_tokens == 0 else -1
        logprobs = choice.logprobs.token_logprobs[1:end]
        tops = choice.logprobs.top_logprobs[1:end]
        logits = offline.logits(prompt).astype(np.float64)
        expected = nk.log_softmax(offline.logits(prompt))
        want = [float(expected[t, prompt[t + 1]]) for t in range(len(prompt) - 1)]
        assert logprobs == pytest.approx(want, abs=2e-5)  # float32 results of the public function
        greedy = [lp == max(top.values()) for lp, top in zip(logprobs, tops, strict=True)]
        best = [int(logits[t].argmax()) == prompt[t + 1] for t in range(len(prompt) - 1)]
        assert greedy == best
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.token_logprobs) == len(prompt) + max_tokens


def test_prompt_logprobs(client, offline):
    answer = complete(client, extra_body={"prompt_logprobs": 2})
    rows = answer.choices[0].prompt_logprobs
    ids = offline.tokenizer.encode(PROMPT, add_special_tokens=True)
    assert rows[0] is None
    assert len(rows) == len(ids)
    for token, row in zip(ids[1:], rows[1:], strict=True):
        assert str(token) in row
        ranks = sorted(entry["rank"] for entry in row.values() if entry["rank"])
        assert ranks[:2] == [1, 2]


def test_parameters_reach_the_model(client, offline):
    ids = offline.tokenizer.encode(PROMPT, add_special_tokens=True)
    first = offline.generate(ids, max_tokens=1).ids[0]
    best = complete(client, max_tokens=1, extra_body={"return_token_ids": True})
    assert best.choices[0].token_ids == [first]
    forbidden = complete(
        client, max_tokens=1, logit_bias={str(first): -100}, extra_body={"return_token_ids": True}
    )
    assert forbidden.choices[0].token_ids != [first]
    allowed = complete(
        client, max_tokens=3, extra_body={"allowed_token_ids": [7, 9], "return_token_ids": True}
    )
    assert set(allowed.choices[0].token_ids) <= {7, 9}
    ended = complete(client, max_tokens=5, extra_body={"stop_token_ids": [first]})
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    later = complete(
        client, max_tokens=5,
        extra_body={"stop_token_ids": [first], "min_tokens": 3, "return_token_ids": True},
    )  # fmt: skip
    assert len(later.choices[0].token_ids) >= 3
    narrow = complete(client, temperature=1.0, seed=1, extra_body={"top_k": 1})
    assert narrow.choices[0].text == complete(client).choices[0].text
    penalty = complete(client, presence_penalty=2.0, frequency_penalty=2.0, max_tokens=30)
    assert penalty.choices[0].text != complete(client, max_tokens=30).choices[0].text


def test_end_of_the_context(client, offline):
    room = offline.spec.max_context
    ids = [5] * (room - 4)
    answer = complete(client, ids, max_tokens=100, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 4
    assert answer.choices[0].finish_reason == "length"


def test_embeddings(client, offline):
    texts = ["import os", "class A:"]
    given = client.embeddings.create(model="tiny", input=texts)  # as base64, decoded by the client
    as_lists = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    for i, text in enumerate(texts):
        ids = offline.tokenizer.encode(text, add_special_tokens=True)
        expected = offline.embed(ids, pooling="last")
        got = np.array(given.data[i].embedding)
        # rows do not depend on what else is in the batch; JSON keeps float32 exactly
        np.testing.assert_array_equal(got, as_lists.data[i].embedding)
        np.testing.assert_allclose(got, expected, atol=1e-6)
        assert math.isclose(float(np.linalg.norm(got)), 1.0, abs_tol=1e-6)
        one = client.embeddings.create(model="tiny", input=ids, encoding_format="float")
        np.testing.assert_array_equal(one.data[0].embedding, as_lists.data[i].embedding)
    assert given.usage.prompt_tokens == given.usage.total_tokens > 0


def test_models(client, server):
    listed = client.models.list().data
    assert [card.id for card in listed] == ["tiny", "gpt-4o-mini"]
    assert client.models.retrieve("gpt-4o-mini").root == "tiny"
    assert server.http.get("/v1/models").json()["object"] == "list"
