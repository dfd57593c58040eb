"""Load-test a server with thousands of well-behaved and misbehaving requests.

    python tools/measure/server_load_test.py --requests 5000 --concurrency 300

Starts `nbflow serve` on the bundled model and sends rounds of

    whole     completions, which must equal offline generation token for token
    stream    the same as server-sent events
    chosen    JSON of a schema, logprobs, several choices
    leaves    clients that disconnect after some chunks, or before the first
    slow      clients that read a byte at a time, or nothing
    garbage   bodies that are not JSON, or not of this API
    oversized prompts longer than the context, bodies longer than the limit

After each round every sequence must have ended and every KV page be free; in the second half of
the rounds (the first compiles kernels and fills caches) the process must not grow.  Then SIGTERM in
the middle of a round: accepted requests get complete answers, others a 503.  Prints one JSON
object; the exit code is 1 after a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

import nbflow

CONFIG = """
port = 0
[models.tiny]
path = "tiny_python"
threads = {threads}
[models.tiny.engine]
max_sequences = 64
kv_bytes = "16MiB"
[limits]
body_bytes = "256KiB"
slow_reader_s = 3
requests = 100000
connections = 100000
[log]
level = "warning"
"""
PROMPTS = [
    "import os\n",
    "class Lock:\n    def ",
    "def main(argv",
    "for name in names:\n",
    "# " + "lorem ipsum " * 30,
    "try:\n    value = int(text)\nexcept",
]
LENGTHS = (1, 7, 40)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SCHEMA |= {"additionalProperties": False}
KINDS = {"whole": 8, "stream": 8, "chosen": 2, "leaves": 4, "slow": 1, "garbage": 3, "oversized": 2}


class Load:
    """Sent requests and their results."""

    def __init__(self, url: str, expected: dict[tuple[str, int], str], seed: int) -> None:
        self.url = url
        self.expected = expected
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def one(self, client: httpx.AsyncClient, kind: str) -> None:
        prompt, n = self.random.choice(PROMPTS), self.random.choice(LENGTHS)
        try:
            status = await getattr(self, f"_{kind}")(client, prompt, n)
        except Exception as error:
            status = f"failed: {type(error).__name__}: {error}"[:300]
        self.seen[f"{kind}: {'failed' if status.startswith('failed') else status}"] += 1
        if status.startswith("failed"):
            self.wrong.append(f"{kind}: {status}")

    def _same(self, text: str, prompt: str, n: int) -> str:
        right = text == self.expected[prompt, n]
        return "ok" if right else f"failed: {text!r} is not {self.expected[prompt, n]!r}"

    async def _whole(self, client: httpx.AsyncClient, prompt: str, n: int) -> str:
        body = {"prompt": prompt, "max_tokens": n, "temperature": 0}
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return f"failed: {answer.status_code} {answer.text}"
        return self._same(answer.json()["choices"][0]["text"], prompt, n)

    async def _stream(self, client: httpx.AsyncClient, prompt: str, n: int) -> str:
        body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "stream": True}
        text, ended = "", False
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return self._same(text, prompt, n) if ended else "failed: the stream broke off"

    async def _chosen(self, client: httpx.AsyncClient, prompt: str, n: int) -> str:
        body = {"prompt": prompt, "max_tokens": 60, "n": 3, "logprobs": 2, "guided_json": SCHEMA}
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return f"failed: {answer.status_code} {answer.text}"
        for choice in answer.json()["choices"]:
            if choice["finish_reason"] == "stop":
                json.loads(choice["text"])["n"]
        return "ok"

    async def _leaves(self, client: httpx.AsyncClient, prompt: str, n: int) -> str:
        body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 2}
        with contextlib.suppress(httpx.TimeoutException):
            timeout = self.random.choice((0.001, 0.05, 60))
            async with client.stream(
                "POST", "/v1/completions", json=body, timeout=timeout
            ) as answer:
                left = self.random.randrange(6)
                async for _ in answer.aiter_bytes():
                    left -= 1
                    if left <= 0:
                        break
        return "left"

    async def _slow(self, client: httpx.AsyncClient, prompt: str, n: int) -> str:
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=256)
        body = json.dumps({"prompt": prompt, "max_tokens": 400, "stream": True, "n": 8}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        for _ in range(self.random.randrange(4)):
            await reader.read(10)
            await asyncio.sleep(0.3)
        writer.transport.abort()
        return "left"

    async def _garbage(self, client: httpx.AsyncClient, prompt: str, n: int) -> str:
        body = self.random.choice(
            [b"", b"{}", b"null", b"[" * 50_000, b'{"prompt": 1}', b'{"prompt": "\\ud800"}',
             b'{"prompt": "x", "n": 1e99}', self.random.randbytes(2000)]
        )  # fmt: skip
        head = {"content-type": self.random.choice(["application/json", "text/plain"])}
        answer = await client.post("/v1/completions", content=body, headers=head)
        fine = answer.status_code in (400, 415) and "error" in answer.json()
        return str(answer.status_code) if fine else f"failed: {answer.status_code}: {answer.text}"

    async def _oversized(self, client: httpx.AsyncClient, prompt: str, n: int) -> str:
        body = self.random.choice(
            [{"prompt": [1] * 5000}, {"prompt": "x" * 400_000}, {"prompt": "x", "n": 10_000}]
        )
        answer = await client.post("/v1/completions", json=body)
        fine = answer.status_code in (400, 413) and "error" in answer.json()
        return str(answer.status_code) if fine else f"failed: {answer.status_code}: {answer.text}"

    async def round(self, n: int, concurrency: int) -> None:
        """Send `n` requests with limited concurrency."""
        kinds = self.random.choices(list(KINDS), list(KINDS.values()), k=n)
        gate = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as client:

            async def gated(kind: str) -> None:
                async with gate:
                    await self.one(client, kind)

            await asyncio.gather(*map(gated, kinds))


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    found = re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def rss_bytes(process: subprocess.Popen[str]) -> int:
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]


def at_rest(url: str) -> str:
    """Return the resources still held after all clients left; empty if none."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    end = time.monotonic() + 30
    while True:
        held = {name: metric(url, f"vllm:{name}") for name in names}
        held["requests"] = httpx.get(f"{url}/server_info", timeout=60).json()["requests"]
        if not any(held.values()):
            return ""
        if time.monotonic() > end:
            return f"still held: {held}"
        time.sleep(0.1)


async def sigterm(load: Load, process: subprocess.Popen[str], n: int) -> dict[str, int]:
    """Stop the server during `n` requests; return their status counts."""
    seen: Counter[str] = Counter()

    async def ask(client: httpx.AsyncClient, i: int) -> None:
        prompt, length = PROMPTS[i % len(PROMPTS)], LENGTHS[-1]
        body = {"prompt": prompt, "max_tokens": length, "temperature": 0}
        try:
            answer = await client.post("/v1/completions", json=body)
        except httpx.ConnectError:
            seen["refused"] += 1
            return
        except httpx.TransportError as error:
            load.wrong.append(f"SIGTERM: an accepted request was lost: {error!r}")
            return
        seen[str(answer.status_code)] += 1
        text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else None
        if answer.status_code not in (200, 503) or (
            text is not None and text != load.expected[prompt, length]
        ):
            load.wrong.append(f"SIGTERM: {answer.status_code} {answer.text}")

    limits = httpx.Limits(max_connections=n)
    async with httpx.AsyncClient(base_url=load.url, timeout=300, limits=limits) as client:
        jobs = [asyncio.ensure_future(ask(client, i)) for i in range(n)]
        while metric(load.url, "vllm:num_requests_running") < 8 and not all(
            map(asyncio.Task.done, jobs)
        ):
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        await asyncio.gather(*jobs)
    return dict(seen)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000, help="in all rounds (2000)")
    parser.add_argument("--rounds", type=int, default=6, help="the first half warms up (6)")
    parser.add_argument("--concurrency", type=int, default=200, help="at a time (200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of the server's model (1)")
    parser.add_argument(
        "--growth", type=float, default=0.03, help="allowed growth of memory (0.03)"
    )
    arguments = parser.parse_args()
    with nbflow.load("tiny_python") as model:
        expected = {(p, n): model.generate(p, max_tokens=n).text for p in PROMPTS for n in LENGTHS}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "server.toml"
        config.write_text(CONFIG.replace("{threads}", str(arguments.threads)))
        command = [sys.executable, "-m", "nbflow", "serve", str(config)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            return run(arguments, process, expected)
        finally:
            process.kill()
            process.wait()


def run(
    arguments: argparse.Namespace,
    process: subprocess.Popen[str],
    expected: dict[tuple[str, int], str],
) -> int:
    assert process.stdout is not None
    url = "http://" + process.stdout.readline().rsplit("http://", 1)[1].strip()
    load = Load(url, expected, arguments.seed)
    sizes = []
    started = time.perf_counter()
    for i in range(arguments.rounds):
        asyncio.run(load.round(arguments.requests // arguments.rounds, arguments.concurrency))
        held = at_rest(url)
        if held:
            load.wrong.append(held)
        sizes.append(rss_bytes(process))
        print(f"round {i + 1}: {sizes[-1] / 1e6:.1f} MB, {len(load.wrong)} wrong", file=sys.stderr)
    seconds = time.perf_counter() - started
    before = sizes[(len(sizes) - 1) // 2]
    growth = (sizes[-1] - before) / before
    if growth > arguments.growth:
        load.wrong.append(f"memory has grown by {growth:.1%} in the second half")
    at_end = asyncio.run(sigterm(load, process, arguments.concurrency))
    code = process.wait(120)
    if code:
        load.wrong.append(f"exit code {code}")
    print(
        json.dumps(
            {
                "requests": arguments.requests,
                "seconds": round(seconds, 2),
                "counts": dict(sorted(load.seen.items())),
                "rss_bytes": sizes,
                "sigterm": at_end,
                "exit_code": code,
                "wrong": load.wrong[:20],
            },
            indent=2,
        )
    )
    return 1 if load.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
