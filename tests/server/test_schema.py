"""Whatever is sent that fits the description of the endpoints, or nearly, the server answers."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case, GenerationMode

MAX_EXAMPLES = 12  # per endpoint; tools/load_test.py goes further
schema = schemathesis.pytest.from_fixture("document")


@pytest.fixture
def document(server):
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    document.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    return document


@schema.parametrize()
@settings(
    max_examples=MAX_EXAMPLES, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
def test_every_endpoint(case: Case) -> None:
    if isinstance(case.body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_len", "max_new_tokens"):
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 3)
    answer = case.call()
    assert answer.status_code < 500, answer.text
    assert "x-request-id" in answer.headers
    if answer.status_code >= 400 and case.path not in ("/process_query",):
        assert answer.json()["error"]["message"]
