"""Models with encoders over HTTP: translation, masked tokens and labels."""

from __future__ import annotations

import pytest
from encoder_models import bert, classifier, translator
from server_process import Server

import nbflow

CONFIG = """
port = 0
request_templates = true
[models.m2m]
path = "m2m"
threads = 1
encoder_template = "{__fr__}{ }{query}{</s>}"
decoder_template = "{#2}{__zh__}{res_prefix}"
[models.bert]
path = "bert"
threads = 1
kv = "f32"
[models.labels]
path = "labels"
threads = 1
kv = "f32"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("encoders")
    translator(path / "m2m", eos_token_id=5)
    bert(path / "bert")
    classifier(path / "labels")
    return path


@pytest.fixture(scope="module")
def server(folder):
    with Server(CONFIG, folder) as running:
        yield running
        assert running.stop() == 0


def post(server, path, status=200, **body):
    answer = server.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_translation(server, folder):
    with nbflow.load(folder / "m2m", threads=1) as model:
        plain = model.generate("w10 w11", 6, target_lang="zh", ignore_eos=True)
        french = model.generate([78, 10, 11, 2], 6, decoder_ids=[2, 77], ignore_eos=True)
        begun = model.generate([76, 10, 11, 2], 6, decoder_ids=[2, 78, 20], ignore_eos=True)
    options = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    found = post(server, "/v1/completions", prompt="w10 w11", target_lang="zh", **options)
    assert found["choices"][0]["token_ids"] == plain.ids
    both = {"target_lang": "fr", "source_lang": "en", "decoder_prefix": "w20"}
    found = post(server, "/v1/completions", prompt="w10 w11", **both, **options)
    assert found["choices"][0]["token_ids"] == begun.ids
    messages = [{"role": "user", "content": "w10 w11"}]
    found = post(server, "/v1/chat/completions", messages=messages, **options)
    assert found["choices"][0]["token_ids"] == french.ids
    native = {"text": "w10 w11", "is_streaming_mode": False, "decoding_alg": "greedy"}
    native |= {"max_output_len": 3}
    with nbflow.load(folder / "m2m", threads=1) as model:
        expected = model.generate([78, 10, 11, 2], 3, decoder_ids=[2, 77, 20])
        other = model.generate([76, 10, 11], 3, decoder_ids=[2])
    assert post(server, "/", **native, res_prefix="w20")["text"] == f" {expected.text}"
    templates = {"encoder_input_template": "{__en__}{query}", "decoder_input_template": "{#2}"}
    assert post(server, "/", **native, **templates)["text"] == other.text
    wrong = post(server, "/v1/completions", 400, prompt="w10", target_lang="xx", **options)
    assert "unknown target_lang 'xx'" in wrong["error"]["message"]


def test_fill_mask(server, folder):
    with nbflow.load(folder / "bert", kv="f32", threads=1) as model:
        (one,) = nbflow.fill_mask(model, "w10 [MASK]", 2)
    found = post(server, "/fill-mask", model="bert", inputs="w10 [MASK]", parameters={"top_k": 2})
    assert [list(entry) for entry in found] == [["score", "token", "token_str", "sequence"]] * 2
    assert found == [vars(entry) for entry in one]
    several = post(server, "/v1/fill-mask", model="bert", inputs=["w10 [MASK]", "[MASK] [MASK]"])
    assert several[0][:2] == found
    assert [len(mask) for mask in several[1]] == [5, 5]
    for body, message in (
        ({"model": "m2m", "inputs": "[MASK]"}, "continues text and fills no masks"),
        ({"model": "labels", "inputs": "[MASK]"}, "is an encoder without a head"),
        ({"model": "bert", "inputs": "w10"}, "the text has no mask"),
        ({"model": "bert", "inputs": []}, "inputs must have 1 to"),
        ({"model": "bert", "inputs": "[MASK] " * 60, "parameters": {"top_k": 1000}}, "top_k"),
        ({"model": "bert", "inputs": "[MASK]", "parameters": {"targets": ["w3"]}}, "targets"),
    ):
        assert message in post(server, "/fill-mask", 400, **body)["error"]["message"]


def test_classify(server, folder):
    with nbflow.load(folder / "labels", kv="f32", threads=1) as model:
        expected = nbflow.classify(model, [("w10 w20", "w30"), ("w11", "w31")])
    body = {"model": "labels", "input": ["w10 w20", "w11"], "text_pair": ["w30", "w31"]}
    found = post(server, "/classify", **body)
    assert [entry["label"] for entry in found["data"]] == [one.label for one in expected]
    assert found["data"][1]["probs"] == expected[1].scores.tolist()
    assert found["usage"]["prompt_tokens"] == 11
    for changed, message in (
        ({"model": "bert"}, "has no classification head"),
        ({"text_pair": "w30"}, "text_pair must have a text for each of 2, got 1"),
    ):
        assert message in post(server, "/classify", 400, **body | changed)["error"]["message"]
