"""Embeddings over HTTP: scheduled like other requests, and cancelled with their client."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy as np
import pytest
from server_process import CONFIG, Server, eventually

import nbflow

PROMPT = "def __init__(self"


def config_of(offline, partition, pages, step=32):
    """Return a configuration with a number of KV pages and tokens of a step."""
    ranks = partition.count("&") + 1
    kv_bytes = pages * offline.workers[0].storage.page_bytes // ranks
    model = f'path = "tiny_python"\npartition = "{partition}"'
    return (
        CONFIG.replace('path = "tiny_python"', model)
        + f"[models.tiny.engine]\nkv_bytes = {kv_bytes}\nmax_step_tokens = {step}\n"
    )


def vectors(server, texts, status=200):
    answer = server.http.post("/v1/embeddings", json={"input": texts, "pooling": "mean"})
    assert answer.status_code == status, answer.text
    body = answer.json()
    return body["error"] if status != 200 else [d["embedding"] for d in body["data"]]


def stream_text(server):
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    return server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]


@pytest.mark.parametrize("partition", ["0&1"])
def test_texts_wait_for_pages_while_streams_run(offline, tmp_path, partition):
    texts = [(np.arange(150) * 7 % 2000 + i).tolist() for i in range(6)]
    with nbflow.load("tiny_python", threads=1, partition=partition) as model:
        expected = model.embed_batch(texts)
    with Server(config_of(offline, partition, 4), tmp_path) as server:
        with ThreadPoolExecutor(6) as pool:
            streams = [pool.submit(stream_text, server) for _ in range(3)]
            embedded = [pool.submit(vectors, server, texts) for _ in range(2)]
            for future in embedded:
                np.testing.assert_array_equal(np.array(future.result(), np.float32), expected)
            assert len({future.result() for future in streams}) == 1
        error = vectors(server, [list(range(257))], status=400)
        assert "has 257 tokens, but the key/value cache holds 256" in error["message"]
        assert vectors(server, [[1, 2, 3]])
        assert server.metric("vllm:prompt_tokens_total") >= 12 * 150
        assert server.idle()
        assert server.stop() == 0


def test_a_client_that_hangs_up_and_time_that_is_over(offline, tmp_path):
    config = config_of(offline, "0", 8, step=1) + "[limits]\nrequest_s = 2\n"
    texts = [(np.arange(500) * 7 % 2000).tolist()] * 100  # 50,000 steps: more than there is time
    with Server(config, tmp_path) as server:
        url = urlsplit(server.url)
        body = json.dumps({"input": texts, "pooling": "mean"}).encode()
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-length: {len(body)}"
        with socket.create_connection((url.hostname, url.port)) as client:
            client.sendall(f"{head}\r\ncontent-type: application/json\r\n\r\n".encode() + body)
            eventually(lambda: not server.idle())
        eventually(server.idle)
        aborted = 'vllm:request_success_total{finished_reason="abort",model_name="tiny"} 100.0'
        assert aborted in server.http.get("/metrics").text
        error = vectors(server, texts, status=504)
        assert "the request exceeded its deadline" in error["message"]
        eventually(server.idle)
        assert vectors(server, [[1, 2, 3]])
        assert server.stop() == 0
