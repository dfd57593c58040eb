"""A server for the tests of this folder, and the same model without one to compare with."""

from collections.abc import Iterator

import openai
import pytest
from server_process import CONFIG, Server

import nbflow


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(CONFIG, tmp_path_factory.mktemp("server")) as running:
        yield running
        assert running.stop() == 0, "".join(running.log)


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="session")
def offline() -> Iterator[nbflow.LLM]:
    with nbflow.load("tiny_python", threads=1) as model:
        yield model
