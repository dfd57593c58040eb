"""Chat completions with the official client."""

import asyncio
import json

import openai
import pytest
from openai import AsyncOpenAI
from server_process import TEMPLATE

from nbflow.tokenization.chat import encode_chat

MESSAGES = [
    {"role": "system", "content": "import os"},
    {"role": "user", "content": "def read(self, name):\n"},
]


def ask(client, **more):
    settings = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0} | more
    return client.chat.completions.create(**settings)


def test_answer_is_the_offline_one(client, offline):
    prompt = encode_chat(offline.tokenizer, MESSAGES, TEMPLATE)
    expected = offline.generate(prompt, max_tokens=12)
    answer = ask(client)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert (choice.finish_reason, answer.object) == (expected.finish_reason, "chat.completion")
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(expected.ids)
    assert answer.usage.total_tokens == len(prompt) + len(expected.ids)


def test_last_message_is_continued(client, offline):
    begun = [*MESSAGES, {"role": "assistant", "content": "    with"}]
    prompt = encode_chat(offline.tokenizer, begun, TEMPLATE, continue_final_message=True)
    assert offline.tokenizer.decode(prompt).endswith("assistant:     with")
    expected = offline.generate(prompt, max_tokens=12)
    more = {"extra_body": {"continue_final_message": True}}
    answer = ask(client, messages=begun, **more)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].message.content == expected.text
    whole = "".join(c.choices[0].delta.content or "" for c in ask(
        client, messages=begun, stream=True, **more))  # fmt: skip
    assert whole == expected.text
    answered = encode_chat(offline.tokenizer, begun, TEMPLATE)
    assert ask(client, messages=begun).usage.prompt_tokens == len(answered)
    with pytest.raises(openai.BadRequestError, match="give one of them"):
        ask(client, extra_body={"continue_final_message": True, "add_generation_prompt": True})


def test_any_name_and_no_v1(server):
    """The Python example of Inferflow's README."""
    url = f"{server.url}/"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as other:
        answer = ask(other, model="default")
        assert answer.model == "tiny"
        assert ask(other, model="gpt-4o-mini").model == "gpt-4o-mini"
        stream = list(ask(other, model="gpt-3.5-turbo", stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in stream) == (
        answer.choices[0].message.content
    )


def test_second_time_the_prompt_comes_from_the_cache(client):
    long = [{"role": "user", "content": "import collections\n" * 12}]
    first = ask(client, messages=long)
    second = ask(client, messages=long)
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    salted = ask(client, messages=long, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_stream_is_the_whole_answer(client, seed):
    parameters = {"temperature": 0.9, "seed": seed, "n": 2, "extra_body": {"top_k": 20}}
    whole = ask(client, **parameters)
    options = {"include_usage": True}
    chunks = list(ask(client, stream=True, stream_options=options, **parameters))
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    *parts, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(part.usage is None for part in parts)
    for i in range(2):
        mine = [c.choices[0] for c in parts if c.choices[0].index == i]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        text = "".join(choice.delta.content or "" for choice in mine)
        assert text == whole.choices[i].message.content
        reasons = [choice.finish_reason for choice in mine]
        assert reasons[:-1] == [None] * (len(mine) - 1)
        assert reasons[-1] == whole.choices[i].finish_reason
        assert mine[-1].delta.content is None  # an empty delta ends


def test_bytes_of_the_stream(server):
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True}
    body |= {"stream_options": {"continuous_usage_stats": True}}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    usages = [json.loads(event[6:])["usage"]["completion_tokens"] for event in events[:-2]]
    assert usages == sorted(usages)
    assert (usages[0], usages[-1]) == (0, 3)


def test_async_clients_side_by_side(server, client):
    prompts = [f"class A{i}:\n    def" for i in range(16)]

    async def one(async_client, prompt):
        messages = [{"role": "user", "content": prompt}]
        stream = await async_client.chat.completions.create(
            model="gpt-4o-mini", messages=messages, max_tokens=8, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them():
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as async_client:
            return await asyncio.gather(*(one(async_client, prompt) for prompt in prompts))

    together = asyncio.run(all_of_them())
    for prompt, text in list(zip(prompts, together, strict=True))[::5]:
        alone = ask(client, messages=[{"role": "user", "content": prompt}], max_tokens=8)
        assert alone.choices[0].message.content == text


def test_logprobs(client, offline):
    answer = ask(client, logprobs=True, top_logprobs=3, max_tokens=5)
    prompt = encode_chat(offline.tokenizer, MESSAGES, TEMPLATE)
    expected = offline.generate(prompt, max_tokens=5)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == expected.text
    assert bytes(b for entry in content for b in entry.bytes).decode() == expected.text
    for entry, logprob in zip(content, expected.logprobs, strict=True):
        assert entry.logprob == pytest.approx(logprob, abs=1e-4)  # other batch, float16 cache
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy: the best is chosen


def test_stop_texts(client):
    whole = ask(client, max_tokens=40).choices[0].message.content
    stop = whole[10:13]
    cut = ask(client, max_tokens=40, stop=[stop, "never there"])
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].stop_reason == stop
    kept = ask(client, max_tokens=40, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == whole[: whole.index(stop)] + stop
    parts = ask(client, max_tokens=40, stop=stop, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in parts) == whole[: whole.index(stop)]


def test_seeds(client):
    texts = [
        ask(client, temperature=1.0, seed=s, max_tokens=24).choices[0].message.content
        for s in (5, 5, 6, -1, 2**64 - 1)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4]  # the same 64 bits


def test_parts_of_content_and_names_of_limits(client):
    parts = [{"type": "text", "text": "def read(self, name):"}, {"type": "text", "text": ""}]
    messages = [MESSAGES[0], {"role": "user", "content": parts}]
    answer = ask(client, messages=messages, max_tokens=openai.NOT_GIVEN, max_completion_tokens=12)
    assert answer.choices[0].message.content == ask(client).choices[0].message.content


def test_json_schema(client):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = ask(client, response_format=form, max_tokens=100, temperature=1.0, seed=3)
    assert 0 <= json.loads(answer.choices[0].message.content)["n"] <= 99
    choice = ask(client, extra_body={"guided_choice": ["yes", "no"]})
    assert choice.choices[0].message.content in ("yes", "no")


def test_best_of(client):
    best = ask(
        client, temperature=1.0, seed=7, logprobs=True, extra_body={"best_of": 4}, max_tokens=6
    )
    each = ask(client, temperature=1.0, seed=7, logprobs=True, n=4, max_tokens=6)

    def mean(choice):
        return sum(e.logprob for e in choice.logprobs.content) / len(choice.logprobs.content)

    assert mean(best.choices[0]) == pytest.approx(max(map(mean, each.choices)), abs=1e-4)
    assert len(best.choices) == 1
