"""Concurrent clients, some of which disconnect or send garbage; no page leaks."""

import asyncio
import json
import random

import httpx
from server_process import eventually

import nbflow

N = 120


async def polite(client, prompt, n, expected):
    answer = await client.post(
        "/v1/completions", json={"prompt": prompt, "temperature": 0, "max_tokens": n}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected


async def searches(client, prompt, expected):
    body = {"prompt": prompt, "use_beam_search": True, "beam_width": 3, "n": 2, "max_tokens": 9}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert [c["text"] for c in answer.json()["choices"]] == expected


async def leaves(client, prompt, after):
    body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_bytes():
            after -= 1
            if after <= 0:
                return


async def rude(client, rng):
    body = rng.choice([b"", b"{}", b"[" * 1000, b'{"prompt": 1}', rng.randbytes(300)])
    head = {"content-type": "application/json"}
    answer = await client.post("/v1/completions", content=body, headers=head)
    assert answer.status_code in (400, 415)


async def oversized(client):
    answer = await client.post("/v1/completions", json={"prompt": [1] * 3000})
    assert answer.status_code == 400


def test_many_streams(server, offline):
    rng = random.Random(0)
    prompts = ["import os\n", "class Lock:\n    def ", "def main(argv", "for name in names:\n"]
    expected = {(p, n): offline.generate(p, max_tokens=n).text for p in prompts for n in (1, 9)}
    found = {p: nbflow.beam_search(offline, p, 9, num_beams=3, n=2) for p in prompts}

    async def run():
        limits = httpx.Limits(max_connections=N)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            jobs = []
            for i in range(N):
                prompt, kind = rng.choice(prompts), i % 6
                if i % 12 == 2:
                    jobs.append(searches(client, prompt, [g.text for g in found[prompt]]))
                elif kind < 3:
                    n = rng.choice((1, 9))
                    jobs.append(polite(client, prompt, n, expected[prompt, n]))
                elif kind == 3:
                    jobs.append(leaves(client, prompt, rng.randrange(4)))
                else:
                    jobs.append(rude(client, rng) if kind == 4 else oversized(client))
            await asyncio.gather(*jobs)

    asyncio.run(run())
    eventually(server.idle)
    assert server.metric("vllm:kv_cache_usage_perc") == 0  # every page is free
    assert server.process.poll() is None
    assert json.loads(server.http.get("/server_info").text)["requests"] == 0
