"""Fuzzing of the endpoints with valid and nearly valid requests of the OpenAPI document."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

MAX_EXAMPLES = 6  # of each endpoint and mode
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_len", "max_new_tokens", "min_tokens")
quick = settings(
    max_examples=MAX_EXAMPLES, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.fixture(scope="module")
def document(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def check(case, seen):
    if isinstance(case.body, dict):
        for name in LENGTHS:
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 3)
    answer = case.call()
    seen.append(answer.status_code)
    assert answer.status_code < 500, answer.text
    assert "x-request-id" in answer.headers
    if answer.status_code >= 400 and case.path != "/process_query":
        assert answer.json()["error"]["message"]


def run(cases, statuses):
    @quick
    @given(case=cases)
    def one(case):
        check(case, statuses)

    one()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_endpoint(document, mode):
    seen: dict[str, list[int]] = {}
    for result in document.get_all_operations():
        operation = result.ok()
        if mode == GenerationMode.NEGATIVE and not operation.body:
            continue  # nothing that could be wrong
        statuses = seen.setdefault(operation.path, [])
        cases = operation.as_strategy(generation_mode=mode)
        run(cases, statuses)
    assert len(seen) >= (14 if mode == GenerationMode.POSITIVE else 7)
    if mode == GenerationMode.POSITIVE:
        assert 200 in seen["/v1/models"]
    else:
        assert 400 in seen["/v1/chat/completions"]
