"""A server process for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import httpx
import openai
import pytest

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
CONFIG = f"""
port = 0
[models.tiny]
path = "tiny_python"
aliases = ["gpt-4o-mini"]
chat_template = '''{TEMPLATE}'''
threads = 1
[log]
format = "json"
level = "debug"
"""
END_S = 60.0  # it takes a second; other work may have the cores
START_S = 300.0  # with an empty kernel cache, on cores that other work has, too


class Server:
    """A server process; ends with the ``with`` block."""

    def __init__(
        self,
        config: str,
        folder: Path,
        program: tuple[str, ...] = (),
        name: str = "server.toml",
    ) -> None:
        path = folder / name
        path.write_text(config)
        command = program or (sys.executable, "-m", "nbflow", "serve")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment["PYTHONFAULTHANDLER"] = "1"  # SIGABRT writes where it hangs
        self.process = subprocess.Popen(
            [*command, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment, cwd=folder,
        )  # fmt: skip
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.url = self._wait()
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)  # as the lines come

    def _wait(self) -> str:
        assert self.process.stdout is not None
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if "http://" not in line:
            code = self.process.wait()
            self._reader.join()
            pytest.fail(f"the server did not start ({code}): {''.join(self.log)}")
        return "http://" + line.rsplit("http://", 1)[1].strip()

    def client(self, **options: object) -> openai.OpenAI:
        """Return an official client of this server."""
        settings = {"api_key": "none", "max_retries": 0, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)

    def raw(self, method: str, path: str, body: str, headers: dict[str, str]) -> HTTPResponse:
        """Send a request with just these headers, the method as it is; return the response."""
        connection = HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        with closing(connection):
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            response.read()
            return response

    def events(self) -> list[dict]:
        """Return the lines of the log."""
        return [json.loads(line) for line in list(self.log) if line.startswith("{")]

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert found, name
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def idle(self) -> bool:
        """Return whether no sequence is in the engine."""
        both = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return not any(self.metric(name) for name in both)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait until the process has ended and return its exit code."""
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait()
            self._reader.join()
            pytest.fail(f"the server does not end: {''.join(self.log[-100:])}")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something that must become true."""
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.02)
