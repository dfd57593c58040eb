"""From the decoding parameters of a body to a strategy."""

from __future__ import annotations

from typing import Any

from nbflow.engine.request import Request
from nbflow.server.errors import ApiError
from nbflow.server.fields import Sampling
from nbflow.server.served import Served

_NOT_YET = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "allowed_token_ids": None,
    "bad_words": [],
    "min_tokens": 0,
    "response_format": None,
    "structured_outputs": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
}


def make_request(
    served: Served, body: Sampling, prompt: list[int], max_tokens: int | None
) -> Request:
    """Return a request of the engine; raise if the model cannot do what the body asks for."""
    for name, neutral in _NOT_YET.items():
        value = getattr(body, name)
        if value is not None and value != neutral:
            if name == "response_format" and value.type == "text":
                continue
            raise ApiError(400, f"{name} is not supported", param=name)
    decoding, parameters = _strategy(served, body)
    request = served.model.make_request(
        prompt,
        served.model.spec.max_context if max_tokens is None else max_tokens,
        decoding,
        0,
        body.ignore_eos,
        **parameters,
    )
    if body.stop_token_ids:
        request.stop_ids = request.stop_ids | frozenset(body.stop_token_ids)
    return request


def _strategy(served: Served, body: Sampling) -> tuple[str, dict[str, Any]]:
    """Return a strategy's name and parameters."""
    given = {
        name: served.defaults.get(name) if getattr(body, name) is None else getattr(body, name)
        for name in ("temperature", "top_k", "top_p", "min_p")
    }
    if body.decoding is not None:
        stated = {name: value for name, value in given.items() if getattr(body, name) is not None}
        return body.decoding, stated
    temperature = 1.0 if given["temperature"] is None else given["temperature"]
    if temperature == 0:
        return "greedy", {}
    neutral = {"top_k": (None, 0, -1), "top_p": (None, 1.0), "min_p": (None, 0.0)}
    filters = {name: given[name] for name, off in neutral.items() if given[name] not in off}
    if len(filters) > 1:
        raise ApiError(400, f"{', '.join(filters)} together are not supported")
    if not filters:
        return "sample", {"temperature": temperature}
    (name,) = filters
    return name, {"temperature": temperature, **filters}
