"""Stop texts, and the text that tokens carry to callers."""

import pytest

import nbflow
from nbflow.engine.outputs import RequestDelta, text_of
from nbflow.engine.request import Request
from nbflow.engine.stop_checker import StopChecker
from nbflow.sampling import Greedy


@pytest.fixture(scope="module")
def tokenizer():
    return nbflow.load_tokenizer("tiny_python")


def run(tokenizer, text, stops, max_tokens=100, step=2, **fields):
    """Return a request that generates a text, `step` tokens at a time, and its outputs."""
    ids = tokenizer.encode(text)
    request = Request([1], max_tokens, Greedy(), stop_texts=stops, **fields)
    checker, outputs, ended = StopChecker(lambda: tokenizer), [], []
    for start in range(0, len(ids), step):
        delta = RequestDelta(request)
        for token in ids[start : start + step]:
            if request.finish_reason is None:
                request.accept(token, -1.0)
        delta.add(start)
        ended += checker.check([delta])
        delta.close()
        outputs += delta.tokens
        if request.finish_reason is not None:
            break
    return request, outputs, ended, checker


def written(outputs):
    return "".join(output.text or "" for output in outputs)


@pytest.mark.parametrize("step", [1, 3, 50])
@pytest.mark.parametrize("include", [False, True])
def test_text_ends_at_the_stop_text(tokenizer, step, include):
    text = "def f(x):\n    return x"
    request, outputs, ended, _ = run(
        tokenizer, text, ("):", "zz"), step=step, include_stop_text=include
    )
    assert written(outputs) == ("def f(x):" if include else "def f(x")
    assert written(outputs) == text_of(request, tokenizer) == request.text
    assert (request.finish_reason, request.stop_reason) == ("stop", "):")
    assert ended == [request]
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].token is None
    assert request.ids == [output.token for output in outputs[:-1]]
    assert len(request.logprobs) == len(request.ids) < len(tokenizer.encode(text))


def test_text_that_is_held_back_comes_with_the_end(tokenizer):
    n = len(tokenizer.encode("def f(x)"))
    request, outputs, ended, _ = run(tokenizer, "def f(x)", ("x):",), max_tokens=n)
    assert written(outputs) == "def f(x)"
    assert written(outputs[:-1]) != "def f(x)"
    assert outputs[-1].finish_reason == request.finish_reason == "length"
    assert request.stop_reason is None
    assert not ended


def test_text_that_is_held_back_is_returned_when_a_request_is_ended(tokenizer):
    request, outputs, _, checker = run(tokenizer, "def f(x)", ("x):",))
    assert request.finish_reason is None
    assert written(outputs) + checker.finish(request) == "def f(x)"
    assert checker.finish(request) is None


def test_tokens_of_requests_without_stop_texts_have_no_text(tokenizer):
    _, outputs, ended, _ = run(tokenizer, "def f(x)", ())
    assert not ended
    assert all(output.text is None for output in outputs)
